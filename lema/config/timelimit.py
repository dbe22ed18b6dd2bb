"""A time limit for code that computes on input from outside: chat templates, regular expressions."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["limited"]


@contextmanager
def limited(seconds: float, error: Callable[[], Exception], file: str = "") -> Iterator[None]:
    """Let what is inside a `with` block compute for so many seconds of the processor's time.

    Signals reach the main thread alone. In another one the clock is looked at before each line of code that says it
    comes from `file`; what is computed within one line is not interrupted there.

    Args:
        seconds: of this thread; in the main thread, of the whole process in user mode.
        error: makes what is raised inside when they are over.
        file: as in the code's `co_filename`.
    """
    alone = threading.current_thread() is threading.main_thread()
    with _by_timer(seconds, error) if alone else _by_trace(seconds, error, file):
        yield


@contextmanager
def _by_timer(seconds: float, error: Callable[[], Exception]) -> Iterator[None]:
    """The timer of the time spent in user mode, which hardly anything else uses; it costs nothing while it runs."""

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
