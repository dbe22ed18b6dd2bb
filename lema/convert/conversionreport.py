"""What is shown while the base of a run is quantised."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from lema.config.printing import draws, line_printer
from lema.config.units import human_bytes

__all__ = ["ConversionReport"]

BETWEEN_LINES = 30.0  # seconds, where no bar can be drawn


class ConversionReport:
    """Lines, and a bar on a terminal; elsewhere a line now and then.

    Args:
        console: where it is shown; None: the standard error.
        clock: seconds.
    """

    def __init__(
        self, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._clock = clock
        self.line = line_printer(self._console)

    @contextmanager
    def bar(self, total: int) -> Iterator[Callable[[int], None]]:
        """Give what is called with how many bytes of the `total` are done."""
        if not draws(self._console):
            yield self._lines(total)
            return
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task("", total=total)
            yield lambda done: progress.update(task, completed=min(done, total))

    def _lines(self, total: int) -> Callable[[int], None]:
        shown = self._clock()

        def advance(done: int) -> None:
            nonlocal shown
            if (now := self._clock()) - shown >= BETWEEN_LINES:
                shown = now
                self.line(f"quantize_base: {human_bytes(done)} of {human_bytes(total)}")

        return advance
