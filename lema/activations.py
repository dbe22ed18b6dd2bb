"""Boundary activations: each micro-batch's input to each layer, kept from the forward to the backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["BoundaryArena"]


class BoundaryArena:
    """All boundary activations of one step in one allocation.

    Kept one by one they would lie in the heap between the short-lived tensors of their layers, and the holes those
    leave behind would grow with the depth of the model.

    Args:
        hidden: the hidden states before the first layer that keeps any, `[batch, sequence, hidden]` per micro-batch.
        layers: which layers keep their inputs.
    """

    def __init__(self, hidden: Sequence[Tensor], layers: range) -> None:
        self._lowest = layers.start
        self._shapes = [state.shape for state in hidden]
        sizes = [state.numel() for state in hidden]
        self._starts = [sum(sizes[:index]) for index in range(len(sizes))]
        self._layers = torch.empty((len(layers), sum(sizes)), dtype=hidden[0].dtype, device=hidden[0].device)

    def keep(self, layer: int, index: int, state: Tensor) -> Tensor:
        """Copy micro-batch `index`'s input to `layer` into its place, and return that place.

        A state of another shape or dtype than those before the first layer has no place: it is kept as it is.
        """
        if state.shape != self._shapes[index] or state.dtype != self._layers.dtype:
            return state.detach()
        start = self._starts[index]
        return self._layers[layer - self._lowest, start : start + state.numel()].view(state.shape).copy_(state.detach())
