"""Whether a run is to stop, asked before each layer and each micro-batch; and how several processes agree on it.

A step of a streamed model may take minutes, so it is not waited for: a pass through the layers is given up in its
midst, and nothing of it is left. What cannot be given up halfway is done to its end first: an optimizer's step, a save.

Where processes meet within a pass, one alone cannot leave it: the others would wait for ever. Which process may leave
where is said by `Leaving`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from lema.replicas import Alone, Replicas

__all__ = ["NEVER", "Leaving", "Polled", "Stop", "StopRequested", "agreed"]

Stop = Callable[[], str | None]
"""Returns why a run is to stop; None: it goes on."""

Leaving = Literal["anywhere", "at leases", "between passes"]
"""Where a pass may be left: by each process on its own, by all before the same lease, or by all before the same pass.

Processes that meet at most after a pass leave it anywhere. Where each layer is put together from parts of all, they ask
each other before each lease. Where the processes that compute a layer together are not those that lease it together,
they ask each other before each forward and each backward.
"""


class StopRequested(BaseException):
    """What is under way is given up, because the run is to stop.

    No error: it goes past whatever handles errors, to the loop of the run, which turns it into `lema.errors.Stopped`.
    """

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Polled:
    """Asks, within `opened` blocks, whether a run is to stop.

    Args:
        stop: whom to ask; None: nobody.
        replicas: the processes, all of which have made one of these, or none.
        leaving: where a pass may be left.
    """

    def __init__(self, stop: Stop | None, replicas: Replicas | None = None, leaving: Leaving = "anywhere") -> None:
        self._stop, self._leaving = stop, leaving
        self._replicas = replicas or Alone()
        self._open = self._polls = False

    def poll(self) -> None:
        """Ask, where this process may leave on its own.

        Raises:
            StopRequested: the run is to stop.
        """
        if self._polls and self._stop is not None and (why := self._stop()) is not None:
            raise StopRequested(why)

    def at_lease(self) -> None:
        """Ask before a lease: as `poll`, or all processes together.

        Raises:
            StopRequested: the run is to stop; in every process that asks before this lease.
        """
        if self._polls:
            self.poll()
        elif self._open and self._leaving == "at leases":
            self._ask_all()

    def before_pass(self) -> None:
        """Ask before a forward or a backward, where that is where all processes leave.

        Raises:
            StopRequested: the run is to stop; in every process.
        """
        if self._open and self._leaving == "between passes":
            self._ask_all()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Let what is done in a `with` block be given up; at its end, all processes give up what one has given up.

        Raises:
            StopRequested: it was given up; in every process.
        """
        if self._stop is None:
            yield
            return
        why: str | None = None
        self._open, self._polls = True, self._leaving == "anywhere"
        try:
            yield
        except StopRequested as request:
            why = request.why
        finally:
            self.close()
        if (why := agreed(self._replicas, why)) is not None:
            raise StopRequested(why)

    def close(self) -> None:
        """Have what is left of an `opened` block done to its end."""
        self._open = self._polls = False

    def _ask_all(self) -> None:
        assert self._stop is not None, "nobody is asked"
        if (why := agreed(self._replicas, self._stop())) is not None:
            raise StopRequested(why)


def agreed(replicas: Replicas, why: str | None) -> str | None:
    """Return why any of the processes wants to stop, the same in all of them; each calls this. None: none does."""
    if replicas.num_processes == 1:
        return why
    return next((one for one in replicas.everyone(why) if one is not None), None)


NEVER = Polled(None)
"""Of a run that nobody stops."""
