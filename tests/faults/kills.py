"""kill -9 at a random instant of a run that saves every step; the run that goes on ends as if nothing had happened."""

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults.forked import fork
from faults.outcome import Outcome
from faults.shortrun import ShortRun, checkpoint_steps, short_run

__all__ = ["run"]

FAULT = "kill -9 at a random instant of a run that saves every step"
REQUIRED = "the run that goes on ends with the same bytes and the same record"
EARLY = 0.1  # of the kills, those that may come before the first checkpoint
AGAIN = 0.25  # of the kills, those after which the run that goes on is killed too
LIMITS: dict[str, Any] = {"save_total_limit": 2}


@dataclass(frozen=True)
class Pace:
    """How long the run takes here: to its first checkpoint, and from there to the end, in seconds."""

    before: float
    after: float


def run(count: int, seed: int = 0, report: Callable[[str], None] | None = None) -> Outcome:
    """Kill `count` runs."""
    began, draw, failures, early = time.monotonic(), random.Random(seed), [], 0
    made = short_run()
    straight = made.straight(**LIMITS)
    pace = _pace(made)
    for case in range(count):
        fault, when, fresh = _case(made, straight, pace, draw)
        early += fresh
        if fault:
            failures.append(f"case {case}, killed {when}: {fault}")
        if report is not None:
            report(f"kill {case + 1}/{count}, {when}{': ' + fault if fault else ''}")
    fault = f"{FAULT} ({early} of them before the first checkpoint)" if early else FAULT
    return Outcome(fault, REQUIRED, count, count - len(failures), tuple(failures), time.monotonic() - began)


def _pace(made: ShortRun) -> Pace:
    began, child = time.monotonic(), fork(lambda: made.train("pace", **LIMITS), made.log("pace"))
    first = None
    while not child.ended():
        if first is None and checkpoint_steps(made.out("pace")):
            first = time.monotonic()
        time.sleep(0.001)
    end = time.monotonic()
    made.forget("pace")
    return Pace((first or end) - began, end - (first or began))


def _case(made: ShortRun, straight: Path, pace: Pace, draw: random.Random) -> tuple[str, str, bool]:
    """Kill one run, go on; return what is wrong, when it was killed, and whether it had to begin anew."""
    name, anew = "cut", False
    killed: list[str] = []
    made.forget(name)
    early = draw.random() < EARLY
    while not killed or (len(killed) == 1 and draw.random() < AGAIN):
        found = checkpoint_steps(made.out(name))
        if (when := _kill(made, name, bool(found), early, pace, draw)) is None:
            if not killed:  # it came to its end first
                made.forget(name)
                continue
            break
        killed.append(when)
        anew = anew or not checkpoint_steps(made.out(name))
    ended = made.child(name, resume=bool(checkpoint_steps(made.out(name))), **LIMITS)
    return made.fault_of(name, ended, straight), " and ".join(killed) or "never", anew


def _kill(made: ShortRun, name: str, resume: bool, early: bool, pace: Pace, draw: random.Random) -> str | None:
    """Start a run and kill it; return when, or None where it was too late."""
    held = set(checkpoint_steps(made.out(name)))
    child = fork(lambda: made.train(name, resume=resume, **LIMITS), made.log(name))
    delay = draw.uniform(0, pace.before + pace.after) if early else draw.uniform(0, pace.after)
    while not early and not child.ended() and not set(checkpoint_steps(made.out(name))) - held:
        time.sleep(0.0005)
    time.sleep(delay)
    if not child.send(signal.SIGKILL):
        return None
    child.wait()
    return f"{delay:.3f} s after {'the start' if early else 'a checkpoint'}, at {checkpoint_steps(made.out(name))}"
