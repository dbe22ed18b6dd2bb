"""One step out of a trace that `lema train --trace` has written: what was read, uploaded and
computed when.
"""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from lema.errors import DataError, unreadable
from lema.storage.regular import read_regular
from lema_tools.svg import Span

__all__ = ["find_trace", "read_step"]

# Tracks from top to bottom, with their colours; others come behind.
TRACKS = {
    "read": 0,
    "stall: disk": 1,
    "gather": 8,
    "stall: gather": 1,
    "upload": 6,
    "stall: upload": 1,
    "expand": 7,
}
TRACKS |= {"forward": 3, "backward": 4, "boundaries": 9, "optimizer": 5}
MOST = 3000  # spans that are drawn, the longest first
LARGEST = 512 * 10**6  # bytes of a trace that is read


def find_trace(directory: Path) -> Path | None:
    """Return a file in the directory of a run that is named as a trace; None: there is none."""
    return next(iter(sorted(directory.glob("*trace*.json"))), None)


def read_step(file: Path, *, inside: bool = True) -> tuple[list[Span], dict[str, int]] | None:
    """Return the spans of the step of median length, in seconds, and their tracks with colours;
    None: no step is whole. `inside`: the file lies in a directory that was handed over, and is no
    link out of it. `DataError`: the file is no trace."""
    try:
        if file.stat().st_size > LARGEST:
            raise DataError(
                "the trace is too large to be drawn",
                where=str(file),
                how="open it at ui.perfetto.dev",
            )
        events = json.loads(read_regular(file, LARGEST, inside=inside).decode("utf-8"))[
            "traceEvents"
        ]
        names = {
            event["tid"]: str(event["args"]["name"]) for event in events if event.get("ph") == "M"
        }
        spans = [_span(event, names) for event in events if event.get("ph") == "X"]
    except OSError as error:
        raise unreadable(
            file, error, DataError, f"cannot read the trace: {error.strerror}"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        how = "use a file that `lema train --trace FILE` wrote"
        raise DataError(f"this is not a trace: {error!r}", where=str(file), how=how) from error
    bounds = _bounds(spans)
    if not bounds:
        return None
    begin, end = sorted(bounds, key=lambda bound: bound[1] - bound[0])[len(bounds) // 2]
    overlapping = [span for span in spans if span.begin < end and span.end > begin]
    cut = [
        Span(span.track, span.name, max(span.begin, begin), min(span.end, end))
        for span in overlapping
    ]
    drawn = sorted(cut, key=lambda span: span.begin - span.end)[:MOST]
    order = {name: at for at, name in enumerate(TRACKS)}
    tracks = sorted(
        {span.track for span in drawn},
        key=lambda track: (order.get(_kind(track), len(order)), track),
    )
    return drawn, {track: TRACKS.get(_kind(track), 9) for track in tracks}


def _span(event: dict[str, Any], names: dict[Any, str]) -> Span:
    begin = float(event["ts"]) / 1e6
    return Span(
        names.get(event["tid"], str(event.get("cat"))),
        str(event["name"]),
        begin,
        begin + event["dur"] / 1e6,
    )


def _bounds(spans: Sequence[Span]) -> list[tuple[float, float]]:
    """Return from when to when whole steps went: each begins with the first layer forward after
    one backward.
    """
    starts: list[float] = []
    passes = sorted(
        (span for span in spans if span.track in ("forward", "backward")),
        key=lambda span: span.begin,
    )
    before = "backward"
    for span in passes:
        if span.track == "forward" and before == "backward":
            starts.append(span.begin)
        before = span.track
    return list(pairwise(starts))


def _kind(track: str) -> str:
    """Return a track's own name: that of a second thread is `read 2`."""
    name, _, number = track.rpartition(" ")
    return name if number.isdigit() else track
