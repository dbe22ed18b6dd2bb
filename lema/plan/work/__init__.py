"""The work of a step: what a micro-batch takes of memory and operations in each layer and in the
head, whole or in chunks, and what the step takes that is made of such micro-batches.
"""
