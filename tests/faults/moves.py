"""A run that is killed and goes on with another number of processes: bitwise as one that nothing
disturbed.

A step has as many micro-batches as there are processes at most, so that their gradients are added
in one order whoever computes them; with more, docs/processes.md promises all but the order of
additions.
"""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from faults import killedways
from faults.forked import HUNG
from faults.killedways import PHASES, STEPWISE, Way, begun, is_there, told_of
from faults.outcome import Outcome
from faults.shortrun import ShortRun, last_lines, short_run

__all__ = ["run"]

FAULT = "kill -9 at a change of the disk, and another number of processes goes on, 1 to 2 or 2 to 1"
REQUIRED = (
    "the same bytes of adapters, weights and optimizers; of plain runs the same record, "
    "summary and card"
)
NAME = "moved-run"
SAME = {"micro_batch_size": 1, "lora_dropout": 0.0}  # processes draw what they drop each for itself
MOVED = (Way("plain", {**STEPWISE, **SAME}), Way("phases", {**PHASES, **SAME}))
COUNTS = ((1, 2), (2, 1))  # of processes, before the kill and after it


def run(count: int, seed: int = 0, report: Callable[[str], None] | None = None) -> Outcome:
    """Kill `count` runs and have others go on, plain ones and phases in both directions by
    turns.
    """
    began = time.monotonic()
    draw = random.Random(seed)
    failures = list[str]()
    made = short_run()
    straights = {}
    for number in range(count):
        way, (before, after) = MOVED[number // 2 % 2], COUNTS[number % 2]
        if way.name not in straights:
            ended = begun(made, way, f"straight-moved-{way.name}", resume=False).wait(
                killedways.STANDSTILL
            )
            if ended.code:
                raise RuntimeError(f"the run without a kill ended with {ended.code}: {ended.said}")
            told = told_of(made.out(f"straight-moved-{way.name}"), ended.said)
            straights[way.name] = told, made.marks[killedways.CHANGES]
        told, changes = straights[way.name]
        at = draw.randrange(changes // 2, changes)  # when there is something to go on from, mostly
        wrong = _case(made, way, before, after, at, told)
        name = f"{way.name}, {before} to {after} processes, killed at change {at} of {changes}"
        if wrong:
            failures.append(f"{name}: {wrong}")
        if report is not None:
            report(f"move {number + 1}/{count}, {name}{': ' + wrong if wrong else ''}")
    return Outcome(
        FAULT, REQUIRED, count, count - len(failures), tuple(failures), time.monotonic() - began
    )


def _case(
    made: ShortRun, way: Way, before: int, after: int, at: int, straight: dict[str, Any]
) -> str:
    made.forget(NAME)
    out = made.out(NAME)
    killed = begun(made, replace(way, processes=before), NAME, resume=False, at=at).wait(
        killedways.STANDSTILL
    )
    if not made.marks[killedways.DIED] or killed.code == HUNG:
        return f"it was not killed, and ended with {killed.code}: {last_lines(killed.said)}"
    child = begun(made, replace(way, processes=after), NAME, resume=is_there(way, out))
    ended = child.wait(killedways.STANDSTILL)
    if ended.code:
        return f"it ended with {ended.code}: {last_lines(ended.said)}"
    left = told_of(out, ended.said)
    # of which what is logged is a mean over processes, whose order of additions is another
    if way.phases:
        left = _bytes(left)
        straight = _bytes(straight)
    return killedways.difference(left, straight)


def _bytes(told: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: one
        for name, one in told.items()
        if name.endswith(".safetensors") or name == "left behind"
    }
