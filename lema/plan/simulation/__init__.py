"""A training step in virtual time: the orders of a real one, on a device, a link and a disk that
only take time (docs/internals/reading.md).
"""
