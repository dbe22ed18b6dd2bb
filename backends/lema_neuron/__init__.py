"""AWS Trainium: layers divided among NeuronCores, or among processes of this machine that stand for them."""

__all__: list[str] = []
