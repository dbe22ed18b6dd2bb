"""What a plan says that its writer may not have meant, known before anything is trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lema.phaseplan.plan import PhasePlan

__all__ = ["PlanWarning", "plan_warnings"]

# Leftover tokens above this part of a phase are told; below it they are the rounding of any round number.
_NOTABLE = 0.01
# A micro-batch below this part of what is allowed is told: it costs time, and another batch_size would not.
_SMALL = 0.5


@dataclass(frozen=True)
class PlanWarning:
    """Something to look at before the run.

    Args:
        key: path of the setting.
        what: what will happen.
        how: what to change, where it is not meant.
    """

    key: str
    what: str
    how: str

    def __str__(self) -> str:
        return f"{self.key}: {self.what} ({self.how})"


def plan_warnings(plan: PhasePlan, num_processes: int = 1) -> tuple[PlanWarning, ...]:
    """Return what to look at before a plan is run by so many processes.

    Raises:
        ConfigError: the rows of a step cannot be divided among them.
    """
    phases = (warning for index in range(len(plan.phases)) for warning in _phase(plan, index))
    return (*_division(plan, num_processes), *phases)


def _division(plan: PhasePlan, num_processes: int) -> Iterator[PlanWarning]:
    batch = plan.batch(num_processes)
    share = batch.rows // num_processes
    wanted = min(plan.micro_batch_size or batch.micro_batch_size, share)
    if batch.micro_batch_size < _SMALL * wanted:
        what = f"the {share} rows of a process divide into micro-batches of {batch.micro_batch_size} only"
        yield PlanWarning("batch_size", what, f"a multiple of {wanted * num_processes} rows divides into {wanted}")


def _phase(plan: PhasePlan, index: int) -> Iterator[PlanWarning]:
    phase, size = plan.phases[index], plan.steps(index)
    path, called = f"phases[{index}]", f"phase {index + 1} ({phase.name})"
    ends, total, spans = phase.schedule_start + size.steps, phase.schedule_total(size.steps), phase.spans(size.steps)
    rates = [plan.learning_rate(index, step) for step in (0, size.steps - 1)]
    moves = f"the learning rate goes from {rates[0]:.2g} to {rates[1]:.2g}"
    goes_on = _goes_on(plan, index, ends, total)
    if not goes_on and ends <= spans.warmup:
        what = f"{called} ends inside its warm-up: {size.steps} steps, and {spans.warmup} of warm-up; {moves}"
        what += f", and never reaches {phase.learning_rate:.2g}"
        yield PlanWarning(f"{path}.warmup", what, "shorten the warm-up, or give the phase more tokens")
    elif not goes_on and ends < total:
        what = f"{called} ends at step {ends} of a schedule of {total}; {moves}"
        yield PlanWarning(f"{path}.schedule_steps", what, "leave schedule_steps out to end with the phase")
    if size.leftover > _NOTABLE * phase.tokens:
        what = f"{called} leaves out {size.leftover} of {phase.tokens} tokens, which are less than a step"
        yield PlanWarning(f"{path}.tokens", what, f"give {size.tokens} or {size.tokens + size.tokens // size.steps}")


def _goes_on(plan: PhasePlan, index: int, ends: int, total: int) -> bool:
    """Whether the next phase takes up the schedule where this one leaves it."""
    if index + 1 == len(plan.phases):
        return False
    after = plan.phases[index + 1]
    same = after.schedule == plan.phases[index].schedule and after.schedule_start == ends
    return same and after.schedule_total(plan.steps(index + 1).steps) == total
