"""A group with only one process: it uses its own tensors in the place of the others'.

The results have the shapes of the real group's results, and need the same memory and about the same
time, but the values are wrong. Plans use it, because they run without the other processes, on
tensors without values.
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
    """A `lema_neuron.comm.Comm` for plans, in which the other processes are absent.

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
        """Return copies of this rank's tensor, one for each rank, joined."""
        return torch.cat([tensor.detach()] * self.size, dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's share of its own tensor."""
        return share(tensor.detach(), dim, self).clone(memory_format=torch.contiguous_format)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:  # noqa: ARG002 - one rank alone
        """Return this rank's own tensor."""
        return self.all_reduce(tensor)

    def barrier(self) -> None:
        """Do nothing: there is no other process."""

    def split(self, parts: Sequence[Sequence[int]]) -> Comm:
        """Return this rank's part."""
        mine = next(part for part in parts if self.rank in part)
        return StandIn(list(mine).index(self.rank), len(mine))


def without_values(tensor: Tensor) -> bool:
    """Whether a tensor has only a shape: then a layer is traced without values, and other ranks
    do not take part.
    """
    return tensor.is_meta or isinstance(tensor, FakeTensor)
