"""A phase plan as lists of stages: full parameters first, then adapters, with the names that two-phase trainers use."""

from collections.abc import Iterator
from os import PathLike
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from lema.config.nested import PhaseSettings, Several, Tokens, as_problem, part
from lema.config.problems import Problem, SettingsError
from lema.config.types import Count
from lema.config.yaml import from_yaml
from lema.data import Sampling
from lema.data.sampling import check_rates
from lema.errors import ConfigError
from lema.train.phases.phase import PARTS, LoRAConfig, Mixture, Phase
from lema.train.phases.plan import PhasePlan
from lema.train.phases.steps import SCHEDULES, steps_of, takes

__all__ = ["LoRATrainerConfig"]


_TIMES = ("pre_lora", "post_lora")
_SINGULAR = {f"{time}_dataset": f"{time}_datasets" for time in _TIMES}
_FRACTIONS = dict(zip(("warmup_pct", "decay_pct", "constant_pct"), PARTS, strict=True))
_DECAY = 0.01  # of the schedule; a phase of a plan has 0.1
Fraction = Annotated[float, Field(ge=0, lt=1)]


def _fineweb() -> list[list[Sampling]]:
    return [[Sampling("fineweb", 1.0, "PMD")]]  # type: ignore[arg-type]


class LoRATrainerConfig(PhaseSettings):
    """Stages of full-parameter training, then stages of adapters. Each list has one entry per stage.

    `pre_lora_dataset` and `post_lora_dataset` are taken for `pre_lora_datasets` and `post_lora_datasets`. With no stage
    before, training begins with adapters.

    Raises:
        SettingsError: a setting is wrong, or two lists of stages are not equally long; holds every problem.
    """

    batch_size: Count = 512
    """Rows per optimizer step, of all processes together."""
    per_device_batch_size: Annotated[int, Field(ge=-1)] = -1
    """Most rows that a process computes at once; -1: as many as it gets."""
    block_size: Count = 512
    """Tokens of a row, padding included."""
    learning_rate: Annotated[float, Field(gt=0)] = 3e-4
    """Peak learning rate, of all stages."""
    pre_lora_tokens: list[Tokens] = Field(default_factory=lambda: [1_000_000_000])
    """Tokens of each stage that trains every parameter."""
    pre_lora_datasets: list[Mixture] = Field(default_factory=_fineweb)
    """Data sets of each of those stages, with their rates."""
    post_lora_tokens: list[Tokens] = Field(default_factory=lambda: [100_000_000])
    """Tokens of each stage that trains adapters."""
    post_lora_datasets: list[Mixture] = Field(default_factory=_fineweb)
    """Data sets of each of those stages, with their rates."""
    lora: Annotated[LoRAConfig, part(LoRAConfig)] = LoRAConfig()
    """The adapters."""
    schedule: Literal["constant", "linear", "cosine", "wsd", "wsds", "cosine_rewarm"] = "constant"
    """How the learning rate moves; `lema.train.phases.steps` has the formulas. cosine_rewarm begins again in each
    stage."""
    warmup_pct: Fraction | None = None
    """Fraction of the schedule over which it rises; None: 0.01, and 0 for constant, linear and cosine."""
    decay_pct: Fraction | None = None
    """Fraction over which wsd and wsds fall; None: 0.01."""
    constant_pct: Fraction | None = None
    """Fraction at the end over which wsds stays low; None: 0.5."""
    schedule_spans: Literal["phase", "run"] = "phase"
    """`phase`: one schedule for the stages before adapters, and one for those after. `run`: both are as long as the
    whole run, as in the trainer these names are from: neither phase sees the end of its schedule."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    """Seed of the order of data, of adapters and of dropout."""

    def __init__(self, **settings: Any) -> None:
        if both := [(one, many) for one, many in _SINGULAR.items() if {one, many} <= settings.keys()]:
            raise SettingsError([Problem(one, f"{one} and {many} are one setting", "keep one") for one, many in both])
        settings = {_SINGULAR.get(key, key): value for key, value in settings.items()}
        for time in _TIMES:  # no stages in one list are none in the other, whose default is for one
            lists = [f"{time}_tokens", f"{time}_datasets"]
            if any(settings.get(key) == [] for key in lists):
                settings = {key: [] for key in lists} | settings
        super().__init__(**settings)

    @model_validator(mode="after")
    def _agree(self) -> Self:
        problems = [problem for time in _TIMES for problem in self._stages_wrong(time)]
        if not self.pre_lora_tokens and not self.post_lora_tokens and not problems:
            what = "pre_lora_tokens and post_lora_tokens are empty, so that nothing would train"
            problems.append(Problem("post_lora_tokens", what, "give the tokens of one stage at least"))
        parts = takes(self.schedule)
        problems += [
            Problem(
                key, f"{key} says nothing to schedule {self.schedule}", f"leave {key} out, or choose {_having(name)}"
            )
            for key, name in _FRACTIONS.items()
            if getattr(self, key) is not None and name not in parts
        ]
        if not self.per_device_batch_size:
            problems.append(Problem("per_device_batch_size", "per_device_batch_size is 0", "give rows, or -1 for all"))
        if problems:
            raise Several(problems)
        if problems := self._schedule_wrong():
            raise Several(problems)
        return self

    def _stages_wrong(self, time: str) -> Iterator[Problem]:
        tokens, mixtures = getattr(self, f"{time}_tokens"), getattr(self, f"{time}_datasets")
        if len(tokens) != len(mixtures):
            what = f"{time}_tokens has {_stages(tokens)}, and {time}_datasets has {_stages(mixtures)}"
            yield Problem(f"{time}_tokens", what, "give both lists one entry per stage")
        for stage, mixture in enumerate(mixtures):
            try:
                check_rates(mixture)
            except ConfigError as error:
                yield as_problem(error, f"{time}_datasets[{stage}]")
        for stage, count in enumerate(tokens):
            try:
                steps_of(count, self.batch_size, self.block_size)
            except ConfigError as error:
                yield as_problem(error, f"{time}_tokens[{stage}]")

    def _schedule_wrong(self) -> list[Problem]:
        """What is wrong with the plan still, said of the settings here: the parts of a schedule may not fit into it."""
        own = {f".{name}": key for key, name in _FRACTIONS.items()}
        try:
            self.plan()
        except SettingsError as error:
            keys = [next(key for end, key in own.items() if problem.key.endswith(end)) for problem in error.problems]
            return [
                Problem(key, f"{key}: {problem.what.partition(': ')[2]}", problem.how)
                for key, problem in zip(keys, error.problems, strict=True)
            ]
        return []

    @classmethod
    def from_yaml(cls, path: str | PathLike[str], **overrides: Any) -> Self:
        """Read a YAML file; settings given here replace those of the file.

        Raises:
            ConfigError: the file is not YAML or a setting is wrong; names file, line and key.
        """
        return from_yaml(cls, path, overrides, _SINGULAR)

    def to_dict(self) -> dict[str, Any]:
        """Every setting as plain JSON types."""
        return self.model_dump(mode="json")

    def plan(self) -> PhasePlan:
        """Return the phases: one per stage.

        The optimizer begins anew with the adapters, and is carried from stage to stage otherwise.
        """
        return PhasePlan(
            phases=[phase for time in _TIMES for phase in self._phases(time)],
            batch_size=self.batch_size,
            block_size=self.block_size,
            micro_batch_size=None if self.per_device_batch_size < 0 else self.per_device_batch_size,
            seed=self.seed,
        )

    def _steps(self, time: str) -> list[int]:
        return [steps_of(count, self.batch_size, self.block_size).steps for count in getattr(self, f"{time}_tokens")]

    def _phases(self, time: str) -> Iterator[Phase]:
        steps, lora = self._steps(time), time == "post_lora"
        stages = zip(getattr(self, f"{time}_tokens"), getattr(self, f"{time}_datasets"), strict=True)
        whole = sum(steps) if self.schedule_spans == "phase" else sum(sum(self._steps(one)) for one in _TIMES)
        for stage, (tokens, mixture) in enumerate(stages):
            apart = self.schedule == "cosine_rewarm" or whole == steps[stage]
            yield Phase(
                name=f"{time.replace('_', '-')}-{stage + 1}",
                trains="lora" if lora else "full",
                tokens=tokens,
                mixture=mixture,
                learning_rate=self.learning_rate,
                schedule=self.schedule,
                schedule_steps=None if apart else whole,
                schedule_start=0 if apart else sum(steps[:stage]),
                optimizer="carry" if stage else "reset",
                lora=self.lora if lora else None,
                warmup=self.warmup_pct,
                decay=_DECAY if self.decay_pct is None and "decay" in takes(self.schedule) else self.decay_pct,
                tail=self.constant_pct,
            )


def _having(part_name: str) -> str:
    return " or ".join(schedule for schedule in SCHEDULES if part_name in takes(schedule))


def _stages(entries: list[Any]) -> str:
    return f"{len(entries)} stage{'' if len(entries) == 1 else 's'}"
