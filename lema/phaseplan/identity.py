"""What makes two plans the same: all that decides a number of the run, and nothing else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lema.data.start import Start
from lema.phaseplan.samples import starts_of

if TYPE_CHECKING:
    from lema.phaseplan.plan import PhasePlan

__all__ = ["differences_between", "fingerprint_of", "numbers_of"]

_FORMAT = 2  # of the numbers; another one when what a setting means has changed
_NOTHING = "nothing"


def numbers_of(plan: PhasePlan, num_phases: int | None = None) -> dict[str, Any]:
    """Return what decides the numbers of a run: as plain JSON types, with every default and fraction worked out.

    Names, the micro-batch size, what the last phase saves and tokens that are less than a step change none, and are not
    in it.

    Args:
        plan: the plan.
        num_phases: of the first so many phases; None: of all.
    """
    starts = starts_of(plan)
    phases = [_of_phase(plan, index, starts[index]) for index in range(len(plan.phases))][:num_phases]
    same = {"seed": plan.seed, "batch_size": plan.batch_size, "block_size": plan.block_size}
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
        "schedule": phase.schedule,
        "schedule_steps": phase.schedule_total(steps),
        "schedule_start": phase.schedule_start,
        **asdict(phase.spans(steps)),
        "optimizer": phase.optimizer,
        "lora": None if phase.adapters is None else phase.adapters.numbers(),
        "merge": phase.merge,
        "rounding": (phase.rounding or "nearest") if phase.merge else None,
        "fade": None if fade is None else {"samples": fade.samples, "shape": fade.shape},
        "data": {name: start._asdict() for name, start in starts.items()},
    }


def fingerprint_of(numbers: Mapping[str, Any]) -> str:
    """Return the SHA-256 of `numbers` as canonical JSON, in hexadecimal."""
    text = json.dumps(numbers, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


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
