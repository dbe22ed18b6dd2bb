"""Learning-rate schedules as pure functions of the step, which need no torch.

Steps count from 0, `t` below; `n` is how many the schedule is made for. The learning rate of step `t` is the highest
times the factor. The factor at `n` is where the schedule ends: the last step is `n - 1`. Those that are `transformers`'
own have its formulas: a plan of phases tells its learning rates without an optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

from lema.config.problems import nearest
from lema.errors import ConfigError

__all__ = ["SCHEDULES", "Spans", "factor_of", "spans_of", "takes"]

LOW = 0.01  # where warm-up begins and decay ends, for those of the schedules that do not go to 0
TAIL = 0.1  # the factor of the second stable part of wsds


@dataclass(frozen=True)
class Spans:
    """How many steps the parts of a schedule take."""

    warmup: int = 0  # `w`, over which the factor rises to 1
    decay: int = 0  # `d`, over which it falls
    tail: int = 0  # `s`, at the end, over which it stays low


Schedule = Callable[..., float]  # of the step, how many the schedule is made for, and its spans


def constant_with_warmup(step: int, total: int, spans: Spans) -> float:  # noqa: ARG001 - as the others
    """Return `t / w` for t < w, else 1: `transformers`' constant_with_warmup, and constant, which has no w."""
    return step / spans.warmup if step < spans.warmup else 1.0


def linear(step: int, total: int, spans: Spans) -> float:
    """Return `t / w` for t < w, else `(n - t) / (n - w)`, and 0 from n on: `transformers`' linear."""
    if step < spans.warmup:
        return step / spans.warmup
    return max(0.0, (total - step) / max(1, total - spans.warmup))


def cosine(step: int, total: int, spans: Spans) -> float:
    """Return `t / w` for t < w, else `(1 + cos(pi (t - w) / (n - w))) / 2`, and 0 from n on: `transformers`' cosine.
    Loshchilov and Hutter, arXiv:1608.03983."""
    return step / spans.warmup if step < spans.warmup else _cosine(step, total, spans.warmup)


def wsd(step: int, total: int, spans: Spans) -> float:
    """Warm-up, stable, decay (arXiv:2404.06395), the rise and the fall both linear. `0.01 + 0.99 t / w` for t < w; 1
    for w <= t < n - d; `1 - 0.99 (t - (n - d)) / d` from there; 0.01 from n on."""
    if step < spans.warmup:
        return _between(LOW, 1.0, step, spans.warmup)
    begins = total - spans.decay
    return _between(1.0, LOW, min(step, total) - begins, spans.decay) if step >= begins and spans.decay else 1.0


def wsds(step: int, total: int, spans: Spans) -> float:
    """Warm-up, stable, decay, and stable again at a tenth: pre-training and fine-tuning in one schedule. `0.01 + 0.99 t
    / w` for t < w; 1 for w <= t < n - s - d; `1 - 0.9 (t - (n - s - d)) / d` for n - s - d <= t < n - s; 0.1 from
    there."""
    if step < spans.warmup:
        return _between(LOW, 1.0, step, spans.warmup)
    ends = total - spans.tail
    begins = ends - spans.decay
    if step < begins:
        return 1.0
    return _between(1.0, TAIL, step - begins, spans.decay) if step < ends else TAIL


def cosine_rewarm(step: int, total: int, spans: Spans) -> float:
    """Warm-up from low, then a cosine to low, again in each phase. `0.01 + 0.99 t / w` for t < w, else `0.01 + 0.99 (1
    + cos(pi (t - w) / (n - w))) / 2`; 0.01 from n on."""
    if step < spans.warmup:
        return _between(LOW, 1.0, step, spans.warmup)
    return LOW + (1.0 - LOW) * _cosine(step, total, spans.warmup)


def _between(first: float, last: float, step: int, steps: int) -> float:
    return first + (last - first) * step / steps


def _cosine(step: int, total: int, begins: int) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, (step - begins) / max(1, total - begins))))


SCHEDULES: Mapping[str, Schedule] = {
    "constant": constant_with_warmup,
    **{one.__name__: one for one in (constant_with_warmup, linear, cosine, wsd, wsds, cosine_rewarm)},
}

# The parts a schedule has, each with its length where none is given: a fraction of all steps.
_PARTS: Mapping[str, Mapping[str, float]] = {
    "constant": {},
    "constant_with_warmup": {"warmup": 0.0},
    "linear": {"warmup": 0.0},
    "cosine": {"warmup": 0.0},
    "wsd": {"warmup": 0.01, "decay": 0.1},
    "wsds": {"warmup": 0.01, "decay": 0.1, "tail": 0.5},
    "cosine_rewarm": {"warmup": 0.01},
}


def takes(name: str) -> tuple[str, ...]:
    """Return the parts whose length a schedule can be given."""
    return tuple(_PARTS[name])


def spans_of(name: str, total: int, **lengths: int | float | None) -> Spans:
    """Return how many steps each part of a schedule takes. `ConfigError`: there is no such schedule, it has no such
    part, or its parts together are longer than it is.

    Args:
        lengths: `warmup`, `decay` and `tail`. A whole number is steps. A fraction is of `total`, rounded down; it
            is taken as written, so that 0.29 of 100 steps are 29. None is the schedule's own: warm-up is 0.01 for
            wsd, wsds and cosine_rewarm and 0 for the others, decay 0.1, and the tail 0.5.
    """
    if name not in SCHEDULES:
        near = nearest(name, SCHEDULES)
        how = f"did you mean {' or '.join(near)}?" if near else f"use one of {', '.join(SCHEDULES)}"
        raise ConfigError(f"there is no schedule {name!r}", where="lr_scheduler_type", how=how)
    parts = _PARTS[name]
    for part, length in lengths.items():
        if length is not None and part not in parts:
            how = f"leave {part} out, or use {' or '.join(one for one in SCHEDULES if part in _PARTS[one])}"
            raise ConfigError(f"schedule {name} has no {part}", where=part, how=how)
    given = {part: lengths.get(part) for part in parts}
    steps = {part: _steps(parts[part] if length is None else length, total) for part, length in given.items()}
    if sum(steps.values()) > total:
        said = " and ".join(f"{part} ({count})" for part, count in steps.items())
        what = f"{said} {'are' if len(steps) > 1 else 'is'} more than the schedule's {total} steps"
        how = f"make {' or '.join(steps)} shorter, or train on more tokens"
        raise ConfigError(what, where=max(steps, key=lambda part: steps[part]), how=how)
    return Spans(**steps)


def _steps(length: int | float, total: int) -> int:
    # 0.29 * 100 is 28.999999999999996 as floats, and 29 to whoever wrote it.
    return length if isinstance(length, int) else math.floor(Fraction(repr(length)) * total)


def factor_of(name: str, total: int, spans: Spans) -> Callable[[int], float]:
    """Return the schedule as a function of the step alone."""
    return partial(SCHEDULES[name], total=total, spans=spans)
