"""The disk is full after N bytes of a save, for N from nothing to more than a save takes.

What was saved before stays whole, nothing is left of what did not fit, and with more room the run
goes on as if nothing had happened. The disk is that of `faults.diskseam`; of every few sizes, one
is on a disk that says how full it is.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults import forked
from faults.diskseam import DiskSeam, bytes_below
from faults.outcome import Outcome
from faults.shortrun import ShortRun, checkpoint_steps, damaged, last_lines, leftovers, short_run

__all__ = ["FULL", "HALTED", "LIMITS", "REQUIRED", "fault_after", "run"]

FAULT = "the disk is full after N bytes"
REQUIRED = (
    "exit 6 or 0, what was saved before verifies, nothing left behind, and the run that goes "
    "on ends the same"
)
LIMITS: dict[str, Any] = {"save_total_limit": 2}
HALTED = 3
FULL = 6
SAYING = 5  # every so many sizes, one is on a disk that says how full it is


def run(count: int, seed: int = 0, report: Callable[[str], None] | None = None) -> Outcome:
    """Fill the disk at `count` sizes."""
    began = time.monotonic()
    failures = []
    made = short_run()
    straight = made.straight(**LIMITS)
    before = made.halted(HALTED, **LIMITS)
    save = bytes_below(before / f"checkpoint-{HALTED}")
    for case in range(count):
        room = (case * save * 5 // 4) // max(1, count - 1) + seed
        says_so = case % SAYING == SAYING - 1
        fault = _case(made, straight, before, room, says_so)
        told = (
            f"{room} bytes left, where a save takes "
            f"{save}{', and the file system says so' if says_so else ''}"
        )
        if fault:
            failures.append(f"{told}: {fault}")
        if report is not None:
            report(f"full {case + 1}/{count}, {told}{': ' + fault if fault else ''}")
    return Outcome(
        FAULT, REQUIRED, count, count - len(failures), tuple(failures), time.monotonic() - began
    )


def _case(made: ShortRun, straight: Path, before: Path, room: int, says_so: bool) -> str:
    out = made.copied(before, "cut")

    def work() -> int:
        DiskSeam(out, limit=bytes_below(out) + room, says_so=says_so).install()
        return made.train("cut", resume=True, **LIMITS)

    return fault_after(made, forked.run(work, made.log("cut")), straight)


def fault_after(
    made: ShortRun,
    ended: forked.Ended,
    straight: Path,
    more_room: Callable[[], None] = lambda: None,
) -> str:
    """Return what is wrong with what a run left that met a full disk, and with the run that goes
    on with more room.
    """
    out = made.out("cut")
    if ended.code not in (0, FULL):
        return f"it ended with {ended.code}: {last_lines(ended.said)}"
    if left := leftovers(out):
        return f"it ended with {ended.code}, and left behind {', '.join(left)}"
    steps = checkpoint_steps(out)
    if not steps or steps[-1] < HALTED:
        return f"it ended with {ended.code}, and the checkpoints are of {steps}"
    if found := damaged(out):
        return f"it ended with {ended.code}, and {found}"
    more_room()
    return made.fault_of("cut", made.child("cut", resume=True, **LIMITS), straight)
