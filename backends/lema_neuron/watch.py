"""Ranks that wait for each other, and do not wait for ever: a collective that takes too long ends the process.

Ranks that call different collectives, or of which one has died, hang without a word. Here every collective has a limit:
long until the first step has been taken, since others may still read or compile; shorter afterwards. When it is over,
the stacks of all threads are written to standard error, and the process ends; `torchrun` ends the others.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from torch import Tensor

from lema_neuron.comm import Comm

__all__ = ["PATIENCE_AT_START", "PATIENCE_LATER", "Watch", "WatchedComm"]

PATIENCE_AT_START = timedelta(seconds=300)
PATIENCE_LATER = timedelta(seconds=100)
EXIT = 1

Kind = TypeVar("Kind")


class Watch:
    """How long a rank waits for the others.

    Args:
        at_start: until the first step has ended.
        later: from then on.
        over: called with what was waited for when the time is over; None: write all stacks, and end the process.
    """

    def __init__(
        self,
        at_start: timedelta = PATIENCE_AT_START,
        later: timedelta = PATIENCE_LATER,
        over: Callable[[str], None] | None = None,
    ) -> None:
        self._patience, self._later, self._over = at_start, later, over or _end

    def step_ended(self) -> None:
        """Wait less long from now on."""
        self._patience = self._later

    def waited(self, what: str, call: Callable[[], Kind]) -> Kind:
        """Return what a call that waits for other ranks returns, if it does in time."""
        timer = threading.Timer(self._patience.total_seconds(), self._over, [f"{what} after {self._patience}"])
        timer.daemon = True
        timer.start()
        try:
            return call()
        finally:
            timer.cancel()

    def around(self, comm: Comm) -> WatchedComm:
        """Return a group whose collectives are watched."""
        return WatchedComm(comm, self)


class WatchedComm:
    """A group whose collectives end in time, or end the process.

    Args:
        comm: the group.
        watch: how long they may take.
    """

    def __init__(self, comm: Comm, watch: Watch) -> None:
        self._comm, self._watch = comm, watch

    def __deepcopy__(self, memo: Any) -> WatchedComm:
        return self  # copies of a layer lie over the same processes

    @property
    def rank(self) -> int:
        """This process's place in the group."""
        return self._comm.rank

    @property
    def size(self) -> int:
        """How many processes the group has."""
        return self._comm.size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over the group."""
        return self._waited("all_reduce", lambda: self._comm.all_reduce(tensor))

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Return every rank's tensor, joined along `dim`."""
        return self._waited("all_gather", lambda: self._comm.all_gather(tensor, dim))

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's share of the sum."""
        return self._waited("reduce_scatter", lambda: self._comm.reduce_scatter(tensor, dim))

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Return the tensor of the rank `source`."""
        return self._waited("broadcast", lambda: self._comm.broadcast(tensor, source))

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._waited("barrier", self._comm.barrier)

    def split(self, parts: Sequence[Sequence[int]]) -> Comm:
        """Return this rank's part of the group, watched as well."""
        return WatchedComm(self._waited("split", lambda: self._comm.split(parts)), self._watch)

    def _waited(self, what: str, call: Callable[[], Kind]) -> Kind:
        return self._watch.waited(f"rank {self.rank} of {self.size}: {what}", call)


def _end(what: str) -> None:
    """Say what was waited for, write the stacks of all threads, and end: others of the run end with this process."""
    sys.stderr.write(
        f"error: other ranks were not heard of: {what}\n  how: see the stacks below, and what the other ranks say; "
        "start all of them again (--resume goes on from the last checkpoint)\n"
    )
    faulthandler.dump_traceback(all_threads=True)
    sys.stderr.flush()
    os._exit(EXIT)
