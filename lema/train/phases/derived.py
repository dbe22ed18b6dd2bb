"""Facts derived from a plan of phases: the samples each phase draws, the plan's identity, and warnings.

The samples of a phase follow from how its mixture fades in and from what earlier phases have read of its data sets. Two
plans are the same if everything that decides a number of the run is the same. A warning names something in a plan that
its writer may not have meant, before anything is trained.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict

from lema.config.problems import Problem
from lema.config.settings import Settings
from lema.config.types import Count, Tokens
from lema.data.sampling import Start, rates_of

if TYPE_CHECKING:
    from lema.train.phases.phase import Phase
    from lema.train.phases.plan import PhasePlan


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


class FadeConfig(Settings):
    """Over its first so many steps or tokens, the mixture of a phase comes in for that of the phase before."""

    model_config = ConfigDict(frozen=True)

    steps: Count | None = None
    """Optimizer steps that it takes."""
    tokens: Tokens | None = None
    """Or tokens, padding included; what is less than a row at the end is left out."""
    shape: Annotated[Literal["linear", "cosine", "sigmoid"], BeforeValidator(_lower)] = "linear"
    """How the weight of the mixture before falls from 1 to 0; `lema.data.interleave` has the formulas."""

    def disagreements(self) -> Iterator[Problem]:
        """Yield that both lengths are given, or neither."""
        if (self.steps is None) == (self.tokens is None):
            both = self.steps is not None
            what = "steps and tokens both say how long it is" if both else "steps is not given, nor is tokens"
            yield Problem("steps", what, "keep one" if both else "add one of them")

    def samples(self, batch_size: int, max_length: int) -> int:
        """Return over how many samples it goes."""
        return self.tokens // max_length if self.steps is None and self.tokens else (self.steps or 0) * batch_size


def fade_problems(before: Phase | None, phase: Phase, path: str) -> Iterator[Problem]:
    """Yield what is wrong with the fade of a phase, given the phase before."""
    if phase.fade is None:
        return
    if before is None:
        yield Problem(path, f"{path}: there is no phase before this one whose mixture could fade", "leave fade out")
        return
    if rates_of(before.mixture) == rates_of(phase.mixture):
        yield Problem(path, f"{path}: the mixture is that of the phase before, so that nothing fades", "leave fade out")
    styles = {sampling.full_name: sampling.style for sampling in before.mixture}
    for sampling in phase.mixture:
        if (was := styles.get(sampling.full_name, sampling.style)) is not sampling.style:
            what = f"{path}: {sampling.full_name} is {was} in the phase before, and {sampling.style} in this one"
            yield Problem(path, what, "give a data set one style")


def fade_too_long(phase: Phase, steps: int, batch_size: int, max_length: int, path: str) -> Iterator[Problem]:
    """Yield what is wrong with how long a fade is, where its phase has so many steps."""
    if phase.fade is None:
        return
    key = f"{path}.{'tokens' if phase.fade.steps is None else 'steps'}"
    samples, most = phase.fade.samples(batch_size, max_length), steps * batch_size
    if samples > most:
        what = f"{key}: the fade is {samples} rows, and the phase has {most} of them"
        yield Problem(key, what, "make it shorter, or give the phase more tokens")
    if not samples:
        yield Problem(key, f"{key}: the fade is less than one row of {max_length} tokens", "make it longer")


def starts_of(plan: PhasePlan) -> Sequence[dict[str, Start]]:
    """Return of each phase where it begins with each of its data sets, by name."""
    found: list[dict[str, Start]] = []
    reached: dict[str, Start] = {}
    for index, phase in enumerate(plan.phases):
        counts, anew = plan.counts(index), phase.data == "restart"
        begins = {name: Start(index, 0) if anew else reached.get(name, Start(index, 0)) for name in counts}
        reached |= {name: Start(start.stage, start.taken + counts[name]) for name, start in begins.items()}
        found.append(begins)
    return found


_FORMAT = 3  # of the numbers; another one when what a setting means has changed
_NOTHING = "nothing"


def numbers_of(plan: PhasePlan, num_phases: int | None = None) -> dict[str, Any]:
    """Return what decides the numbers of a run's first so many phases: plain JSON types, with every default worked out.

    Not in it are names, the micro-batch size, what the last phase saves, and tokens that are less than a step.
    """
    starts = starts_of(plan)
    phases = [_of_phase(plan, index, starts[index]) for index in range(len(plan.phases))][:num_phases]
    same = {"seed": plan.seed, "batch_size": plan.batch_size, "max_length": plan.max_length}
    plain: dict[str, Any] = json.loads(json.dumps({"format": _FORMAT, **same, "phases": phases}, allow_nan=False))
    return plain


def _of_phase(plan: PhasePlan, index: int, starts: Mapping[str, Start]) -> dict[str, Any]:
    phase, steps, fade = plan.phases[index], plan.steps(index).steps, plan.fade(index)
    return {
        "trains": phase.trains,
        "trainable": None if phase.trainable is None else sorted(set(phase.trainable)),
        "layers": None if phase.layers is None else sorted({str(item) for item in phase.layers}),
        "steps": steps,
        "mixture": [asdict(sampling) for sampling in phase.mixture],
        "learning_rate": phase.learning_rate,
        "lr_scheduler_type": phase.lr_scheduler_type,
        "schedule_steps": phase.schedule_total(steps),
        "schedule_start": phase.schedule_start,
        **asdict(phase.spans(steps)),
        "optimizer": phase.optimizer,
        **({} if phase.adapters is None else phase.adapters.adapter_numbers()),
        "merge": phase.merge,
        "rounding": (phase.rounding or "nearest") if phase.merge else None,
        "fade": None if fade is None else {"samples": fade.samples, "shape": fade.shape},
        "data": {name: start._asdict() for name, start in starts.items()},
    }


def differences_between(now: Mapping[str, Any], then: Mapping[str, Any]) -> list[str]:
    """Return a line for each key whose value is not what it was."""
    is_now, was = dict(_leaves(now)), dict(_leaves(then))
    return [
        f"{key} is {is_now.get(key, _NOTHING)!r}, and was {was.get(key, _NOTHING)!r}"
        for key in [*is_now, *(key for key in was if key not in is_now)]
        if is_now.get(key, _NOTHING) != was.get(key, _NOTHING)
    ]


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}".removeprefix("."))
    elif isinstance(value, list) and any(isinstance(one, Mapping) for one in value):
        for place, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{place}]")
    else:
        yield path, value


# Leftover tokens above this part of a phase are told; below it they are the rounding of any round number.
_NOTABLE = 0.01

# A micro-batch below this part of what is allowed is told: it costs time, and another batch_size would not.
_SMALL = 0.5


def _warning(key: str, what: str, how: str) -> Problem:
    return Problem(key, what, how, place=key)


def plan_warnings(plan: PhasePlan, num_processes: int = 1) -> tuple[Problem, ...]:
    """Return what to look at before so many processes run a plan; `ConfigError` where they cannot divide a step."""
    phases = (warning for index in range(len(plan.phases)) for warning in _phase(plan, index))
    return (*_division(plan, num_processes), *phases)


def _division(plan: PhasePlan, num_processes: int) -> Iterator[Problem]:
    batch = plan.batch(num_processes)
    share = batch.rows // num_processes
    wanted = min(plan.micro_batch_size or batch.micro_batch_size, share)
    if batch.micro_batch_size < _SMALL * wanted:
        what = f"the {share} rows of a process divide into micro-batches of {batch.micro_batch_size} only"
        yield _warning("batch_size", what, f"a multiple of {wanted * num_processes} rows divides into {wanted}")


def _phase(plan: PhasePlan, index: int) -> Iterator[Problem]:
    phase, size = plan.phases[index], plan.steps(index)
    path, called = f"phases[{index}]", f"phase {index + 1} ({phase.name})"
    ends, total, spans = phase.schedule_start + size.steps, phase.schedule_total(size.steps), phase.spans(size.steps)
    rates = [plan.learning_rate(index, step) for step in (0, size.steps - 1)]
    moves = f"the learning rate goes from {rates[0]:.2g} to {rates[1]:.2g}"
    goes_on = _goes_on(plan, index, ends, total)
    if not goes_on and ends <= spans.warmup:
        what = f"{called} ends inside its warm-up: {size.steps} steps, and {spans.warmup} of warm-up; {moves}"
        what += f", and never reaches {phase.learning_rate:.2g}"
        key, how = f"{path}.{phase.length_key('warmup')}", "shorten the warm-up, or give the phase more tokens"
        yield _warning(key, what, how)
    elif not goes_on and ends < total:
        what = f"{called} ends at step {ends} of a schedule of {total}; {moves}"
        yield _warning(f"{path}.schedule_steps", what, "leave schedule_steps out to end with the phase")
    if size.leftover > _NOTABLE * phase.tokens:
        what = f"{called} leaves out {size.leftover} of {phase.tokens} tokens, which are less than a step"
        yield _warning(f"{path}.tokens", what, f"give {size.tokens} or {size.tokens + size.tokens // size.steps}")


def _goes_on(plan: PhasePlan, index: int, ends: int, total: int) -> bool:
    """Whether the next phase takes up the schedule where this one leaves it."""
    if index + 1 == len(plan.phases):
        return False
    after = plan.phases[index + 1]
    same = after.lr_scheduler_type == plan.phases[index].lr_scheduler_type and after.schedule_start == ends
    return same and after.schedule_total(plan.steps(index + 1).steps) == total
