"""A limit of time for code that computes on input from outside, such as regular expressions."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType

from lema.backend.host.limits import bounded_memory

__all__ = ["limited"]


@contextmanager
def limited(seconds: float, error: Callable[[], Exception]) -> Iterator[None]:
    """Raise `error()` in a `with` block that computes for more than so many seconds of the
    processor's time in user mode, and `MemoryError` where the process asks for more than 768 MiB in
    it. Signals reach the main thread alone, so in another one nothing bounds the time, nor on a
    system without timers (Windows)."""
    timed = threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")
    with bounded_memory(), _by_timer(seconds, error) if timed else nullcontext():
        yield


@contextmanager
def _by_timer(seconds: float, error: Callable[[], Exception]) -> Iterator[None]:
    """Use the timer of user mode, which hardly any other program uses; it costs nothing while it
    runs.
    """

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise error()

    handler = signal.signal(signal.SIGVTALRM, stop)
    remaining, interval = signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, remaining, interval)
        signal.signal(signal.SIGVTALRM, handler)
