"""What comes after the layers: the head, the loss, and the gradients of weights outside the layers.

docs/internals/engine.md describes the folder.
"""
