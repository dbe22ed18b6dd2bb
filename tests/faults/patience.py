"""A case that may not take long: stopped after some seconds of the processor's time, however
busy the machine is.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["TooLong", "patience"]


class TooLong(BaseException):
    """A case went on beyond its time; no `except Exception` takes it for an error of the case."""


@contextmanager
def patience(seconds: float, *, waiting: bool = False) -> Iterator[None]:
    """Raise `TooLong` in what is inside, in the main thread, once it has computed for this long;
    or, if `waiting` counts, too, once so much time has passed."""
    number, timer = (
        (signal.SIGALRM, signal.ITIMER_REAL) if waiting else (signal.SIGPROF, signal.ITIMER_PROF)
    )

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise TooLong(f"{seconds} s" + " of the clock" * waiting)

    before = signal.signal(number, stop)
    signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(number, before)
