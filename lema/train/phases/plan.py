"""The phases of a run, one after the other, as data: where each begins, its optimizer steps and its
samples.

The samples of a phase follow from how its mixture fades in and from what earlier phases have read
of its data sets. Two plans are the same if everything that decides a number of the run is the same.
A warning names something in a plan that its writer may not have meant, before anything is trained.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, ConfigDict, Field

from lema.config.problems import Problem, SettingsError, problem_at
from lema.config.settings import Settings, part
from lema.config.types import AutoCount, Count
from lema.data.mixing.interleave import Fade, Interleaving
from lema.data.mixing.sampling import Start, rates_of
from lema.engine.schedules import SCHEDULES, factor_of
from lema.errors import ConfigError, listed
from lema.train.phases.phase import Phase, between_phases

__all__ = ["Boundary", "PhasePlan", "TokenSteps", "steps_of", "token_problems"]


@dataclass(frozen=True)
class TokenSteps:
    """The whole optimizer steps that tokens make, the tokens they take (padding included), and
    those left over.
    """

    steps: int
    tokens: int
    leftover: int


def steps_of(tokens: int, rows: int, block: int) -> TokenSteps:
    """Return the whole steps in tokens, each of so many rows of `block`: `tokens // (rows *
    block)`, never one more. Numbers of tokens are round, and a step's seldom divides them: 10**9
    are 3814.7 steps of 512 rows of 512. So what is less than a step is left out, and is told,
    rather than refused or trained on. It is not added to the next phase, since the steps of a phase
    follow from its own settings. `ConfigError` where they do not make one step."""
    step = rows * block
    steps, leftover = divmod(tokens, step)
    if steps < 1:
        what = (
            f"{tokens} tokens do not make one step, which is {rows} rows x {block} = {step} tokens"
        )
        how = f"give at least {step} tokens, or lower batch_size or the length of a row"
        raise ConfigError(what, where="tokens", how=how)
    return TokenSteps(steps, steps * step, leftover)


def token_problems(tokens: int, rows: int, block: int, key: str) -> Iterator[Problem]:
    """Yield, under their `key`, that tokens do not make one step, if it is so: see `steps_of`."""
    try:
        steps_of(tokens, rows, block)
    except ConfigError as error:
        yield problem_at(key, error.what, error.how)


def _named(phases: object) -> object:
    if not isinstance(phases, list | tuple):
        return phases
    if not phases:
        raise ValueError("must have at least one phase; nothing would train")
    return [_with_name(phase, f"phase-{index + 1}") for index, phase in enumerate(phases)]


def _with_name(phase: object, name: str) -> object:
    if isinstance(phase, Mapping):
        return {**phase, "name": phase["name"] if phase.get("name") is not None else name}
    return (
        phase.model_copy(update={"name": name})
        if isinstance(phase, Phase) and phase.name is None
        else phase
    )


@dataclass(frozen=True)
class Boundary:
    """Where a phase begins and ends, counted in optimizer steps and tokens of the whole run."""

    name: str
    first_step: int  # from 0
    stop_step: int  # the step after its last one
    first_token: int  # tokens of the run before it


class PhasePlan(Settings):
    """The phases of a run; a `SettingsError` has every problem under its path, such as
    `phases[1].learning_rate`.
    """

    model_config = ConfigDict(frozen=True)

    phases: Annotated[list[Annotated[Phase, part(Phase)]], BeforeValidator(_named)]
    """The phases, in order."""
    batch_size: Count = 8
    """Rows per optimizer step, of all processes together."""
    max_length: Count = 1024
    """Tokens of a row, padding included."""
    micro_batch_size: AutoCount = None
    """Most rows that a process computes at once; None: as many as fit. Without dropout it
    changes no result.
    """
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    """Seed of the order of data, of adapters and of dropout."""

    def disagreements(self) -> Iterator[Problem]:
        """Yield what does not fit between phases, or into the steps that one has."""
        yield from between_phases(self.phases)
        for index, phase in enumerate(self.phases):
            path = f"phases[{index}]"
            if phase.tokens is not None:
                key = f"{path}.tokens"
                problems = list(token_problems(phase.tokens, self.batch_size, self.max_length, key))
                if problems:
                    yield from problems
                    continue
            elif phase.steps is None:  # how many there are is known when the rows are read
                continue
            steps = self.steps(index).steps
            try:
                phase.spans(steps)
            except ConfigError as error:
                yield problem_at(f"{path}.{error.where}", error.what, error.how)
            if (stop_step := phase.schedule_start + steps) > phase.schedule_total(steps):
                what = (
                    f"the schedule has {phase.schedule_steps} steps, and the phase ends at "
                    f"{stop_step}"
                )
                yield problem_at(
                    f"{path}.schedule_steps",
                    what,
                    "make it longer, or lower schedule_start or tokens",
                )
            if phase.fade is not None:
                key = f"{path}.fade.{'tokens' if phase.fade.steps is None else 'steps'}"
                samples = phase.fade.samples(self.batch_size, self.max_length)
                most = steps * self.batch_size
                if samples > most:
                    what = f"the fade is {samples} rows, and the phase has {most} of them"
                    yield problem_at(key, what, "make it shorter, or give the phase more tokens")
                if not samples:
                    what = f"the fade is less than one row of {self.max_length} tokens"
                    yield problem_at(key, what, "make it longer")

    def steps(self, index: int) -> TokenSteps:
        """Return the optimizer steps of a phase, counted from 0, and its tokens; of rows in epochs,
        tokens as if each row were `max_length` long.
        """
        phase = self.phases[index]
        if phase.tokens is not None:
            return steps_of(phase.tokens, self.batch_size, self.max_length)
        assert phase.steps is not None, "the rows of its epochs are not counted yet"
        return TokenSteps(phase.steps, phase.steps * self.batch_size * self.max_length, 0)

    @property
    def has_steps(self) -> bool:
        """Whether the steps of every phase are known; those of epochs follow from the rows."""
        return all(phase.tokens is not None or phase.steps is not None for phase in self.phases)

    @property
    def has_rows(self) -> bool:
        """Whether a phase trains on the rows of `train_data`, and not on a mixture."""
        return any(phase.is_of_rows for phase in self.phases)

    def with_steps(self, steps: Callable[[int], int]) -> Self:
        """Return the plan with the steps of its epochs.

        Args:
            steps: returns the optimizer steps of the phase of an index, whose `epochs` are given.

        Raises:
            SettingsError: something does not fit into so many steps.
        """
        phases = [
            phase.model_copy(update={"steps": steps(index)}) if phase.epochs is not None else phase
            for index, phase in enumerate(self.phases)
        ]
        plan = self.model_copy(update={"phases": phases})
        if problems := list(plan.disagreements()):
            raise SettingsError(problems)
        return plan

    @property
    def num_steps(self) -> int:
        """Optimizer steps of all phases."""
        return sum(self.steps(index).steps for index in range(len(self.phases)))

    def boundaries(self) -> tuple[Boundary, ...]:
        """Return where each phase begins and ends."""
        stops = list(accumulate(self.steps(index).steps for index in range(len(self.phases))))
        per_step = self.batch_size * self.max_length
        spans = zip(self.phases, [0, *stops[:-1]], stops, strict=True)
        return tuple(
            Boundary(str(phase.name), first, stop, first * per_step) for phase, first, stop in spans
        )

    def factor(self, index: int) -> Callable[[int], float]:
        """Return a phase's factor of the learning rate, as a function of the step counted from 0
        in that phase.
        """
        phase = self.phases[index]
        steps = self.steps(index).steps
        name = phase.lr_scheduler_type
        total = phase.schedule_total(steps)
        if name in SCHEDULES:
            of_schedule = factor_of(name, total, phase.spans(steps))
        else:
            from lema.engine.optim import trainer_factor  # which loads transformers

            warmup = phase.spans(steps).warmup
            of_schedule = trainer_factor(name, total, warmup, phase.lr_scheduler_kwargs)
        return lambda step: of_schedule(phase.schedule_start + step)

    def learning_rate(self, index: int, step: int) -> float:
        """Return the learning rate of a step.

        Args:
            index: the phase, counted from 0.
            step: the step, counted from 0 in its phase.

        Returns:
            The learning rate.
        """
        return self.phases[index].learning_rate * self.factor(index)(step)

    def fade(self, index: int) -> Fade | None:
        """Return the fade that a phase begins with; None: its mixture holds from its first
        sample on.
        """
        if (fade := self.phases[index].fade) is None:
            return None
        return Fade(
            tuple(self.phases[index - 1].mixture),
            fade.samples(self.batch_size, self.max_length),
            fade.shape,
        )

    def starts(self) -> list[dict[str, Start]]:
        """Return where each phase begins with each of its data sets, as
        `lema.data.mixture.Mixture` takes it.
        """
        stage_starts: list[dict[str, Start]] = []
        reached: dict[str, Start] = {}
        for index, phase in enumerate(self.phases):
            counts = self.counts(index)  # no row, of a phase without a mixture
            is_restart = phase.data == "restart"
            begins = {
                name: Start(index, 0) if is_restart else reached.get(name, Start(index, 0))
                for name in counts
            }
            reached |= {
                name: Start(start.stage, start.taken + counts[name])
                for name, start in begins.items()
            }
            stage_starts.append(begins)
        return stage_starts

    def counts(self, index: int) -> dict[str, int]:
        """Return how many rows of a phase's mixture each data set gives, by name."""
        if self.phases[index].is_of_rows:
            return {}
        rates = rates_of(self.phases[index].mixture)
        interleaving = Interleaving(rates, "turns", self.seed, index, fade=self.fade(index))
        return interleaving.counts(self.steps(index).steps * self.batch_size)

    def warnings(self) -> tuple[Problem, ...]:
        """Return what to look at before it is run."""
        problems = (
            warning for index in range(len(self.phases)) for warning in _warnings(self, index)
        )
        return tuple(replace(warning, location=warning.key) for warning in problems)

    def numbers(self, num_phases: int | None = None) -> dict[str, Any]:
        """Return what decides the numbers of the first so many phases, as JSON types: not names,
        the micro-batch size, what the last phase saves, and tokens that are less than a step."""
        phases = [_numbers(self, index, starts) for index, starts in enumerate(self.starts())][
            :num_phases
        ]
        same = {"seed": self.seed, "batch_size": self.batch_size, "max_length": self.max_length}
        plain: dict[str, Any] = json.loads(
            json.dumps({"format": _FORMAT, **same, "phases": phases}, allow_nan=False)
        )
        return plain

    def fingerprint(self, num_phases: int | None = None) -> str:
        """Return the SHA-256 of `numbers`, in hexadecimal: two plans with the same one train the
        same, bit for bit.
        """
        text = json.dumps(
            self.numbers(num_phases), sort_keys=True, separators=(",", ":"), allow_nan=False
        )
        return hashlib.sha256(text.encode()).hexdigest()

    def differences(self, then: Mapping[str, Any], num_phases: int | None = None) -> list[str]:
        """Return the differences from the `numbers` of another plan.

        Args:
            then: what `numbers` of the other plan returned.
            num_phases: how many phases are compared, from the first on; None: all.

        Returns:
            A line for each key that differs, with its earlier value.
        """
        is_now = dict(_leaves(self.numbers(num_phases)))
        was = dict(_leaves(then))
        return [
            f"{key} is {is_now.get(key, _NOTHING)!r}, and was {was.get(key, _NOTHING)!r}"
            for key in {**is_now, **was}
            if is_now.get(key, _NOTHING) != was.get(key, _NOTHING)
        ]

    def check_same(
        self, then: Mapping[str, Any], where: str, num_phases: int | None = None
    ) -> None:
        """Refuse to go on with what another plan has begun.

        Args:
            then: what `numbers` of the other plan returned.
            where: the file or directory that has them, for the message.
            num_phases: how many phases are compared, from the first on; None: all.

        Raises:
            ConfigError: the plans differ. The message names every key that does.
        """
        if changed := self.differences(then, num_phases):
            how = "use the original plan, or begin again in another output_dir"
            raise ConfigError(
                f"this run began with another plan:{listed(changed)}", where=where, how=how
            )


_FORMAT = 3  # of the numbers; another one when what a setting means has changed
_NOTHING = "nothing"


def _numbers(plan: PhasePlan, index: int, starts: Mapping[str, Start]) -> dict[str, Any]:
    phase = plan.phases[index]
    steps = plan.steps(index).steps
    fade = plan.fade(index)
    kwargs = phase.lr_scheduler_kwargs
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
        **(
            {} if (kwargs := phase.lr_scheduler_kwargs) is None else {"lr_scheduler_kwargs": kwargs}
        ),
    }


def _leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}".removeprefix("."))
    elif isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{index}]")
    else:
        yield path, value


# Leftover tokens above this part of a phase are told; below it they are the rounding of any round
# number.
_NOTABLE = 0.01


def _warnings(plan: PhasePlan, index: int) -> Iterator[Problem]:
    phase = plan.phases[index]
    size = plan.steps(index)
    path = f"phases[{index}]"
    called = f"phase {index + 1} ({phase.name})"
    stop_step = phase.schedule_start + size.steps
    total = phase.schedule_total(size.steps)
    spans = phase.spans(size.steps)
    rates = [plan.learning_rate(index, step) for step in (0, size.steps - 1)]
    moves = f"the learning rate goes from {rates[0]:.2g} to {rates[1]:.2g}"
    goes_on = _goes_on(plan, index, stop_step, total)
    if not goes_on and stop_step <= spans.warmup:
        what = (
            f"{called} ends inside its warm-up: {size.steps} steps, and {spans.warmup} of "
            f"warm-up; {moves}"
        )
        what += f", and never reaches {phase.learning_rate:.2g}"
        key = f"{path}.{phase.length_key('warmup')}"
        length = "tokens" if phase.tokens is not None else "steps"
        how = f"shorten the warm-up, or give the phase more {length}"
        yield Problem(key, what, how)
    elif not goes_on and stop_step < total:
        what = f"{called} ends at step {stop_step} of a schedule of {total}; {moves}"
        yield Problem(
            f"{path}.schedule_steps", what, "leave schedule_steps out to end with the phase"
        )
    if phase.tokens is not None and size.leftover > _NOTABLE * phase.tokens:
        what = (
            f"{called} leaves out {size.leftover} of {phase.tokens} tokens, which are less "
            "than a step"
        )
        yield Problem(
            f"{path}.tokens",
            what,
            f"give {size.tokens} or {size.tokens + size.tokens // size.steps}",
        )


def _goes_on(plan: PhasePlan, index: int, stop_step: int, total: int) -> bool:
    """Whether the next phase takes up the schedule where this one leaves it."""
    if index + 1 == len(plan.phases):
        return False
    after = plan.phases[index + 1]
    same = (
        after.lr_scheduler_type == plan.phases[index].lr_scheduler_type
        and after.schedule_start == stop_step
    )
    return same and after.schedule_total(plan.steps(index + 1).steps) == total
