"""Learning-rate schedules as pure functions of the step, which need no torch.

Steps count from 0, `t` below; `n` is how many the schedule is made for. The learning rate of step
`t` is the highest times the factor. The factor at `n` is where the schedule ends: the last step is
`n - 1`. Those that are `transformers`' own have its formulas: a plan of phases tells its learning
rates without an optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Literal, TypeAlias

from lema.config.problems import nearest
from lema.errors import ConfigError

__all__ = ["SCHEDULES", "TRAINERS", "Spans", "factor_of", "spans_as_trainer", "spans_of", "takes"]
__all__ += ["Rounding", "trainer_warmup"]

Rounding: TypeAlias = Literal["up", "down"]
"""How a fraction of steps becomes a number of them."""

LOW = 0.01  # where warm-up begins and decay ends, for those of the schedules that do not go to 0
TAIL = 0.1  # the factor of the second stable part of wsds


@dataclass(frozen=True)
class Spans:
    """How many steps the parts of a schedule take."""

    warmup: int = 0  # `w`, over which the factor rises to 1
    decay: int = 0  # `d`, over which it falls
    tail: int = 0  # `s`, at the end, over which it stays low


@dataclass(frozen=True)
class Schedule:
    """A schedule: `low + (1 - low) t / w` for t < w, and from there what `falls` makes of t, n
    and the spans.
    """

    parts: Mapping[str, float]  # its parts, each with its default length: a fraction of all steps
    falls: Callable[[int, int, Spans], float]
    low: float = 0.0

    def factor(self, step: int, total: int, spans: Spans) -> float:
        """Return the factor of the learning rate at a step."""
        if step < spans.warmup:
            return _between(self.low, 1.0, step, spans.warmup)
        return self.falls(step, total, spans)


def _between(first: float, last: float, step: int, steps: int) -> float:
    return first + (last - first) * step / steps


def _constant(step: int, total: int, spans: Spans) -> float:  # noqa: ARG001 - as the others
    return 1.0


def _linear(step: int, total: int, spans: Spans) -> float:
    """Return `(n - t) / (n - w)`, and 0 from n on."""
    return max(0.0, (total - step) / max(1, total - spans.warmup))


def _cosine(low: float, step: int, total: int, spans: Spans) -> float:
    """Return `low + (1 - low) (1 + cos(pi (t - w) / (n - w))) / 2`, and low from n on
    (arXiv:1608.03983).
    """
    done = min(1.0, (step - spans.warmup) / max(1, total - spans.warmup))
    return low + (1.0 - low) * (0.5 * (1.0 + math.cos(math.pi * done)))


def _stable(last: float, step: int, total: int, spans: Spans) -> float:
    """Return 1 for t < n - s - d; `1 - (1 - last) (t - (n - s - d)) / d` for t < n - s; last
    from there.
    """
    stop = total - spans.tail
    begins = stop - spans.decay
    if step < begins:
        return 1.0
    return _between(1.0, last, step - begins, spans.decay) if step < stop else last


SCHEDULES: Mapping[str, Schedule] = {
    # The first four are `transformers`' own.
    "constant": Schedule({}, _constant),
    "constant_with_warmup": Schedule({"warmup": 0.0}, _constant),
    "linear": Schedule({"warmup": 0.0}, _linear),
    "cosine": Schedule({"warmup": 0.0}, partial(_cosine, 0.0)),
    # Warm-up, stable, decay (arXiv:2404.06395), rise and fall both linear.
    "wsd": Schedule({"warmup": 0.01, "decay": 0.1}, partial(_stable, LOW), LOW),
    # The same, and stable again at a tenth: pre-training and fine-tuning in one schedule.
    "wsds": Schedule({"warmup": 0.01, "decay": 0.1, "tail": 0.5}, partial(_stable, TAIL), LOW),
    # Warm-up from low, then a cosine to low, again in each phase.
    "cosine_rewarm": Schedule({"warmup": 0.01}, partial(_cosine, LOW), LOW),
}


TRAINERS = frozenset({"constant", "constant_with_warmup", "linear", "cosine"})
"""Those of `SCHEDULES` that are `transformers`' own."""


def takes(name: str) -> tuple[str, ...]:
    """Return the parts whose length a schedule can be given."""
    return tuple(SCHEDULES[name].parts)


def spans_of(name: str, total: int, **lengths: int | float | None) -> Spans:
    """Return how many steps each part of a schedule takes. `ConfigError`: there is no such
    schedule, it has no such part, or its parts together are longer than it is. `lengths`: `warmup`,
    `decay` and `tail`. A whole number is steps. A fraction is of `total`, rounded down; it is taken
    as written, so that 0.29 of 100 steps are 29. None is the schedule's own: warm-up is 0.01 for
    wsd, wsds and cosine_rewarm and 0 for the others, decay 0.1, tail 0.5."""
    if name not in SCHEDULES:
        near = nearest(name, SCHEDULES)
        how = f"did you mean {' or '.join(near)}?" if near else f"use one of {', '.join(SCHEDULES)}"
        raise ConfigError(f"there is no schedule {name!r}", where="lr_scheduler_type", how=how)
    parts = SCHEDULES[name].parts
    for part, length in lengths.items():
        if length is not None and part not in parts:
            with_part = (name for name, schedule in SCHEDULES.items() if part in schedule.parts)
            how = f"leave {part} out, or use {' or '.join(with_part)}"
            raise ConfigError(f"schedule {name} has no {part}", where=part, how=how)
    part_lengths = {part: lengths.get(part) for part in parts}
    steps = {
        part: _steps(parts[part] if length is None else length, total)
        for part, length in part_lengths.items()
    }
    if sum(steps.values()) > total:
        summary = " and ".join(f"{part} ({count})" for part, count in steps.items())
        what = (
            f"{summary} {'are' if len(steps) > 1 else 'is'} more than the schedule's {total} steps"
        )
        how = f"make {' or '.join(steps)} shorter, or train on more tokens"
        raise ConfigError(what, where=max(steps, key=lambda part: steps[part]), how=how)
    return Spans(**steps)


def trainer_warmup(share: float, total: int, rounding: Rounding = "up") -> int:
    """Return the steps of warm-up that a share of all steps is: rounded up as by `transformers`, or
    down as by axolotl, which makes 2 of 1, because in a warm-up of one step the rate is 0."""
    if rounding == "up":
        return math.ceil(share * total)
    steps = int(share * total)
    return 2 if steps == 1 else steps


def spans_as_trainer(
    name: str, total: int, rounding: Rounding = "up", **lengths: int | float | None
) -> Spans:
    """Return how many steps each part of a schedule takes, as a run without phases counts them.

    Args:
        name: the schedule; one that is not in `SCHEDULES` is another of `transformers`.
        total: the steps of the schedule.
        rounding: of a fraction of warm-up.
        lengths: as in `spans_of`.

    Returns:
        Its parts. A fraction of warm-up is rounded up for the schedules of `transformers`, as its
        Trainer does, or as `rounding` says, and `constant` has none, whatever is asked.

    Raises:
        ConfigError: as `spans_of`.
    """
    if name in SCHEDULES and name not in TRAINERS:
        return spans_of(name, total, **lengths)
    for part in ("decay", "tail"):
        if lengths.get(part) is not None:
            what = f"schedule {name} has no {part}"
            how = f"leave {part} out, or use wsd or wsds"
            raise ConfigError(what, where=part, how=how)
    warmup = lengths.get("warmup") or 0
    if name == "constant":
        return Spans()
    return Spans(warmup if isinstance(warmup, int) else trainer_warmup(warmup, total, rounding))


def _steps(length: int | float, total: int) -> int:
    # 0.29 * 100 is 28.999999999999996 as floats, but the user means 29.
    return length if isinstance(length, int) else math.floor(Fraction(repr(length)) * total)


def factor_of(name: str, total: int, spans: Spans) -> Callable[[int], float]:
    """Return the schedule as a function of the step alone."""
    return partial(SCHEDULES[name].factor, total=total, spans=spans)
