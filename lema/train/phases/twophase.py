"""Full parameters first, then adapters: a phase plan as lists of stages, with the names of the
trainer that has them.

The fields and their defaults are those of the two-phase trainer; fields that it does not have are
below them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from lema.config import LemaConfig
from lema.config.adapter import AdapterSettings
from lema.config.problems import Problem, SettingsError, problem_at
from lema.config.settings import Settings, part
from lema.config.types import (
    Beta,
    Count,
    Name,
    NotNegative,
    PhaseScheduler,
    Positive,
    Scale,
    Targets,
    Tokens,
)
from lema.data import Sampling
from lema.engine.schedules import SCHEDULES, takes
from lema.errors import ConfigError
from lema.train.phases.phase import LENGTHS, Mixture, Phase, mixture_problems
from lema.train.phases.plan import PhasePlan, steps_of, token_problems

__all__ = ["LoRAConfig", "LoRATrainerConfig"]

_TIMES = ("pre_lora", "post_lora")
_SINGULAR = {f"{time}_dataset": f"{time}_datasets" for time in _TIMES}
_FRACTIONS = dict(zip(("warmup_pct", "decay_pct", "constant_pct"), LENGTHS, strict=True))

# What this trainer calls the settings of a run.
_TIMED = ("report", "logging"), ("checkpoint", "save"), ("validation", "eval")
_INTERVALS = {f"{ours}_interval": f"{theirs}_steps" for ours, theirs in _TIMED}


class LoRAConfig(AdapterSettings):
    """The adapters of a two-phase trainer: `rank`, `alpha`, `target_modules`, and the rest as in
    `LemaConfig`.
    """

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    lora_rank: Count = Field(default=16, alias="rank")
    lora_alpha: Scale = Field(default=16.0, alias="alpha")
    lora_target_modules: Targets | None = Field(default=None, alias="target_modules")

    def disagreements(self) -> Iterator[Problem]:
        """Yield what PEFT does not allow together, by the names used here."""
        for problem in super().disagreements():
            yield replace(problem, key=type(self).model_fields[problem.key].alias or problem.key)

    @property
    def rank(self) -> int:
        """Rank of the adapter's two matrices."""
        return self.lora_rank

    @property
    def alpha(self) -> float:
        """Adapters are scaled by alpha / rank."""
        return self.lora_alpha

    @property
    def target_modules(self) -> str | list[str] | None:
        """Names of the modules to adapt, or one regular expression; None: every linear of the
        decoder layers.
        """
        return self.lora_target_modules


def _fineweb() -> list[Sampling]:
    return [Sampling("fineweb", 1.0, "PMD")]  # type: ignore[arg-type] # pydantic takes the name


class LoRATrainerConfig(Settings):
    """Stages of full-parameter training, if any, then stages of adapters. Each list of stages has
    one entry per stage.

    `pre_lora_dataset` and `post_lora_dataset` are taken for `pre_lora_datasets` and
    `post_lora_datasets`. What is given here holds for the whole run, and the settings of
    `LemaConfig` for all that has no name here.
    """

    model_config = ConfigDict(frozen=True)
    _spellings: ClassVar[Mapping[str, str]] = _SINGULAR

    batch_size: Count = 512
    """Rows per optimizer step, of all processes together."""
    per_device_batch_size: Annotated[int, Field(ge=-1)] = -1
    """Most rows that a process computes at once; -1: as many as fit."""
    total_tokens: Tokens = 1_000_000_000
    """Tokens that train every parameter in one stage, if `pre_lora_tokens` does not divide them
    into stages.
    """
    lr: Positive = 3e-4
    """Peak learning rate of all stages."""
    warmup_pct: Beta = 0.01
    """Fraction of the schedule in which the learning rate rises, if the schedule has a warm-up."""
    decay_pct: Beta = 0.1
    """Fraction of the schedule in which wsd and wsds fall."""
    validate_: bool = Field(default=True, alias="validate")
    """Validate every `validation_interval` steps and after each stage, if there are rows for it."""
    evaluate: bool = True
    """Measure `evaluations` when the last stage has ended."""
    datasets: Mixture = Field(default_factory=_fineweb)
    """Data sets of the stage of `total_tokens`, if `pre_lora_datasets` does not give those of
    its stages.
    """
    evaluations: list[Name] = Field(default_factory=list)
    """Names of held-out data sets whose loss and perplexity are measured after the last stage."""
    block_size: Count = 512
    """Tokens of a row, padding included."""
    report_interval: Count = 32
    """Optimizer steps between lines of metrics (`logging_steps` of a run)."""
    checkpoint_interval: NotNegative = 1024
    """Optimizer steps between checkpoints (`save_steps` of a run); 0: only at the end of each
    stage.
    """
    validation_interval: Count = 512
    """Optimizer steps between validations (`eval_steps` of a run)."""
    validation_steps: Count = 2048
    """Rows of each validation, always the same (`eval_rows` of a file of phases)."""
    wandb: bool = False
    """Report to Weights & Biases, in addition to `report_to` of the run."""
    pre_lora_tokens: list[Tokens] = Field(default_factory=lambda: [1_000_000_000])
    """Tokens of each stage that trains every parameter."""
    pre_lora_datasets: list[Mixture] = Field(default_factory=lambda: [_fineweb()])
    """Data sets of each of those stages, with their rates."""
    post_lora_tokens: list[Tokens] = Field(default_factory=lambda: [100_000_000])
    """Tokens of each stage that trains adapters."""
    post_lora_datasets: list[Mixture] = Field(default_factory=lambda: [_fineweb()])
    """Data sets of each of those stages, with their rates."""
    lora: Annotated[LoRAConfig, part(LoRAConfig)] = LoRAConfig()
    """The adapters."""

    schedule: PhaseScheduler = "constant"
    """Schedule of the learning rate; `lema.engine.schedules` has the formulas. cosine_rewarm starts
    again in each stage. If only `warmup_pct` or `decay_pct` is given, the schedule is wsd, which
    has both."""
    constant_pct: Beta | None = None
    """Fraction at the end in which wsds stays low; None: 0.5."""
    schedule_spans: Literal["phase", "run"] = "phase"
    """`phase`: one schedule for the stages before adapters, one for the others. `run`: both are as
    long as the whole run, as in the trainer with these names, so neither reaches the end of its
    schedule."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    """Seed of the order of data, of adapters and of dropout."""

    @property
    def validate(self) -> bool:  # type: ignore[override] # pydantic's own of that name is deprecated
        """Whether to validate: `validate_` under the name of the setting."""
        return self.validate_

    def __init__(self, **settings: object) -> None:
        if conflicts := [
            (singular, many)
            for singular, many in _SINGULAR.items()
            if singular in settings and many in settings
        ]:
            raise SettingsError(
                [
                    Problem(singular, f"{singular} and {many} are one setting", "keep one")
                    for singular, many in conflicts
                ]
            )
        settings = {_SINGULAR.get(key, key): value for key, value in settings.items()}
        for single, stages in (
            ("total_tokens", "pre_lora_tokens"),
            ("datasets", "pre_lora_datasets"),
        ):
            if single in settings and stages not in settings:
                settings[stages] = [settings[single]]
        # an empty list of stages means an empty other list, whose default is for one
        for time in _TIMES:
            lists = [f"{time}_tokens", f"{time}_datasets"]
            if any(settings.get(key) == [] for key in lists):
                settings = {key: [] for key in lists} | settings
        if "schedule" not in settings and {"warmup_pct", "decay_pct"} & settings.keys():
            settings["schedule"] = "wsd"
        super().__init__(**settings)

    def disagreements(self) -> Iterator[Problem]:
        """Yield what is wrong with the stages and with their schedule."""
        problems = [
            *self._whole_wrong(),
            *(problem for time in _TIMES for problem in self._stages_wrong(time)),
        ]
        if not self.pre_lora_tokens and not self.post_lora_tokens and not problems:
            what = "pre_lora_tokens and post_lora_tokens are empty, so nothing would train"
            problems.append(
                Problem("post_lora_tokens", what, "set the tokens of at least one stage")
            )
        parts = takes(self.schedule)
        fields = type(self).model_fields
        for key, name in _FRACTIONS.items():
            if getattr(self, key) != fields[key].default and name not in parts:
                with_part = (schedule for schedule in SCHEDULES if name in takes(schedule))
                how = f"leave {key} out, or choose {' or '.join(with_part)}"
                problems.append(
                    Problem(key, f"{key} has no effect on schedule {self.schedule}", how)
                )
        if not self.per_device_batch_size:
            problems.append(
                Problem(
                    "per_device_batch_size", "per_device_batch_size is 0", "set rows, or -1 for all"
                )
            )
        if self.evaluations and not self.evaluate:
            problems.append(
                Problem("evaluations", "there are evaluations, but evaluate is false", "keep one")
            )
        yield from problems or self._schedule_wrong()

    def _whole_wrong(self) -> Iterator[Problem]:
        """Yield a problem if the single stage of all parameters contradicts their stages."""
        fields = type(self).model_fields
        sums = (sum(self.pre_lora_tokens), sum(self.pre_lora_tokens) + sum(self.post_lora_tokens))
        if self.total_tokens not in (fields["total_tokens"].default, *sums):
            what = (
                f"total_tokens is {self.total_tokens}, and the stages of pre_lora_tokens have "
                f"{sums[0]}"
            )
            yield Problem("total_tokens", what, "keep one")
        if self.datasets != _fineweb() and self.pre_lora_datasets != [self.datasets]:
            yield Problem(
                "datasets", "datasets and pre_lora_datasets both set the first data", "keep one"
            )

    def _stages_wrong(self, time: str) -> Iterator[Problem]:
        tokens = getattr(self, f"{time}_tokens")
        mixtures = getattr(self, f"{time}_datasets")
        if len(tokens) != len(mixtures):
            what = (
                f"{time}_tokens has {_stages(tokens)}, and {time}_datasets has {_stages(mixtures)}"
            )
            yield Problem(f"{time}_tokens", what, "give both lists one entry per stage")
        for stage, mixture in enumerate(mixtures):
            yield from mixture_problems(mixture, f"{time}_datasets[{stage}]")
        for stage, count in enumerate(tokens):
            key = f"{time}_tokens[{stage}]"
            yield from token_problems(count, self.batch_size, self.block_size, key)

    def _schedule_wrong(self) -> Iterator[Problem]:
        """What is wrong with the plan still, said of the settings here: the parts of a schedule
        may not fit into it.
        """
        fraction_keys = {f".{name}_ratio": key for key, name in _FRACTIONS.items()}
        try:
            self.plan()
        except SettingsError as error:
            for problem in error.problems:
                key = next(key for end, key in fraction_keys.items() if problem.key.endswith(end))
                yield problem_at(key, problem.what.partition(": ")[2], problem.how)

    def plan(self) -> PhasePlan:
        """Return the phases, one per stage; the optimizer starts again with the adapters, and is
        carried otherwise.
        """
        return PhasePlan(
            phases=[phase for time in _TIMES for phase in self._phases(time)],
            batch_size=self.batch_size,
            max_length=self.block_size,
            micro_batch_size=None if self.per_device_batch_size < 0 else self.per_device_batch_size,
            seed=self.seed,
        )

    def settings_of_run(self, model: LemaConfig) -> LemaConfig:
        """Return the settings of a run.

        Args:
            model: the settings of the model.

        Returns:
            These settings, with the intervals and reports of this config where it gives them.

        Raises:
            ConfigError: both give one, and they differ.
        """
        changed: dict[str, Any] = {}
        for name, setting in _INTERVALS.items():
            value = getattr(self, name)
            theirs = getattr(model, setting)
            if setting not in model.model_fields_set:
                changed[setting] = value
            elif name in self.model_fields_set and value != theirs:
                what = f"{name} is {value}, and {setting}, which is the same, is {theirs}"
                raise ConfigError(what, where=name, how="keep one")
        if self.wandb:
            reports = [model.report_to] if isinstance(model.report_to, str) else model.report_to
            changed["report_to"] = [
                *(integration for integration in reports if integration != "wandb"),
                "wandb",
            ]
        return LemaConfig(**{**model.model_dump(exclude_unset=True), **changed})

    def _phases(self, time: str) -> Iterator[Phase]:
        every = {
            period: [
                steps_of(count, self.batch_size, self.block_size).steps
                for count in getattr(self, f"{period}_tokens")
            ]
            for period in _TIMES
        }
        steps = every[time]
        lora = time == "post_lora"
        stages = zip(
            getattr(self, f"{time}_tokens"), getattr(self, f"{time}_datasets"), strict=True
        )
        total_steps = (
            sum(steps) if self.schedule_spans == "phase" else sum(map(sum, every.values()))
        )
        parts = {
            f"{name}_ratio": getattr(self, key)
            for key, name in _FRACTIONS.items()
            if name in takes(self.schedule)
        }
        for stage, (tokens, mixture) in enumerate(stages):
            separate = self.schedule == "cosine_rewarm" or total_steps == steps[stage]
            yield Phase(
                name=f"{time.replace('_', '-')}-{stage + 1}",
                trains="lora" if lora else "full",
                tokens=tokens,
                mixture=mixture,
                learning_rate=self.lr,
                lr_scheduler_type=self.schedule,
                schedule_steps=None if separate else total_steps,
                schedule_start=0 if separate else sum(steps[:stage]),
                optimizer="carry" if stage else "reset",
                **parts,
                **(self.lora.adapter_settings() if lora else {}),
            )


def _stages(entries: list[Any]) -> str:
    return f"{len(entries)} stage{'' if len(entries) == 1 else 's'}"
