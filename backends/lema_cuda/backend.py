"""The `cuda` backend."""

from __future__ import annotations

from lema.backend import BackendOptions
from lema.errors import BackendUnavailable

__all__ = ["CudaBackend"]


class CudaBackend:
    """Being built."""

    def __init__(self, device: str = "cuda", options: BackendOptions | None = None) -> None:  # noqa: ARG002 - the seam's
        raise BackendUnavailable("no CUDA device can be used", where=f"device: {device}", how="write device: cpu")
