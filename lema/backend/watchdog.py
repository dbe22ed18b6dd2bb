"""A watchdog for a run in which nothing moves any more: it writes the stacks of all threads.

A disk that does not answer, or a process that waits for another which has gone, would otherwise
hang without a word. A thread looks every few seconds at the counters of finished work. When no
number has changed for ten times as long as a layer takes, the work under way and the stacks go to
standard error and into a file, once, until something moves again.
"""

from __future__ import annotations

import faulthandler
import io
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self, TextIO

__all__ = ["Watchdog", "write_stacks"]

FACTOR = 10  # times as long as a layer takes
AT_LEAST = 45.0  # seconds: a slow disk is not reported each time
AT_FIRST = 300.0  # seconds, while the time of a layer is unknown, or outside of layers
INTERVAL = 5.0  # seconds between two looks
REMEMBERED = 65  # layers whose times count
EXIT = 1


class _Progress:
    """When work last moved, and how long its layers take.

    Args:
        moves: returns the counters of finished work, first the visits of layers.
        clock: the seconds now.
    """

    def __init__(self, moves: Callable[[], tuple[Any, ...]], clock: Callable[[], float]) -> None:
        self._moves = moves
        self._clock = clock
        self._layer_seconds: deque[float] = deque(maxlen=REMEMBERED)
        self._counted = moves()
        self._moved_at = clock()
        self._layer_at = self._moved_at
        self._polled_at = self._moved_at

    @property
    def limit(self) -> float:
        """Seconds without a move that are too many, in layers."""
        if not self._layer_seconds:
            return AT_FIRST
        return max(AT_LEAST, FACTOR * statistics.median(self._layer_seconds))

    def begin_pause(self) -> None:
        """Count idle seconds from now on."""
        self._moved_at = self._clock()

    def end_pause(self) -> None:
        """Count idle seconds, and those of the next layer, from now on."""
        self._moved_at = self._clock()
        self._layer_at = self._moved_at

    def idle_seconds(self) -> float | None:
        """Return the seconds since something moved; None: something has since the last call."""
        now = self._clock()
        counted = self._moves()
        # this thread was stopped, too, so the run is not to blame
        if (gone := now - self._polled_at) > 4 * INTERVAL:
            self._moved_at = self._moved_at + gone
            self._layer_at = self._layer_at + gone
        self._polled_at = now
        if counted == self._counted:
            return now - self._moved_at
        if count := counted[0] - self._counted[0]:
            self._layer_seconds.append((now - self._layer_at) / count)
            self._layer_at = now
        self._counted = counted
        self._moved_at = now
        return None


class Watchdog:
    """Looks on while a `with` block runs, in a thread of its own, in which it calls `moves` for the
    counters of finished work: first the visits of layers, then whatever else changes while
    something moves. `awaited` returns, in words, the work that is under way. The file of stacks
    goes to `directory`, made if need be. After so many seconds without a move as `end_after` says
    the process is ended by `end`, with an exit code, because nothing can be cleaned up where a
    thread does not answer; None: it never is."""

    def __init__(
        self,
        moves: Callable[[], tuple[Any, ...]],
        awaited: Callable[[], str],
        directory: Path,
        *,
        end_after: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._progress = _Progress(moves, clock)
        self._awaited = awaited
        self._directory = directory
        self._end_after = end_after
        self._end = end
        self._slow: list[str] = []  # what is under way that no layer is a measure of
        self._reported = False
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def limit(self) -> float:
        """Seconds without a move that are too many."""
        limit = self._progress.limit
        return max(limit, AT_FIRST) if self._slow else limit

    @contextmanager
    def patient(self, what: str) -> Iterator[None]:
        """Wait longer for what a `with` block does, in which layers do not move: a checkpoint, a
        merge.
        """
        self._slow.append(what)
        self._progress.begin_pause()
        try:
            yield
        finally:
            self._slow.pop()
            self._progress.end_pause()

    def poll(self) -> None:
        """See whether anything has moved since the last look; if nothing has for too long, say
        so.
        """
        idle = self._progress.idle_seconds()
        if idle is None:
            self._reported = False
            return
        over = self._end_after is not None and idle >= self._end_after
        if over or (idle >= self.limit and not self._reported):
            self._reported = True
            write_stacks(self._words(idle, over), self._directory)
        if over:
            self._end(EXIT)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._poll_loop, name="lema-watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _poll_loop(self) -> None:
        while not self._stopped.wait(INTERVAL):
            self.poll()

    def _words(self, idle: float, over: bool) -> str:
        where = ", ".join([*self._slow, self._awaited()])
        how = (
            "the run still waits; check the disk, the device and the other processes, or stop "
            "it and use --resume"
        )
        if over:
            how = "the process ends (hang_timeout); start it again with --resume"
        return f"nothing has moved for {idle:.0f} seconds\n  where: {where}\n  fix:   {how}"


def write_stacks(
    words: str, directory: Path | None = None, out: TextIO | None = None
) -> Path | None:
    """Write `words`, which say what is wrong, and the stack of every thread to `out`, and into a
    new file. Standard error, the default of `out`, comes first, because it may be the disk that
    does not answer. The file is `stacks-<time>.txt` in `directory`, and is returned; None: it could
    not be written, or no directory was given."""
    to = sys.stderr if out is None else out
    names = "".join(
        f"\n  thread 0x{thread.ident or 0:016x} is {thread.name}"
        for thread in threading.enumerate()
    )
    head = f"warning: {words}{names}\n"
    print(head, file=to, flush=True)
    direct = True
    try:
        faulthandler.dump_traceback(file=to, all_threads=True)
    except (AttributeError, ValueError, io.UnsupportedOperation):  # it has no descriptor
        direct = False
    if directory is None:
        return None
    file = directory / f"stacks-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8", newline="\n") as written:
            print(head, file=written, flush=True)
            faulthandler.dump_traceback(file=written, all_threads=True)
    except OSError as error:
        print(
            f"warning: the stacks cannot be written to {file}: {error.strerror}",
            file=to,
            flush=True,
        )
        return None
    if not direct:
        with suppress(OSError):
            print(file.read_text(encoding="utf-8").removeprefix(head), file=to, flush=True)
    print(f"warning: these stacks are in {file}, too", file=to, flush=True)
    return file
