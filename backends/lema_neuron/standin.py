"""A group of which one process is there: it answers for the others with what it has itself.

What comes out has the shapes, and takes the memory and about the time, of what the group would compute, and not its
values. A plan is made with it, where the other processes are not there, and where tensors have no values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lema_neuron.comm import Comm, share

__all__ = ["StandIn", "without_values"]


@dataclass(frozen=True)
class StandIn:
    """A `lema_neuron.comm.Comm` for plans.

    Attributes:
        rank: this process's place.
        size: how many processes the group would have.
    """

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return a tensor of that shape."""
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Return so many of this rank's, joined."""
        return torch.cat([tensor.detach()] * self.size, dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's share of its own."""
        return share(tensor.detach(), dim, self).clone(memory_format=torch.contiguous_format)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:  # noqa: ARG002
        """Return this rank's own."""
        return self.all_reduce(tensor)

    def barrier(self) -> None:
        """Nobody is waited for."""

    def split(self, parts: Sequence[Sequence[int]]) -> Comm:
        """Return this rank's part."""
        mine = next(part for part in parts if self.rank in part)
        return StandIn(list(mine).index(self.rank), len(mine))


def without_values(tensor: Tensor) -> bool:
    """Whether a tensor has a shape alone: then a layer is looked at, not run, and other ranks do not take part."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)
