"""Virtual time: a clock that only waiting moves, lines that do one thing after the other, what a buffer holds when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lema.stream.placement import LayerBytes

__all__ = ["BufferState", "Clock", "Line", "ScheduleError"]


class ScheduleError(Exception):
    """The schedule broke a promise: a buffer was used before it was filled, or refilled while it was in use."""


class Clock:
    """Seconds since the beginning, as the training thread sees them."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now

    def wait_until(self, moment: float) -> None:
        """Let time pass, if the moment is not past."""
        self.now = max(self.now, moment)

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Let another thread wait in the `with` block: afterwards it is as late as it was before."""
        before = self.now
        try:
            yield
        finally:
            self.now = before


class Line:
    """Work that is done one piece after the other, as the disk and the link do it."""

    def __init__(self, speed: float) -> None:
        self.speed, self.free, self.busy = speed, 0.0, 0.0

    def do(self, nbytes: int, not_before: float) -> tuple[float, float]:
        """Queue a transfer; return when it begins and ends."""
        start = max(self.free, not_before)
        length = nbytes / self.speed
        self.free, self.busy = start + length, self.busy + length
        return start, self.free


@dataclass
class BufferState:
    """What is known of one buffer: which layer is in it, from when on, and until when it is in use."""

    content: LayerBytes | None = None
    filled: float = 0.0
    in_use: float = 0.0  # until then something copies from it, or computes with it
    leased: bool = False
