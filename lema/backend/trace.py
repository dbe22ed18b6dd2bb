"""A trace of a run: what happened when, drawn by Perfetto (https://ui.perfetto.dev) or
`chrome://tracing`.

The format is Chrome's trace events: complete events ("X") with a start and a length in
microseconds, one row per track and thread. `NO_TRACE`, of a run without a trace, records nothing
and reads no clock.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from lema.errors import DiskError

__all__ = ["BEGIN", "NO_TRACE", "NoTrace", "Trace", "tracing"]


class NoTrace:
    """A trace that is off."""

    _NOTHING: AbstractContextManager[None] = nullcontext()

    def span(self, track: str, name: str, **details: object) -> AbstractContextManager[None]:  # noqa: ARG002 - as in Trace
        """Do nothing for the length of a `with` block."""
        return self._NOTHING


NO_TRACE = NoTrace()


@contextmanager
def tracing(path: str | os.PathLike[str] | None) -> Iterator[NoTrace]:
    """Yield a trace that is written to `path` when the `with` block ends, however it ends; None:
    one that is off. A trace that cannot be written is a `DiskError`."""
    if path is None:
        yield NO_TRACE
        return
    trace = Trace()
    trace.write(
        path
    )  # a place that cannot be written to is better known now than when training is done
    try:
        yield trace
    finally:
        trace.write(path)


BEGIN = '{"displayTimeUnit": "ms", "traceEvents": '  # of each file


class Trace(NoTrace):
    """Spans, recorded from any thread, written as one JSON file. The latest `most` events are kept,
    so that a run of weeks does not fill the memory. The clock returns seconds."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, most: int = 1_000_000
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._began = clock()
        self._rows: dict[tuple[str, int], int] = {}
        self._names: list[tuple[str, str]] = []  # of each row: the track, and the row's own
        self._events: deque[tuple[int, str, float, float, dict[str, Any]]] = deque(maxlen=most)

    @property
    def events(self) -> list[dict[str, Any]]:
        """What was recorded, as Chrome's trace events; times in microseconds since the trace
        began.
        """
        with self._lock:
            recorded = list(self._events)
            names = list(self._names)
        chrome_events = []
        for row, name, began, length, details in recorded:
            common = {"cat": names[row][0], "ts": (began - self._began) * 1e6, "pid": 0, "tid": row}
            chrome_events.append(
                {"name": name, "ph": "X", "dur": length * 1e6, **common, "args": details}
            )
        return chrome_events

    @contextmanager
    def span(self, track: str, name: str, **details: object) -> Iterator[None]:
        """Record how long a `with` block took, also if it raises; spans of one track in several
        threads get rows each. The name is written on the span, and `details`, of JSON types, are
        shown when it is selected."""
        began = self._clock()
        try:
            yield
        finally:
            length = self._clock() - began
            with self._lock:
                self._events.append((self._row(track), name, began, length, details))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the trace, or raise `DiskError`; a file of that name is replaced only by a whole
        one.
        """
        target = Path(path)
        rows = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": row, "args": {"name": name}}
            for row, (_, name) in enumerate(self._names)
        ]
        text = BEGIN + json.dumps([*rows, *self.events]) + "}\n"
        part = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(text, encoding="utf-8", newline="\n")
            part.replace(target)
        except OSError as error:
            with suppress(
                OSError
            ):  # cleaning up fails where writing did; the first failure is the one to tell
                part.unlink(missing_ok=True)
            how = "give --trace a file in a directory that may be written to"
            raise DiskError(
                f"cannot write the trace: {error.strerror}", where=str(target), how=how
            ) from error

    def _row(self, track: str) -> int:
        key = (track, threading.get_ident())
        if key not in self._rows:
            num_rows = sum(row_track == track for row_track, _ in self._rows)
            self._rows[key] = len(self._names)
            self._names.append((track, track if num_rows == 0 else f"{track} {num_rows + 1}"))
        return self._rows[key]
