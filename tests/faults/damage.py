"""One file of the newest checkpoint damaged: the one before it is used, that is said, and the
end is the same.
"""

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults.outcome import Outcome
from faults.shortrun import ShortRun, short_run

__all__ = ["run"]

FAULT = (
    "a file of the newest checkpoint truncated, zeroed, deleted, swapped, or with one bit flipped"
)
REQUIRED = "detected and said, the checkpoint before it used, the same bytes in the end"
LIMITS: dict[str, Any] = {"save_total_limit": 3}
MANIFEST = "manifest.json"
HALTED = 4  # the step of the newest checkpoint: those of 2 and 3 are before it


def run(count: int, seed: int = 0, report: Callable[[str], None] | None = None) -> Outcome:
    """Damage `count` checkpoints: each file in turn, in each way in turn."""
    began = time.monotonic()
    draw = random.Random(seed)
    failures = []
    made = short_run()
    straight = made.straight(**LIMITS)
    before = made.halted(HALTED, **LIMITS)
    files = sorted(
        path.name for path in (before / f"checkpoint-{HALTED}").iterdir() if path.is_file()
    )
    pairs = [(way, file) for way in WAYS for file in files]
    draw.shuffle(pairs)  # a few of them are of all kinds
    for case in range(count):
        way, file = pairs[case % len(pairs)]
        told, fault = _case(made, straight, before, way, file, draw)
        if fault:
            failures.append(f"case {case}, {told}: {fault}")
        if report is not None:
            report(f"damage {case + 1}/{count}, {told}{': ' + fault if fault else ''}")
    return Outcome(
        FAULT, REQUIRED, count, count - len(failures), tuple(failures), time.monotonic() - began
    )


def _case(
    made: ShortRun, straight: Path, before: Path, way: str, file: str, draw: random.Random
) -> tuple[str, str]:
    out = made.copied(before, "cut")
    newest = out / f"checkpoint-{HALTED}"
    intact = (newest / file).read_bytes()
    told = f"{file} {WAYS[way](newest / file, draw)}"
    if (newest / file).is_file() and (newest / file).read_bytes() == intact:
        raise RuntimeError(f"nothing was damaged: {told}")
    ended = made.child("cut", resume=True, **LIMITS)
    if fault := made.fault_of("cut", ended, straight):
        return told, fault
    said = " ".join(ended.said.split())
    # Where the manifest is that of another checkpoint, what it says of the first file is wrong.
    if f"checkpoint-{HALTED}/{'' if file == MANIFEST else file}" not in said:
        return told, f"it was not said: {said}"
    if f"step {HALTED}/" not in said:
        return told, f"the step after the checkpoint before was not taken again: {said}"
    return told, ""


def _truncated(path: Path, draw: random.Random) -> str:
    data = path.read_bytes()
    kept = draw.randrange(len(data))
    path.write_bytes(data[:kept])
    return f"cut to {kept} of {len(data)} bytes"


def _zeroed(path: Path, draw: random.Random) -> str:
    data = bytearray(path.read_bytes())
    places = [place for place, byte in enumerate(data) if byte]
    first = draw.choice(places)
    length = draw.randint(1, len(data) - first)
    data[first : first + length] = bytes(length)
    path.write_bytes(data)
    return f"zeroed from byte {first} on, {length} bytes"


def _flipped(path: Path, draw: random.Random) -> str:
    data = bytearray(path.read_bytes())
    bit = draw.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    return f"with bit {bit % 8} of byte {bit // 8} flipped"


def _deleted(path: Path, draw: random.Random) -> str:
    path.unlink()
    return "deleted"


def _swapped(path: Path, draw: random.Random) -> str:
    """Put another file in its place: the same one of the checkpoint before where that differs,
    or another of this.
    """
    older = path.parents[1] / f"checkpoint-{HALTED - 1}" / path.name
    others = sorted(
        other
        for other in [*path.parent.iterdir(), older]
        if other.read_bytes() != path.read_bytes()
    )
    other = older if older in others and draw.random() < 0.5 else draw.choice(others)
    shutil.copyfile(other, path)
    return f"swapped for {other.parent.name}/{other.name}"


WAYS = {
    "truncated": _truncated,
    "zeroed": _zeroed,
    "flipped": _flipped,
    "deleted": _deleted,
    "swapped": _swapped,
}
