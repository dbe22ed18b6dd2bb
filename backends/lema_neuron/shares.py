"""From a layout: the size of a parameter on a rank, the ranks that hold the same part, and the
gradient's sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from torch import Tensor

from lema.backend.layout import Layout, axis_spans, consolidate, shard
from lema_neuron.comm import Comm

__all__ = ["Part", "along", "in_order", "is_plain", "local_size", "replicated_part", "sharded_part"]


def local_size(layout: Layout, size: int) -> int:
    """Return how long the axis is on a rank; raises `ConfigError` if it cannot be cut."""
    return sum(length for _, length in axis_spans(layout, size, 0))


def along(layout: Layout, dim: int) -> Layout:
    """Return the same layout of another dimension."""
    return replace(
        layout, dim=dim, parts=tuple((size, along(part, dim)) for size, part in layout.parts)
    )


def sharing(layout: Layout, size: int) -> tuple[tuple[int, ...], ...]:
    """Return the ranks in groups that hold the same part of the axis."""
    groups: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for rank in range(layout.tp):
        groups.setdefault(tuple(axis_spans(layout, size, rank)), []).append(rank)
    return tuple(tuple(group) for group in groups.values())


@lru_cache(maxsize=64)
def in_order(layout: Layout, size: int) -> tuple[int, ...]:
    """Return where each position of the axis is in the ranks' shares, joined in order; for
    copies, the first one.
    """
    source_positions: dict[int, int] = {}
    position = 0
    for rank in range(layout.tp):
        for start, length in axis_spans(layout, size, rank):
            for offset in range(length):
                source_positions.setdefault(start + offset, position + offset)
            position += length
    return tuple(source_positions[index] for index in range(size))


def is_plain(layout: Layout, size: int) -> bool:
    """Whether the ranks' shares, joined in order, are the whole."""
    position = 0
    for rank in range(layout.tp):
        for start, length in axis_spans(layout, size, rank):
            if start != position:
                return False
            position += length
    return position == size


@dataclass(frozen=True)
class Part:
    """How one parameter is divided over the ranks, and how its gradient is summed.

    A parameter that is whole on every rank may have been used for a part of the tokens only
    (sequence parallelism), or for a part of the next layer. Then its gradient is partial and is
    summed. In a norm, only one of its copies counts.

    Attributes:
        layout: how it is cut; None: every rank holds all of it.
        sum_over: the ranks over which its gradient is summed; None: the gradient is complete.
        counted: this rank's copy is the one that counts.
    """

    layout: Layout | None = None
    sum_over: Comm | None = None
    counted: bool = True

    @property
    def tp_grad(self) -> str:
        """`none`, or `sum` if the gradient is to be summed."""
        return "none" if self.sum_over is None else "sum"

    def shard(self, full: Tensor, rank: int) -> Tensor:
        """Return a rank's share of the whole parameter, in memory of its own."""
        return full.clone() if self.layout is None else shard(full, self.layout, rank)

    def consolidate(self, mine: Tensor, comm: Comm) -> Tensor:
        """Return the whole parameter, or its reduced gradient, from all ranks' shares; every rank
        calls it.

        Raises:
            DataError: copies differ from rank to rank.
        """
        stacked = comm.all_gather(mine.detach().unsqueeze(0), 0)
        return consolidate(list(stacked.unbind(0)), self.layout or Layout("replicated", comm.size))


def sharded_part(layout: Layout, size: int, comm: Comm) -> Part:
    """Return the part of a parameter that is cut; ranks that hold copies of a share sum their
    gradients.
    """
    groups = sharing(layout, size)
    mine = next(group for group in groups if comm.rank in group)
    return Part(layout, comm.split(groups) if len(mine) > 1 else None, comm.rank == mine[0])


def replicated_part(comm: Comm, *, partial: bool) -> Part:
    """Return the part of a parameter that is whole on every rank, with a gradient that is
    partial or complete.
    """
    return Part(sum_over=comm if partial and comm.size > 1 else None, counted=comm.rank == 0)
