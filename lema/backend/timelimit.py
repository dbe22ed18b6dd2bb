"""A limit of time and memory for code that computes on input from outside: chat templates, regular expressions."""

from __future__ import annotations

import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["bounded_memory", "limited"]

MAX_GROWTH = 3 << 28  # bytes that the process may ask for in the block


@contextmanager
def limited(seconds: float, error: Callable[[], Exception], file: str = "") -> Iterator[None]:
    """Raise `error()` in a `with` block that computes for more than so many seconds of the processor's time, and
    `MemoryError` where the process asks for more than 768 MiB in it. Time is that of this thread; in the main
    thread, that of the whole process in user mode. Signals reach the main thread alone. In another one the clock is
    looked at before each line of code whose `co_filename` is `file`; what is computed within one line is not
    interrupted there."""
    alone = threading.current_thread() is threading.main_thread()
    with bounded_memory(), _by_timer(seconds, error) if alone else _by_trace(seconds, error, file):
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


@contextmanager
def _by_trace(seconds: float, error: Callable[[], Exception], file: str) -> Iterator[None]:
    end = time.thread_time() + seconds

    def line(_frame: FrameType, _event: str, _argument: Any) -> Any:
        if time.thread_time() > end:
            raise error()
        return line

    def call(frame: FrameType, _event: str, _argument: Any) -> Any:
        return line if frame.f_code.co_filename == file else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(before)
