"""A case that may not take long: stopped after some seconds of the processor's time, however busy the machine is."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["TooLong", "patience"]


class TooLong(BaseException):
    """A case went on beyond its time; no `except Exception` takes it for an error of the case."""


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Raise `TooLong` in what is inside, in the main thread, once it has computed for this long."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise TooLong(f"{seconds} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
