"""A limit of time and memory for code that computes on input from outside: regular expressions, files of columns."""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType

__all__ = ["bounded_memory", "limited"]

MAX_GROWTH = 3 << 28  # bytes that the process may ask for in the block


@contextmanager
def limited(seconds: float, error: Callable[[], Exception]) -> Iterator[None]:
    """Raise `error()` in a `with` block that computes for more than so many seconds of the processor's time in user
    mode, and `MemoryError` where the process asks for more than 768 MiB in it. Signals reach the main thread alone, so
    in another one nothing bounds the time."""
    alone = threading.current_thread() is threading.main_thread()
    with bounded_memory(), _by_timer(seconds, error) if alone else nullcontext():
        yield


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Bound the address space of the process, where the system tells how large that is (Linux): what asks for more than
    768 MiB in the block gets no memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        with open("/proc/self/statm", "rb", buffering=0) as told:  # noqa: PTH123 - a third of the time, for each chat
            pages = int(told.read(64).split()[0])
    except OSError:
        yield
        return
    most = pages * resource.getpagesize() + MAX_GROWTH
    known = [one for one in (soft, hard) if one != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([most, *known]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def _by_timer(seconds: float, error: Callable[[], Exception]) -> Iterator[None]:
    """Use the timer of user mode, which hardly any other program uses; it costs nothing while it runs."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise error()

    handler = signal.signal(signal.SIGVTALRM, stop)
    remaining, interval = signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, remaining, interval)
        signal.signal(signal.SIGVTALRM, handler)
