"""Whether a run has been asked to stop, polled before each layer and each micro-batch; and how
processes agree on it.

A step of a streamed model may take minutes, so a stop does not wait for its end: the pass through
the layers is given up, and nothing of it is kept. What cannot be given up halfway, an optimizer's
step or a save, is finished first. Where processes meet within a pass, one alone cannot leave it,
because the others would wait for ever. `Leaving` says which process may leave where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

from lema.backend.group import Alone
from lema.backend.protocols import Replicas

__all__ = [
    "NEVER",
    "Interrupt",
    "Leaving",
    "Stop",
    "StopRequested",
    "agreed",
    "autograd_in_this_thread",
]

Stop = Callable[[], str | None]
"""Returns why a run is to stop; None: it goes on."""

Leaving = Literal["alone", "as a copy", "together"]
"""Who leaves a pass at once: a process on its own, those that hold one copy of the model together,
or all there are.

Processes that meet at most after a pass leave it alone, before a layer or a micro-batch. Those that
compute layers together ask each other before each lease, and so do all where each layer is put
together from parts of all.
"""


class StopRequested(BaseException):
    """The current pass is given up, because the run must stop. It is no `Exception`, so that
    handlers of errors let it pass to the loop of the run, which raises `Stopped`."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Interrupt:
    """The question whether a run is to stop, asked within `opened` blocks before each layer and
    micro-batch. Either all of a run's `replicas` make an `Interrupt` or none does; `leaving` says
    which of them leave a pass at once, and `of_copy` asks those that leave "as a copy"; None: those
    that hold one. Where `stop` is None the run is never stopped."""

    def __init__(
        self,
        stop: Stop | None,
        replicas: Replicas | None = None,
        leaving: Leaving = "alone",
        of_copy: Callable[[object], list[Any]] | None = None,
    ) -> None:
        self._stop = stop
        self._leaving = leaving
        self._replicas = replicas or Alone()
        self._of_copy = of_copy or self._replicas.of_copy
        self._open = self._polls = False

    def poll(self) -> None:
        """Ask, where this process may leave on its own; `StopRequested`: the run is to stop."""
        if self._polls and self._stop is not None and (why := self._stop()) is not None:
            raise StopRequested(why)

    def at_lease(self) -> None:
        """Ask before a lease: as `poll`, or those together that leave at once. `StopRequested` is
        raised in every process that leaves with this one."""
        if self._polls:
            self.poll()
        elif self._open:
            assert self._stop is not None, "the run is never stopped"
            ask = self._replicas.everyone if self._leaving == "together" else self._of_copy
            if (why := _first(ask(self._stop()))) is not None:
                raise StopRequested(why)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Let a `with` block be given up; at its end all processes give up what one has:
        `StopRequested` in each.
        """
        if self._stop is None:
            yield
            return
        why: str | None = None
        self._open = True
        self._polls = self._leaving == "alone"
        try:
            yield
        except StopRequested as request:
            why = request.why
        finally:
            self.close()
        if (why := agreed(self._replicas, why)) is not None:
            raise StopRequested(why)

    def close(self) -> None:
        """Do the rest of an `opened` block to its end without asking."""
        self._open = self._polls = False


def agreed(replicas: Replicas, why: str | None) -> str | None:
    """Return why any of the processes wants to stop, the same in all of them; each calls this.
    None: none does.
    """
    return _first(replicas.everyone(why))


def autograd_in_this_thread() -> AbstractContextManager[Any]:
    """Return the context in which autograd differentiates in the thread that asks for it, on every
    device.

    Autograd has a thread for each device, and who asks for a backward waits for that thread in C++.
    But Python runs signal handlers in the main thread alone, between two of its instructions, so a
    signal would be seen only when all layers are differentiated, minutes later. In this context the
    backward of each layer begins with instructions of the main thread. What is kept for each
    thread, such as the workspaces of a device's libraries, is then kept once. A backward within a
    backward inherits the context; on the CPU it changes nothing.
    """
    import torch

    return torch.autograd.set_multithreading_enabled(False)


def _first(reasons: Iterable[str | None]) -> str | None:
    return next((reason for reason in reasons if reason is not None), None)


NEVER = Interrupt(None)
