"""The time and memory of a process, bounded from outside where its system lets it set no bounds
itself.

Linux lets it: a timer ends it, and its address space is bounded. macOS has the timer alone, Windows
neither. There a thread looks at the process ten times a second, so that it may take some more of
both before it is ended.
"""

import signal
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

__all__ = ["MEMORY", "TIME", "Budget", "bounds_itself"]

POLL_SECONDS = 0.1  # seconds
TIME = "time"
MEMORY = "memory"


def bounds_itself() -> bool:
    """Return whether a process can bound its own time and memory (`lema.data.chat.renderer`)."""
    return hasattr(signal, "setitimer") and Path("/proc/self/statm").exists()


class Budget:
    """Ends a process that takes more than it may, for the length of a `with` block.

    Args:
        process: what is looked at; it may end by itself.
        seconds: of the processor's time from `begin` on.
        nbytes: of resident memory, beyond what it has at first.
        watching: False: nothing is looked at, because the process bounds itself.

    Attributes:
        exceeded: `TIME` or `MEMORY` if the process was ended for it; else empty.
    """

    def __init__(
        self, process: "subprocess.Popen[bytes]", seconds: float, nbytes: int, *, watching: bool
    ) -> None:
        self.exceeded = ""
        self._process = process
        self._seconds = seconds
        self._nbytes = nbytes
        self._usage = psutil.Process(process.pid) if watching else None
        self._spent = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def __enter__(self) -> Self:
        if self._usage is not None:
            self.begin()
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def begin(self) -> None:
        """Count time from now on."""
        if self._usage is not None:
            with suppress(psutil.Error):  # it has ended
                self._spent = _seconds(self._usage)

    def _poll(self) -> None:
        assert self._usage is not None
        with suppress(psutil.Error):
            before = self._usage.memory_info().rss
            while not self._over.wait(POLL_SECONDS):
                if _seconds(self._usage) - self._spent > self._seconds:
                    self.exceeded = TIME
                elif self._usage.memory_info().rss - before > self._nbytes:
                    self.exceeded = MEMORY
                if self.exceeded:
                    self._process.kill()
                    return


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
