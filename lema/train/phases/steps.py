"""Learning-rate schedules over the steps of a phase, and how many rows each process takes in a step.

Each schedule is a pure function of the step, of the number of steps, and of the lengths of its parts. Steps count from
0 at the beginning of the phase, `t` below; `n` is how many the schedule is made for. The learning rate of step `t` is
the phase's own times the factor. The factor at `n` is where the schedule ends: the last step is `n - 1`. A global batch
is divided among processes and micro-batches, and a phase's tokens among steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lema.config.problems import nearest
from lema.errors import ConfigError

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LambdaLR

__all__ = [
    "SCHEDULES",
    "GlobalBatch",
    "Spans",
    "TokenSteps",
    "factor_of",
    "follow",
    "solve_batch",
    "spans_of",
    "steps_of",
    "takes",
]


LOW = 0.01


"""Where warm-up begins and decay ends, for those of the schedules that do not go to 0."""


TAIL = 0.1


"""The factor of the second stable part of wsds."""


@dataclass(frozen=True)
class Spans:
    """How many steps the parts of a schedule take.

    Args:
        warmup: `w`, over which the factor rises to 1.
        decay: `d`, over which it falls.
        tail: `s`, at the end, over which it stays low.
    """

    warmup: int = 0
    decay: int = 0
    tail: int = 0


Schedule = Callable[[int, int, Spans], float]


def constant(step: int, total: int, spans: Spans) -> float:  # noqa: ARG001 - as the others
    """Return 1: `transformers`' constant."""
    return 1.0


def constant_with_warmup(step: int, total: int, spans: Spans) -> float:  # noqa: ARG001 - as the others
    """Return `t / w` for t < w, else 1: `transformers`' constant_with_warmup."""
    return step / spans.warmup if step < spans.warmup else 1.0


def linear(step: int, total: int, spans: Spans) -> float:
    """Return `t / w` for t < w, else `(n - t) / (n - w)`, and 0 from n on: `transformers`' linear."""
    if step < spans.warmup:
        return step / spans.warmup
    return max(0.0, (total - step) / max(1, total - spans.warmup))


def cosine(step: int, total: int, spans: Spans) -> float:
    """Return `t / w` for t < w, else `(1 + cos(pi (t - w) / (n - w))) / 2`, and 0 from n on: `transformers`' cosine.

    Loshchilov and Hutter, arXiv:1608.03983.
    """
    return step / spans.warmup if step < spans.warmup else _cosine(step, total, spans.warmup)


def wsd(step: int, total: int, spans: Spans) -> float:
    """Warm-up, stable, decay (arXiv:2404.06395), the rise and the fall both linear.

    `0.01 + 0.99 t / w` for t < w; 1 for w <= t < n - d; `1 - 0.99 (t - (n - d)) / d` from there; 0.01 from n on.
    """
    if step < spans.warmup:
        return _between(LOW, 1.0, step, spans.warmup)
    begins = total - spans.decay
    return _between(1.0, LOW, min(step, total) - begins, spans.decay) if step >= begins and spans.decay else 1.0


def wsds(step: int, total: int, spans: Spans) -> float:
    """Warm-up, stable, decay, and stable again at a tenth: pre-training and fine-tuning in one schedule.

    `0.01 + 0.99 t / w` for t < w; 1 for w <= t < n - s - d; `1 - 0.9 (t - (n - s - d)) / d` for n - s - d <= t < n - s;
    0.1 from there.
    """
    if step < spans.warmup:
        return _between(LOW, 1.0, step, spans.warmup)
    ends = total - spans.tail
    begins = ends - spans.decay
    if step < begins:
        return 1.0
    return _between(1.0, TAIL, step - begins, spans.decay) if step < ends else TAIL


def cosine_rewarm(step: int, total: int, spans: Spans) -> float:
    """Warm-up from low, then a cosine to low, again in each phase.

    `0.01 + 0.99 t / w` for t < w, else `0.01 + 0.99 (1 + cos(pi (t - w) / (n - w))) / 2`; 0.01 from n on.
    """
    if step < spans.warmup:
        return _between(LOW, 1.0, step, spans.warmup)
    return LOW + (1.0 - LOW) * _cosine(step, total, spans.warmup)


def _between(first: float, last: float, step: int, steps: int) -> float:
    return first + (last - first) * step / steps


def _cosine(step: int, total: int, begins: int) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, (step - begins) / max(1, total - begins))))


SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {
        "constant": constant,
        "constant_with_warmup": constant_with_warmup,
        "linear": linear,
        "cosine": cosine,
        "wsd": wsd,
        "wsds": wsds,
        "cosine_rewarm": cosine_rewarm,
    }
)


"""Every schedule by name."""


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
    """Return how many steps each part of a schedule takes.

    Args:
        name: of the schedule, one of `SCHEDULES`.
        total: steps it is made for.
        lengths: `warmup`, `decay` and `tail`. A whole number is steps. A fraction is of `total`, rounded down; it is
            taken as written, so that 0.29 of 100 steps are 29. None is the schedule's own: warm-up is 0.01 for wsd,
            wsds and cosine_rewarm and 0 for the others, decay 0.1, and the tail 0.5.

    Raises:
        ConfigError: there is no such schedule, it has no such part, or its parts together are longer than it is.
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
        raise ConfigError(
            f"{said} {'are' if len(steps) > 1 else 'is'} more than the schedule's {total} steps",
            where=max(steps, key=lambda part: steps[part]),
            how=f"make {' or '.join(steps)} shorter, or give the phase more tokens",
        )
    return Spans(**steps)


def _steps(length: int | float, total: int) -> int:
    # 0.29 * 100 is 28.999999999999996 as floats, and 29 to whoever wrote it.
    return length if isinstance(length, int) else math.floor(Fraction(repr(length)) * total)


def factor_of(name: str, total: int, spans: Spans) -> Callable[[int], float]:
    """Return the schedule as a function of the step alone."""
    schedule = SCHEDULES[name]

    def factor(step: int) -> float:
        return schedule(step, total, spans)

    return factor


def follow(
    optimizer: Optimizer, factor: Callable[[int], float], learning_rate: float | None = None, step: int = 0
) -> LambdaLR:
    """Have an optimizer follow a schedule, of which `step` steps have been taken.

    A parameter group remembers the first learning rate it was ever scheduled with, and torch's schedules go by it. An
    optimizer that is carried into a phase would keep that of the phase before; so it is forgotten here.

    Args:
        optimizer: whose parameter groups all follow.
        factor: of the step, counted from 0.
        learning_rate: what the factor is of; None: what each group has.
        step: the next one, counted likewise.
    """
    from torch.optim.lr_scheduler import LambdaLR

    for group in optimizer.param_groups:
        group.pop("initial_lr", None)
        if learning_rate is not None:
            _set_rate(group, learning_rate)
    schedule = LambdaLR(optimizer, factor)
    if step:
        rates = [base * factor(step) for base in schedule.base_lrs]
        state = {"last_epoch": step, "_step_count": step + 1, "_last_lr": rates, "lr_lambdas": [None] * len(rates)}
        schedule.load_state_dict(state)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            _set_rate(group, rate)
    return schedule


def _set_rate(group: dict[str, Any], rate: Any) -> None:
    # A rate that is a tensor is read on the device by captured or compiled steps: it must stay the same tensor.
    if hasattr(group["lr"], "fill_"):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


@dataclass(frozen=True)
class GlobalBatch:
    """The rows of one optimizer step: `rows == micro_batch_size * accumulation * num_processes`, always.

    Args:
        rows: of all processes together.
        micro_batch_size: rows that a process computes at once.
        accumulation: micro-batches of a process per step.
        num_processes: how many processes there are.
    """

    rows: int
    micro_batch_size: int
    accumulation: int
    num_processes: int


def solve_batch(rows: int, per_device: int | None = None, num_processes: int = 1) -> GlobalBatch:
    """Divide a global batch exactly: the largest micro-batch that is allowed and leaves nothing over.

    Args:
        rows: per optimizer step, of all processes together.
        per_device: most rows that a process may compute at once; None: as many as it gets.
        num_processes: how many processes there are.

    Raises:
        ConfigError: a number is below 1, or the rows cannot be divided among the processes; names the nearest that can.
    """
    for key, number in (("batch_size", rows), ("micro_batch_size", per_device), ("processes", num_processes)):
        if number is not None and number < 1:
            raise ConfigError(f"{key} must be at least 1, not {number}", where=key, how="give a whole number from 1 on")
    share, over = divmod(rows, num_processes)
    if over:
        near = [str(count * num_processes) for count in (share, share + 1) if count]
        raise ConfigError(
            f"{rows} rows cannot be divided among {num_processes} processes",
            where="batch_size",
            how=f"set it to {' or '.join(near)}, or run another number of processes",
        )
    largest = min(share, per_device or share)
    micro_batch_size = next(size for size in range(largest, 0, -1) if share % size == 0)
    return GlobalBatch(rows, micro_batch_size, share // micro_batch_size, num_processes)


@dataclass(frozen=True)
class TokenSteps:
    """The optimizer steps that tokens make.

    Args:
        steps: whole ones.
        tokens: that they take, padding included: rows x block each.
        leftover: tokens asked for beyond that; fewer than one step has.
    """

    steps: int
    tokens: int
    leftover: int


def steps_of(tokens: int, rows: int, block: int) -> TokenSteps:
    """Return the whole steps in a number of tokens: `steps == tokens // (rows * block)`, never one more.

    Numbers of tokens are round, and a step's seldom divides them: 10**9 are 3814.7 steps of 512 rows of 512. To refuse
    those would refuse nearly every plan, and to round up would train on more than was asked for. So what is less than a
    step is left out, and is told. It is not added to the next phase: the steps of a phase follow from its own settings,
    and a change in one leaves the others as they are.

    Args:
        tokens: of the phase.
        rows: of a global batch.
        block: tokens of a row.

    Raises:
        ConfigError: they do not make one step.
    """
    step = rows * block
    steps, leftover = divmod(tokens, step)
    if steps < 1:
        raise ConfigError(
            f"{tokens} tokens do not make one step, which is {rows} rows x {block} = {step} tokens",
            where="tokens",
            how=f"give at least {step} tokens, or lower batch_size or the length of a row",
        )
    return TokenSteps(steps, steps * step, leftover)
