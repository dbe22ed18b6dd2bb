"""What expands the weights of a model that is published quantised: transformers' quantizers, and
ours beside them.
"""
