"""The processes that hold the same part of a copy, on a lazy device: their sums are part of the
graph.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lema.backend import Gathering, Replicas, Upload
from lema_neuron.comm import Comm

__all__ = ["LazyReplicas"]


class LazyReplicas:
    """`lema.backend.protocols.Replicas` whose tensors go through the graph's collectives, and all
    else through hosts.

    Args:
        replicas: the processes, connected through their hosts.
        comm: the same, connected through their devices; every graph names the groups of all ranks.
    """

    def __init__(self, replicas: Replicas, comm: Comm) -> None:
        self._replicas = replicas
        self._comm = comm

    @property
    def rank(self) -> int:
        """This process's place among those with the same part."""
        return self._replicas.rank

    @property
    def size(self) -> int:
        """The number of these processes."""
        return self._replicas.size

    @property
    def local_rank(self) -> int:
        """This process's place among those of this machine."""
        return self._replicas.local_rank

    @property
    def local_size(self) -> int:
        """How many of them run on this machine."""
        return self._replicas.local_size

    @property
    def first(self) -> bool:
        """Whether this process is the one among all that writes and reports."""
        return self._replicas.first

    @property
    def num_processes(self) -> int:
        """How many processes there are in all."""
        return self._replicas.num_processes

    def sum(self, tensor: Tensor) -> None:
        """Add up a tensor over the processes with the same part, in place; it runs with its
        graph.
        """
        if self.size > 1:
            tensor.copy_(self._comm.all_reduce(tensor))

    def gather(self, upload: Upload, target: Tensor) -> Gathering:
        """Put the parts together in `target`; nothing begins before the graph runs."""
        target.copy_(self._comm.all_gather(upload.wait(), 0))
        upload.release()
        return self

    def wait(self) -> None:
        """Do nothing: operations after `gather` run after it in the graph."""

    def exchange(self, value: Any) -> list[Any]:
        """Gather from host to host."""
        return self._replicas.exchange(value)

    def everyone(self, value: Any) -> list[Any]:
        """Gather from all hosts."""
        return self._replicas.everyone(value)

    def of_copy(self, value: Any) -> list[Any]:
        """Gather from the hosts of one copy."""
        return self._replicas.of_copy(value)

    def shared_memory(self, nbytes: int) -> Tensor:
        """Return memory that the processes of this machine share."""
        return self._replicas.shared_memory(nbytes)
