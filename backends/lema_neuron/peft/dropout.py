"""Dropout with the mask of the whole activation, so that any number of ranks drops the same
numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from lema.backend.layout import Layout, shard
from lema_neuron.comm import Comm
from lema_neuron.shares import along

__all__ = ["ShardedDropout"]


class ShardedDropout(nn.Module):
    """Dropout on this rank's share of an activation; every rank draws the whole mask and uses its
    share.

    Args:
        p: the probability that a number is dropped.
        layout: how the activation is divided over the ranks; its `dim` is a dimension of the
            activation.
        size: the length of that dimension over all ranks; None: its length here times the number of
            ranks.
        comm: the group; its generators are in the same state.
    """

    def __init__(self, p: float, layout: Layout, size: int | None, comm: Comm) -> None:
        super().__init__()
        self.p = p
        self.layout = layout
        self.size = size
        self.comm = comm

    def forward(self, input: Tensor) -> Tensor:
        """Drop numbers, and scale the others by `1 / (1 - p)`."""
        if not self.training:
            return input
        shape = list(input.shape)
        dim = self.layout.dim % input.dim()
        shape[dim] = self.size or shape[dim] * self.comm.size
        mask = dropout(torch.ones(shape, dtype=input.dtype, device=input.device), self.p)
        return input * shard(mask, along(self.layout, dim), self.comm.rank)

    def extra_repr(self) -> str:
        """Return the probability, for torch's description of the module."""
        return f"p={self.p}"
