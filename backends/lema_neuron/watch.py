"""A time limit for every collective: one that takes too long ends the process.

If ranks call different collectives, or one rank has died, all hang without a message. So every
collective has a limit. It is long until the end of the first step, because other ranks may still
read or compile, and shorter afterwards. When it is over, LEMA writes the stacks of all threads to
standard error and ends the process; `torchrun` ends the others.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from torch import Tensor

from lema.backend.torchrun import others_there
from lema.errors import is_out_of_memory
from lema_neuron.comm import Comm
from lema_neuron.standin import StandIn, without_values

__all__ = ["PATIENCE_AT_START", "PATIENCE_LATER", "Watch", "WatchedComm"]

PATIENCE_AT_START = timedelta(seconds=300)
PATIENCE_LATER = timedelta(seconds=100)
EXIT = 1

Kind = TypeVar("Kind")


class Watch:
    """The limit on a rank's waits for the others.

    One thread watches all waits. It never sleeps longer than the shortest limit, so a new wait need
    not wake it.

    Args:
        at_start: the limit until the first step has ended.
        later: the limit from then on.
        over: called with a description of the wait when the time is over; None: write all stacks,
            end the process.
    """

    def __init__(
        self,
        at_start: timedelta = PATIENCE_AT_START,
        later: timedelta = PATIENCE_LATER,
        over: Callable[[str], None] | None = None,
    ) -> None:
        self._patience = at_start
        self._later = later
        self._over = over or _end
        self._waits: dict[object, tuple[float, str]] = {}  # until when, and for what
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def step_ended(self) -> None:
        """Use the shorter limit from now on."""
        with self._changed:
            if self._patience != self._later:
                self._patience = self._later
                self._changed.notify()

    def waited(self, what: str, call: Callable[[], Kind]) -> Kind:
        """Return the result of a call that waits for other ranks, within the limit.

        Raises:
            LemaError: another rank has ended.
        """
        wait = object()
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._poll_loop, name="watch over other ranks", daemon=True
                )
                self._thread.start()
            end = time.monotonic() + self._patience.total_seconds()
            self._waits[wait] = end, f"{what} after {self._patience}"
        try:
            return call()
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            with others_there():
                raise
        finally:
            with self._changed:
                self._waits.pop(wait, None)

    def close(self) -> None:
        """Stop the thread that watches."""
        with self._changed:
            thread = self._thread
            self._thread = None
            self._changed.notify()
        if thread is not None:
            thread.join()

    def _poll_loop(self) -> None:
        with self._changed:
            while self._thread is threading.current_thread():
                now = time.monotonic()
                for wait in [key for key, (end, _) in self._waits.items() if end <= now]:
                    self._over(self._waits.pop(wait)[1])
                deadlines = [end for end, _ in self._waits.values()]
                self._changed.wait(min([*deadlines, now + self._patience.total_seconds()]) - now)

    def around(self, comm: Comm) -> WatchedComm:
        """Return a group whose collectives are watched."""
        return WatchedComm(comm, self)


class WatchedComm:
    """A group whose collectives have a time limit. Tensors without values go to no other process.

    Args:
        comm: the group.
        watch: the limit.
    """

    def __init__(self, comm: Comm, watch: Watch) -> None:
        self._comm = comm
        self._watch = watch
        self._alone = StandIn(comm.rank, comm.size)

    def __deepcopy__(self, memo: Any) -> WatchedComm:
        return self  # copies of a layer use the same processes

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
        return self._answered("all_reduce", tensor, lambda comm: comm.all_reduce(tensor))

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Return every rank's tensor, joined along `dim`."""
        return self._answered("all_gather", tensor, lambda comm: comm.all_gather(tensor, dim))

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's share of the sum."""
        return self._answered(
            "reduce_scatter", tensor, lambda comm: comm.reduce_scatter(tensor, dim)
        )

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Return the tensor of the rank `source`."""
        return self._answered("broadcast", tensor, lambda comm: comm.broadcast(tensor, source))

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._waited("barrier", self._comm.barrier)

    def split(self, parts: Sequence[Sequence[int]]) -> Comm:
        """Return this rank's part of the group, watched as well."""
        return WatchedComm(self._waited("split", lambda: self._comm.split(parts)), self._watch)

    def _answered(self, what: str, tensor: Tensor, ask: Callable[[Comm], Tensor]) -> Tensor:
        if without_values(tensor):
            return ask(self._alone)
        return self._waited(what, lambda: ask(self._comm))

    def _waited(self, what: str, call: Callable[[], Kind]) -> Kind:
        return self._watch.waited(f"rank {self.rank} of {self.size}: {what}", call)


def _end(what: str) -> None:
    """Print the wait and the stacks of all threads, and end the process; the other ranks then
    end, too.
    """
    sys.stderr.write(
        f"error: other ranks did not answer: {what}\n  how: see the stacks below, and the "
        "output of the other ranks; "
        "start all of them again (--resume continues from the last checkpoint)\n"
    )
    faulthandler.dump_traceback(all_threads=True)
    sys.stderr.flush()
    os._exit(EXIT)
