"""One trial of benchmarks/limits.py: a child under a limit and one without take turns, step by
step.

Other programs slow both alike, so what is judged is the ratio within a round. Each child has model
files of its own: what one has in the page cache serves the other nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import forget_pages
from limits_group import Child, Group, NotFit, TooSlow, child

SCRIPT = Path(__file__).parent / "limits_child.py"
LOADING = 240.0  # seconds a child has for loading and, beside its step's time, for the first step
ENDLESS = 3600.0  # what has no limit is waited for


@dataclass(frozen=True)
class Pair:
    """An arm's child without a limit, after its first steps, and what another one needs to be
    started.
    """

    arm: str
    free: Child
    group: Group
    files: Path
    options: Sequence[str]
    first_seconds: float

    @property
    def peak(self) -> int:
        """The most bytes the child without a limit has ever had, its page cache included."""
        return self.group.counters()["peak"]


@contextmanager
def unlimited(
    arm: str, free_files: Path, limited_files: Path, options: Sequence[str]
) -> Iterator[Pair]:
    """Start an arm without a limit and let it take two steps, the second from caches that are as
    they will be.
    """
    forget_pages(free_files)
    with child(SCRIPT, [arm, str(free_files), *options], None) as (process, group):
        process.ready(ENDLESS)
        process.step(ENDLESS)
        seconds = process.step(ENDLESS)["seconds"]
        yield Pair(arm, process, group, limited_files, options, seconds)


def trial(
    pair: Pair, limit: int, rounds: int, patience: float, decided: Callable[[list[float]], bool]
) -> dict[str, Any]:
    """Load a child in a cgroup of `limit` bytes and have it and the one without a limit do `rounds`
    steps in turn.

    Args:
        pair: the one without a limit.
        limit: bytes.
        rounds: steps of each.
        patience: steps longer than this many times the other's end the trial.
        decided: told the ratios so far, says whether the rest of the rounds can change nothing.
    """
    forget_pages(pair.files)
    began = time.monotonic()
    limited: list[dict[str, Any]] = []
    free: list[dict[str, Any]] = []
    row: dict[str, Any] = {"arm": pair.arm, "limit": limit, "outcome": "ran"}
    with child(SCRIPT, [pair.arm, str(pair.files), *pair.options], limit) as (process, group):
        try:
            process.ready(LOADING)
            process.step(LOADING + patience * pair.first_seconds)
            for number in range(rounds):
                turns = [(process, limited), (pair.free, free)]
                for one, steps in turns if number % 2 else reversed(turns):
                    slowest = patience * max(
                        pair.first_seconds, *(step["seconds"] for step in free[-1:]), 1.0
                    )
                    steps.append(one.step(slowest if one is process else ENDLESS))
                if decided(_ratios(limited, free)):
                    break
        except NotFit:
            row["outcome"] = "killed"
        except TooSlow as error:
            row["outcome"] = f"too slow: {error}"
        row |= group.counters()
    row |= {
        "ratios": _ratios(limited, free),
        "limited": limited,
        "free": free,
        "trial_seconds": time.monotonic() - began,
    }
    row["ratio"] = statistics.median(row["ratios"]) if row["ratios"] else None
    return row


def _ratios(limited: list[dict[str, Any]], free: list[dict[str, Any]]) -> list[float]:
    return [ours["seconds"] / other["seconds"] for ours, other in zip(limited, free, strict=False)]


def middle(steps: list[dict[str, Any]], key: str) -> float | None:
    """Return the median of one number over the steps; None: there were none."""
    return statistics.median(step[key] for step in steps) if steps else None
