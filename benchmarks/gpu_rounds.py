"""Rounds of one row of gpu.py: an arm and PEFT take a step in turn, and what each took is put
together.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gpu_process import Child, Failed

__all__ = ["Measured", "measure"]


@dataclass
class Measured:
    """The steps of one arm, what it said of itself, and the steps of PEFT in the same rounds."""

    about: dict[str, Any]
    steps: list[dict[str, Any]] = field(default_factory=list)
    host_bytes: int = 0
    reference: Measured | None = None

    @property
    def seconds(self) -> list[float]:
        """Of each step."""
        return [step["seconds"] for step in self.steps]

    def row(
        self, tokens: int, operations: float, rate: float | None, link: float | None
    ) -> dict[str, Any]:
        """Return the numbers of a row.

        Args:
            tokens: of a step.
            operations: of a step, floating-point.
            rate: of operations per second; None: it was not measured.
            link: bytes per second to the device, likewise.
        """
        last = self.steps[-1]
        seconds = statistics.median(self.seconds)
        row: dict[str, Any] = {
            "seconds": seconds,
            "all_seconds": self.seconds,
            "tokens_per_second": tokens / seconds,
            "losses": [step["loss"] for step in self.steps],
            "host": last["host"],
            "host_bytes": self.host_bytes,
        }
        row |= {name: max(step[name] for step in self.steps) for name in ("allocated", "reserved")}
        row |= {
            name: last[name] for name in ("bytes_uploaded", "bytes_read", "refused") if name in last
        }
        row |= {name: value for name, value in self.about.items() if name != "planned"}
        if parts := self.about.get("planned"):
            row |= {"planned": parts, "planned_bytes": sum(parts.values())}
            if "refused" in last:  # it was an allocator that counted
                row["off"] = row["allocated"] / row["planned_bytes"] - 1
        if predicted := row.get("predicted_seconds"):
            row["seconds_off"] = seconds / predicted - 1
        limits = [operations / rate] if rate else []
        if link and row.get("bytes_uploaded"):
            limits.append(row["bytes_uploaded"] / link)
        if limits:
            row |= {"limit_seconds": max(limits), "of_limit": max(limits) / seconds}
        if self.reference is not None:
            pairs = zip(self.reference.seconds, self.seconds, strict=True)
            row["ratio"] = statistics.median(theirs / ours for theirs, ours in pairs)
            row["loss_off"] = abs(last["loss"] / self.reference.steps[-1]["loss"] - 1)
        return row


def measure(
    child: Child,
    reference: Child | None,
    micro_batches: int,
    rounds: int,
    seconds: float,
    patience: Callable[[], float],
) -> Measured:
    """Have an arm and PEFT take `rounds` steps in turn, or as many as `seconds` allow, but one
    each.

    Args:
        child: the arm.
        reference: PEFT; None: the arm is measured alone, as it is where PEFT fails meanwhile.
        micro_batches: of a step.
        rounds: at most.
        seconds: for the rounds, about.
        patience: says how long anything may take.

    Raises:
        Refused: the arm has no room for it.
        Failed: the arm could not, or took too long.
    """
    found = Measured(child.prepare(micro_batches, patience()))
    if reference is not None and _in_turn(
        reference, found, micro_batches, rounds, seconds, child, patience
    ):
        return found
    found.steps = []
    found.reference = None
    began = time.monotonic()
    for number in range(rounds):
        found.steps.append(child.ask("step", patience()))
        if _over(began, number + 1, seconds):
            break
    found.host_bytes = child.host_peak
    return found


def _in_turn(
    reference: Child,
    found: Measured,
    micro_batches: int,
    rounds: int,
    seconds: float,
    child: Child,
    patience: Callable[[], float],
) -> bool:
    """Take the steps in turn; return whether PEFT has taken its own."""
    try:
        if reference.micro_batches != micro_batches:
            reference.prepare(micro_batches, patience())
        found.reference = Measured({})
        turns = [(child, found), (reference, found.reference)]
        began = time.monotonic()
        for number in range(rounds):
            for one, measured in turns[:: -1 if number % 2 else 1]:
                measured.steps.append(one.ask("step", patience()))
            if _over(began, number + 1, seconds):
                break
    except Failed:
        if child.ended:
            raise
        return False
    for one, measured in turns:
        measured.host_bytes = one.host_peak
    return True


def _over(began: float, rounds: int, seconds: float) -> bool:
    """Whether one round more would take too long."""
    return (time.monotonic() - began) * (rounds + 1) / rounds > seconds
