"""The other processes, and layers gathered from them while the device computes."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from lema.backend import Gathering, Replicas, Upload
from lema.backend.queues import Event, Queue, Queues

__all__ = ["QueuedReplicas"]


class QueuedReplicas:
    """`lema.backend.protocols.Replicas` that gathers in a separate queue.

    That queue waits for the upload, sends and receives, and releases the uploaded part. Meanwhile
    the device computes.

    Args:
        replicas: the processes; their work goes to the queue that is current in the calling thread.
        queues: of the device.
    """

    def __init__(self, replicas: Replicas, queues: Queues) -> None:
        self._replicas = replicas
        self._queues = queues

    @property
    def rank(self) -> int:
        """This process's place among all."""
        return self._replicas.rank

    @property
    def size(self) -> int:
        """How many processes there are."""
        return self._replicas.size

    @property
    def local_rank(self) -> int:
        """This process's place among those of this machine."""
        return self._replicas.local_rank

    @property
    def local_size(self) -> int:
        """How many of the processes run on this machine."""
        return self._replicas.local_size

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes and reports."""
        return self._replicas.first

    @property
    def num_processes(self) -> int:
        """The number of all processes."""
        return self._replicas.num_processes

    def sum(self, tensor: Tensor) -> None:
        """Add up a tensor on the device over all processes, in place, in the queue that
        computes.
        """
        self._replicas.sum(tensor)

    def gather(self, upload: Upload, target: Tensor) -> Gathering:
        """Start to put the parts together in `target`, after the compute queued so far; the
        caller goes on.
        """
        compute = self._queues.compute
        gathers = self._queues.gathers
        gathers.wait(compute.record())  # which may still use the last content of `target`
        with gathers.current():
            self._replicas.gather(
                upload, target
            ).wait()  # waits in that queue, and releases the part there
        return _Gathering(self._queues, gathers.record(), compute, target)

    def exchange(self, value: object) -> list[Any]:
        """Return every process's value, in rank order."""
        return self._replicas.exchange(value)

    def everyone(self, value: object) -> list[Any]:
        """Return the values of all processes, those of other copies too."""
        return self._replicas.everyone(value)

    def of_copy(self, value: object) -> list[Any]:
        """Return the values of the processes that hold one copy together."""
        return self._replicas.of_copy(value)

    def shared_memory(self, nbytes: int) -> Tensor:
        """Return memory that the processes of this machine share."""
        return self._replicas.shared_memory(nbytes)


class _Gathering:
    """A layer that is being gathered; its memory is held until compute waits for it."""

    def __init__(self, queues: Queues, done: Event, compute: Queue, target: Tensor) -> None:
        self._queues = queues
        self._done = done
        self._forgotten = weakref.finalize(self, _let_go, compute, done, target)
        self._forgotten.atexit = False

    def wait(self) -> None:
        self._queues.compute.wait(self._done)
        self._forgotten.detach()


def _let_go(compute: Queue, done: Event, target: Tensor) -> None:  # noqa: ARG001 - held until this has been called
    compute.wait(done)
