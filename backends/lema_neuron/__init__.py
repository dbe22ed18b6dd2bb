"""AWS Trainium: layers divided among NeuronCores, or among processes of this machine that
emulate them.
"""

__all__: list[str] = []
