"""kill -9, again and again, of plain runs, phases, all objectives and two processes; each ends as
undisturbed.

A chain is one run, killed up to `LONGEST` times: at a change of its disk, where the process kills
itself before it, after it or with a write half done, or at any time, where another process kills
one of those that train, or all that there are. It goes on after each kill, as a user would have it
go on, and is compared when it has come to its end.
"""

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults import killedways
from faults.forked import HUNG, Child, Ended, import_noted
from faults.killedways import STANDSTILL, WAYS, Way, begun, is_there, told_of
from faults.outcome import Outcome
from faults.shortrun import ShortRun, last_lines, short_run

__all__ = ["run"]

FAULT = "kill -9, again and again, at changes of the disk and at any time"
REQUIRED = "the run that goes on ends with the same bytes, record, summary and card"
NAME = "killed-run"
LONGEST = 6  # kills of one run
LOOK = 0.01  # seconds between two looks at what a run has written
BY_CHANGE = 0.5  # of the kills, those at a change of the disk
EARLY = 0.15  # of the others, those that may come before anything was written
ALL = 0.4  # of those of two processes, those that kill both and `torchrun` too


@dataclass(frozen=True)
class Straight:
    """The run without a kill: what it leaves, its changes of the disk, seconds to the first and
    from there on.
    """

    told: dict[str, Any]
    changes: int
    before: float
    after: float


def run(count: int, seed: int = 0, report: Callable[[str], None] | None = None) -> Outcome:
    """Make `count` kills, as many of each kind of run."""
    began = time.monotonic()
    draw = random.Random(seed)
    failures = list[str]()
    lost = 0
    done = 0
    made = short_run()
    known = dict[str, Straight]()
    chains = dict.fromkeys(WAYS, 0)
    left = {
        kind: count // len(WAYS) + (number < count % len(WAYS)) for number, kind in enumerate(WAYS)
    }
    while kinds := [kind for kind in WAYS if left[kind] > 0]:
        for kind in kinds:
            way = WAYS[kind][chains[kind] % len(WAYS[kind])]
            if way.straight not in known:
                known[way.straight] = _straight(made, way)
            length = min(left[kind], draw.randint(1, LONGEST))
            killed, fault = _chain(made, way, known[way.straight], length, draw)
            left[kind], chains[kind], done = (
                left[kind] - len(killed),
                chains[kind] + 1,
                done + len(killed),
            )
            told = f"{way.name}, chain {chains[kind]}, killed {'; '.join(killed) or 'never'}"
            if fault:
                lost += max(1, len(killed))
                failures.append(f"{told}: {fault}")
            if report is not None:
                report(f"kill {done}/{count}, {told}{': ' + fault if fault else ''}")
    said = ", ".join(f"{number} {kind}" for kind, number in chains.items())
    fault = f"{FAULT} (runs: {said})"
    return Outcome(fault, REQUIRED, count, count - lost, tuple(failures), time.monotonic() - began)


def _straight(made: ShortRun, way: Way) -> Straight:
    out = made.out(way.straight)
    started = time.monotonic()
    first = None
    child = begun(made, way, way.straight, resume=False)
    while not child.ended():
        if first is None and _written(out):
            first = time.monotonic()
        time.sleep(LOOK)
    end = time.monotonic()
    ended = child.wait(STANDSTILL)
    changes = made.marks[killedways.CHANGES]
    if ended.code:
        raise RuntimeError(f"the run without a kill ended with {ended.code}: {ended.said}")
    # which none of the others has to do then
    import_noted(killedways.imports_of(made, way.straight))
    first = first or end
    return Straight(told_of(out, ended.said), changes, first - started, end - first)


def _written(out: Path) -> tuple[int, ...]:
    """Return what changes when a run writes; nothing, where it has not begun to."""
    file = out / "metrics.jsonl"
    if not file.exists():
        return ()
    # Not by `rglob`, because a directory may go while it is looked at.
    inside = sum(
        name.startswith("checkpoint-") or name == "model"
        for _, names, _ in os.walk(out)
        for name in names
    )
    return (file.stat().st_size, inside)


def _chain(
    made: ShortRun, way: Way, straight: Straight, length: int, draw: random.Random
) -> tuple[list[str], str]:
    """Kill one run so many times, and let it go on to its end; return when it was killed, and
    what is wrong.
    """
    made.forget(NAME)
    killed = list[str]()
    ended = None
    out = made.out(NAME)
    share = 1 if length == 1 else 2 / length  # of a run, what a process lives to do of it at most
    while ended is None and len(killed) < length:
        when, ended = _life(made, way, straight, share, draw)
        killed += [when] if when else []
    ended = ended or begun(made, way, NAME, resume=is_there(way, out)).wait(STANDSTILL)
    if ended.code:
        return killed, f"it ended with {ended.code}: {last_lines(ended.said)}"
    return killed, killedways.difference(told_of(out, ended.said), straight.told)


def _life(
    made: ShortRun, way: Way, straight: Straight, share: float, draw: random.Random
) -> tuple[str, Ended | None]:
    """Start a run, or go on with it, and kill it; return when, and how it ended where it came to
    an end of its own.
    """
    resume = is_there(way, made.out(NAME))
    if way.anew or draw.random() >= BY_CHANGE:
        return _at_any_time(
            begun(made, way, NAME, resume=resume), made.out(NAME), straight, share, draw
        )
    at = draw.randrange(max(1, int(straight.changes * share)))
    ended = begun(made, way, NAME, resume=resume, at=at).wait(STANDSTILL)
    return (
        (f"at change {at}", None)
        if made.marks[killedways.DIED] and ended.code != HUNG
        else ("", ended)
    )


def _at_any_time(
    child: Child, out: Path, straight: Straight, share: float, draw: random.Random
) -> tuple[str, Ended | None]:
    early = draw.random() < EARLY
    found = _written(out)
    delay = draw.uniform(0, straight.before if early else straight.after * share)
    while not early and not child.ended() and _written(out) == found:
        time.sleep(LOOK)
    time.sleep(delay)
    when = f"{delay:.3f} s after {'the start' if early else 'something was written'}"
    if not (trains := killedways.held_by(child)) or draw.random() < ALL:
        return (when, None) if killedways.end_all(child) else ("", child.wait(STANDSTILL))
    number = draw.randrange(len(trains))
    trains[number].kill()
    ended = child.wait(STANDSTILL)  # of torchrun, which sees it, and ends the others
    return (f"{when}, process {number} alone", None) if ended.code not in (0, HUNG) else ("", ended)
