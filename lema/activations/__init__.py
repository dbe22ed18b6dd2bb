"""Activations between the forward and the backward."""

from lema.activations.arena import BoundaryArena, StepBoundaries, graph_input

__all__ = ["BoundaryArena", "StepBoundaries", "graph_input"]
