"""A group whose ranks are threads of this process: for what a few tensors show, without starting
processes.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import torch
from torch import Tensor

from lema_neuron.comm import Comm, share

PATIENCE = 30.0  # seconds, for a rank that failed alone


class Threads:
    """One rank's view of the group; what the ranks hand each other lies in a list that they
    share.
    """

    def __init__(self, rank: int, size: int, between: list[Any], barrier: Barrier) -> None:
        self.rank = rank
        self.size = size
        self._between = between
        self._barrier = barrier
        self.sent = 0  # elements that this rank has handed to the others

    def _exchanged(self, tensor: Tensor) -> list[Tensor]:
        self.sent += tensor.numel()
        self._between[self.rank] = tensor.detach().clone()
        self._barrier.wait(PATIENCE)
        found = list(self._between)
        self._barrier.wait(PATIENCE)
        return found

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._exchanged(tensor)).sum(0)

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        return torch.cat(self._exchanged(tensor), dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        return share(self.all_reduce(tensor), dim, self).clone()

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        return self._exchanged(tensor)[source]

    def barrier(self) -> None:
        self._barrier.wait(PATIENCE)

    def split(self, parts: Sequence[Sequence[int]]) -> Comm:
        raise NotImplementedError(parts)


def on_ranks(count: int, work: Callable[[Threads], Any]) -> list[Any]:
    """Return what `work` finds on each of so many ranks."""
    between = [None] * count
    barrier = Barrier(count)

    def one(rank: int) -> Any:
        try:
            return work(Threads(rank, count, between, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))
