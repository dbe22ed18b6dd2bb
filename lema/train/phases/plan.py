"""The phases of a run, one after the other, as data: and where each begins."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from os import PathLike
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, ConfigDict, Field

from lema.config.problems import Problem, as_problem
from lema.config.settings import Settings, part
from lema.config.types import Count
from lema.config.yaml import from_yaml
from lema.data.interleave import Fade, Interleaving
from lema.data.sampling import Start, rates_of
from lema.engine.schedules import factor_of
from lema.errors import ConfigError
from lema.train.phases.derived import differences_between, fade_too_long, numbers_of, plan_warnings, starts_of
from lema.train.phases.phase import Phase, between_phases
from lema.train.phases.steps import GlobalBatch, TokenSteps, solve_batch, steps_of

__all__ = ["Boundary", "PhasePlan"]


def _named(phases: Any) -> Any:
    if not isinstance(phases, list | tuple):
        return phases
    if not phases:
        raise ValueError("must have at least one phase; nothing would train")
    return [_with_name(phase, f"phase-{place + 1}") for place, phase in enumerate(phases)]


def _with_name(phase: Any, name: str) -> Any:
    if isinstance(phase, Mapping):
        return {**phase, "name": phase["name"] if phase.get("name") is not None else name}
    return phase.model_copy(update={"name": name}) if isinstance(phase, Phase) and phase.name is None else phase


@dataclass(frozen=True)
class Boundary:
    """Where a phase begins and ends, counted in optimizer steps and tokens of the whole run."""

    name: str
    first_step: int  # from 0
    stop_step: int  # the step after its last one
    first_token: int  # tokens of the run before it


class PhasePlan(Settings):
    """The phases of a run; a `SettingsError` has every problem under its path, such as `phases[1].learning_rate`."""

    model_config = ConfigDict(frozen=True)

    phases: Annotated[list[Annotated[Phase, part(Phase)]], BeforeValidator(_named)]
    """The phases, in order."""
    batch_size: Count = 8
    """Rows per optimizer step, of all processes together."""
    max_length: Count = 1024
    """Tokens of a row, padding included."""
    micro_batch_size: Count | None = None
    """Most rows that a process computes at once; None: as many as it gets. Changes no number."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    """Seed of the order of data, of adapters and of dropout."""

    def disagreements(self) -> Iterator[Problem]:
        """Yield what does not fit between phases, or into the steps that one has."""
        yield from between_phases(self.phases)
        yield from self._lengths()

    def _lengths(self) -> Iterator[Problem]:
        """Yield what does not fit into the steps that a phase has."""
        for place, phase in enumerate(self.phases):
            path = f"phases[{place}]"
            try:
                steps = self.steps(place).steps
            except ConfigError as error:
                yield as_problem(error, f"{path}.tokens")
                continue
            try:
                phase.spans(steps)
            except ConfigError as error:
                yield as_problem(error, f"{path}.{error.where}")
            if (ends := phase.schedule_start + steps) > phase.schedule_total(steps):
                key = f"{path}.schedule_steps"
                what = f"{key}: the schedule has {phase.schedule_steps} steps, and the phase ends at {ends}"
                yield Problem(key, what, "make it longer, or lower schedule_start or tokens")
            yield from fade_too_long(phase, steps, self.batch_size, self.max_length, f"{path}.fade")

    @classmethod
    def from_yaml(cls, path: str | PathLike[str], **overrides: Any) -> Self:
        """Read a YAML file, whose settings those given here replace; a `ConfigError` names file, line and key."""
        return from_yaml(cls, path, overrides)

    def to_dict(self) -> dict[str, Any]:
        """Every setting as plain JSON types."""
        return self.model_dump(mode="json")

    def batch(self, num_processes: int = 1) -> GlobalBatch:
        """Return how the rows of a step are divided; `ConfigError` where so many processes cannot divide them."""
        return solve_batch(self.batch_size, self.micro_batch_size, num_processes)

    def steps(self, index: int) -> TokenSteps:
        """Return the optimizer steps of a phase, counted from 0, and its tokens."""
        return steps_of(self.phases[index].tokens, self.batch_size, self.max_length)

    @property
    def num_steps(self) -> int:
        """Optimizer steps of all phases."""
        return sum(self.steps(index).steps for index in range(len(self.phases)))

    def boundaries(self) -> tuple[Boundary, ...]:
        """Return where each phase begins and ends."""
        stops = list(accumulate(self.steps(index).steps for index in range(len(self.phases))))
        per_step = self.batch_size * self.max_length
        spans = zip(self.phases, [0, *stops[:-1]], stops, strict=True)
        return tuple(Boundary(str(phase.name), first, stop, first * per_step) for phase, first, stop in spans)

    def factor(self, index: int) -> Callable[[int], float]:
        """Return a phase's factor of the learning rate, as a function of the step counted from 0 in that phase."""
        phase, steps = self.phases[index], self.steps(index).steps
        of_schedule = factor_of(phase.lr_scheduler_type, phase.schedule_total(steps), phase.spans(steps))
        return lambda step: of_schedule(phase.schedule_start + step)

    def learning_rate(self, index: int, step: int) -> float:
        """Return the learning rate of a step counted from 0 in its phase."""
        return self.phases[index].learning_rate * self.factor(index)(step)

    def fade(self, index: int) -> Fade | None:
        """Return the fade that a phase begins with; None: its mixture holds from its first sample on."""
        if (fade := self.phases[index].fade) is None:
            return None
        samples = fade.samples(self.batch_size, self.max_length)
        return Fade(tuple(self.phases[index - 1].mixture), samples, fade.shape)

    def starts(self, index: int) -> dict[str, Start]:
        """Return where a phase begins with each data set, as `lema.data.mixture.Mixture` takes it."""
        return starts_of(self)[index]

    def counts(self, index: int) -> dict[str, int]:
        """Return how many rows of a phase each data set gives, by name."""
        rates = rates_of(self.phases[index].mixture)
        turns = Interleaving(rates, "turns", self.seed, index, fade=self.fade(index))
        return turns.counts(self.steps(index).steps * self.batch_size)

    def warnings(self, num_processes: int = 1) -> tuple[Problem, ...]:
        """Return what to look at before the run: `lema.train.phases.derived.plan_warnings`."""
        return plan_warnings(self, num_processes)

    def numbers(self, num_phases: int | None = None) -> dict[str, Any]:
        """Return what decides the numbers of a run: `lema.train.phases.derived.numbers_of`."""
        return numbers_of(self, num_phases)

    def fingerprint(self, num_phases: int | None = None) -> str:
        """Return the SHA-256 of `numbers`, in hexadecimal: two plans with the same one train the same, bit for bit.

        A checkpoint of phase k needs only the first k phases to be the same; phases may be added after them.
        """
        text = json.dumps(self.numbers(num_phases), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def differences(self, then: Mapping[str, Any], num_phases: int | None = None) -> list[str]:
        """Return what differs from the `numbers` of another plan: a line for each key, with what it was."""
        return differences_between(self.numbers(num_phases), then)

    def check_same(self, then: Mapping[str, Any], where: str, num_phases: int | None = None) -> None:
        """Refuse to go on with another plan's `numbers`, found at `where`; the `ConfigError` names each key that
        differs.
        """
        if changed := self.differences(then, num_phases):
            listed = "".join(f"\n  - {one}" for one in changed)
            how = "give the plan it was begun with, or begin again in another output_dir"
            raise ConfigError(f"this was begun with another plan:{listed}", where=where, how=how)
