"""Kill -9 before and after each single change that one save makes on the disk, and with each write
half done.

In the second form the power fails: what was written and not flushed to the disk by then is gone as
well. In the third the save replaces a checkpoint of its name, which was found damaged.
"""

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from faults import forked
from faults.outcome import Outcome
from faults.shortrun import ShortRun, damaged, short_run

__all__ = ["over", "power", "run"]

FAULT = "kill -9 before, after and within every write, fsync and rename of one save"
POWER = "the power fails before, after and within every write, fsync and rename of one save"
OVER = "the same, of a save that replaces a damaged checkpoint of its name"
REQUIRED = "the run that goes on ends with the same bytes and the same record"
STEP = 4  # the save of which: an older checkpoint goes at its end
LIMITS: dict[str, Any] = {"save_total_limit": 2}
LOG = "metrics.jsonl"  # says of itself that it is only on its way to the disk
WHEN = {0: "before", 0.5: "half", 1: "after"}
FEWEST = 40  # instants of a save; fewer would mean that the seam does not see it


def run(count: int = 0, seed: int = 0, report: Callable[[str], None] | None = None) -> Outcome:
    """Kill at every instant; with a count, at so many of them, evenly spread from one that the
    seed draws.
    """
    return _swept(FAULT, count, seed, report)


def power(count: int = 0, seed: int = 0, report: Callable[[str], None] | None = None) -> Outcome:
    """Likewise, and take away what was not flushed."""
    return _swept(POWER, count, seed, report)


def over(count: int = 0, seed: int = 0, report: Callable[[str], None] | None = None) -> Outcome:
    """Kill in a save that has a damaged checkpoint to replace."""
    return _swept(OVER, count, seed, report)


def _swept(fault: str, count: int, seed: int, report: Callable[[str], None] | None) -> Outcome:
    began = time.monotonic()
    failures = []
    made = short_run()
    straight = made.straight(**LIMITS)
    before = made.copied(made.halted(STEP if fault == OVER else STEP - 1, **LIMITS), "before")
    if fault == OVER:
        os.truncate(before / f"checkpoint-{STEP}" / "state.json", 100)
    seen = _instants(made, before)
    if len(seen) < FEWEST:
        failures.append(f"only {len(seen)} instants of a save were seen: {', '.join(seen)}")
    chosen = _chosen(len(seen), count, seed)
    for number, instant in enumerate(chosen):
        wrong = _case(made, straight, before, instant, flushed=fault != POWER)
        if wrong:
            failures.append(f"instant {instant} of {len(seen)}, {seen[instant]}: {wrong}")
        if report is not None:
            report(
                f"instant {number + 1}/{len(chosen)}, "
                f"{seen[instant]}{': ' + wrong if wrong else ''}"
            )
    cases = max(len(chosen), len(failures))
    return Outcome(
        fault, REQUIRED, cases, cases - len(failures), tuple(failures), time.monotonic() - began
    )


def _chosen(total: int, count: int, seed: int) -> Sequence[int]:
    if not count or count >= total:
        return range(total)
    first = random.Random(seed).randrange(max(1, total // count))
    return [min(total - 1, first + number * total // count) for number in range(count)]


def _instants(made: ShortRun, before: Path) -> list[str]:
    """Return what a save does, in order."""
    told = made.place / "instants.txt"
    made.copied(before, "whole")
    ended = forked.run(lambda: _going_on(made, "whole", told, -1, flushed=True), made.log("whole"))
    if ended.code:
        raise RuntimeError(f"the run without a kill ended with {ended.code}: {ended.said}")
    return told.read_text(encoding="utf-8").splitlines()


def _case(made: ShortRun, straight: Path, before: Path, instant: int, *, flushed: bool) -> str:
    told = made.place / "lost.txt"
    made.copied(before, "cut")
    killed = forked.run(
        lambda: _going_on(made, "cut", told, instant, flushed=flushed), made.log("cut")
    )
    if killed.code != -signal.SIGKILL:
        return f"it was not killed, and ended with {killed.code}: {killed.said[-300:]}"
    if not flushed:
        for name in told.read_text(encoding="utf-8").splitlines():
            if Path(name).is_file() and Path(name).name != LOG:
                os.truncate(name, 0)
        # the one before it would be gone on from, and would hide it
        if wrong := damaged(made.out("cut")):
            return wrong
    return made.fault_of("cut", made.child("cut", resume=True, **LIMITS), straight)


def _going_on(made: ShortRun, name: str, told: Path, instant: int, *, flushed: bool) -> int:
    """Resume, and be killed at the instant of that number of the save, or note all of them."""
    from faults.diskseam import DiskSeam
    from lema.train.stage import Stage

    watched = False
    seen = []
    note = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)  # before the seam is there
    write = os.write

    def look(kind: str, path: Path, done: float) -> None:
        if not watched:
            return
        seen.append(
            f"{kind} {path.relative_to(seam.root)} "
            f"{'before' if not done else 'after' if done == 1 else 'half'}"
        )
        if len(seen) - 1 == instant:
            write(note, "\n".join(map(str, seam.unflushed)).encode())
            os.kill(os.getpid(), signal.SIGKILL)

    save = Stage.save

    def saving(stage: Stage, *arguments: object, **options: object) -> None:
        nonlocal watched
        watched = stage.progress.done == STEP
        save(stage, *arguments, **options)  # type: ignore[arg-type]
        watched = False

    Stage.save = saving  # type: ignore[method-assign, assignment]
    seam = DiskSeam(made.out(name), look)
    seam.install()
    code = made.train(name, resume=True, **LIMITS)
    write(note, "\n".join(seen).encode())
    return code
