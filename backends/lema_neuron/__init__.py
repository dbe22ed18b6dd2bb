"""AWS Trainium. So far only what LEMA's doctor looks at there; the backend itself is still to come."""

__all__: list[str] = []
