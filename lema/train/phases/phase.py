"""One phase of training: what trains, on how many tokens of what, and how fast; and what fits
between phases.

A phase has the settings of a run that may differ from phase to phase, by the same names, and a few
of its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    model_serializer,
    model_validator,
)

from lema.config import LemaConfig
from lema.config.adapter import AdapterSettings
from lema.config.problems import Problem, SettingsError, Several, problem_at, unknown_setting
from lema.config.settings import Settings, part
from lema.config.types import Beta, Count, NameList, NotNegative, Positive, Scheduler, Tokens
from lema.data import Sampling
from lema.data.mixing.sampling import SamplingError, check_rates, rates_of
from lema.engine.schedules import SCHEDULES, Spans, spans_as_trainer, spans_of
from lema.errors import ConfigError
from lema.train.phases.selection import may_overlap, selection_problems

__all__ = ["LENGTHS", "OVERRIDES", "Mixture", "Phase", "between_phases", "mixture_problems"]

# Each part of a schedule by the settings that say how long it is: in steps, or as a fraction of all
# steps.
LENGTHS: Mapping[str, tuple[str, str]] = {
    name: (f"{name}_steps", f"{name}_ratio") for name in ("warmup", "decay", "tail")
}

# Settings of which one says how long a phase is.
PHASE_LENGTHS = ("tokens", "epochs", "steps")

# Settings of a run that a phase may override besides those it has itself: how its steps are taken,
# and in what memory.
OVERRIDES = frozenset(
    [
        *(
            "weight_decay",
            "adam_beta1",
            "adam_beta2",
            "adam_epsilon",
            "max_grad_norm",
            "max_skipped_steps",
        ),
        *(
            "gradient_checkpointing",
            "activation_offloading",
            "boundary_activations",
            "loss_chunk_tokens",
        ),
        *("device_memory", "host_memory", "prefetch_depth"),
    ]
)


def _items(value: object) -> object:
    items = list(value) if isinstance(value, list | tuple) else value if value is None else [value]
    if items is not None and (problems := selection_problems(items, key="")):
        raise Several(problems)
    return items


def _sampling(**values: Any) -> Sampling:
    names = [field.name for field in fields(Sampling)]
    problems = [unknown_setting(key, names) for key in values if key not in names]
    problems += [
        Problem(key, f"{key} is not given", f"add `{key}: ...`")
        for key in names[:2]
        if key not in values
    ]
    if problems:
        raise SettingsError(problems)
    try:
        return Sampling(**values)
    except SamplingError as error:
        raise SettingsError([Problem(error.where, error.what, error.how)]) from error


def _mixture(value: object) -> object:
    """A mixture as a list; `{text: 0.8, chat: 0.2}` says the names and rates alone."""
    if isinstance(value, Mapping):
        return [{"name": name, "rate": rate} for name, rate in value.items()]
    return value


def _must_name(value: object) -> object:
    if value in ([], (), ""):
        raise ValueError("must not be empty; name modules, or leave it out")
    return value


Mixture = Annotated[
    list[Annotated[InstanceOf[Sampling], part(Sampling, _sampling)]], BeforeValidator(_mixture)
]
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


def _length(tokens: int | None, info: ValidationInfo) -> int | None:
    others = [name for name in PHASE_LENGTHS if name != "tokens"]
    if tokens is None and all(name in info.data and info.data[name] is None for name in others):
        raise ValueError(f"is not given, nor is the length as {' or '.join(others)}; add one")
    return tokens


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


class FadeConfig(Settings):
    """During its first steps or tokens, the mixture of a phase gradually replaces that of the
    phase before.
    """

    model_config = ConfigDict(frozen=True)

    steps: Count | None = None
    """Optimizer steps of the fade."""
    tokens: Tokens | None = None
    """Instead: tokens, padding included. A rest of less than a row is left out."""
    shape: Annotated[Literal["linear", "cosine", "sigmoid"], BeforeValidator(_lower)] = "linear"
    """How the weight of the earlier mixture falls from 1 to 0; `lema.data.mixing.interleave` has
    the formulas.
    """

    def disagreements(self) -> Iterator[Problem]:
        """Yield a problem if both lengths are given, or neither."""
        if (self.steps is None) == (self.tokens is None):
            has_both = self.steps is not None
            what = (
                "steps and tokens both give the length"
                if has_both
                else "neither steps nor tokens is given"
            )
            yield Problem("steps", what, "keep one" if has_both else "add one of them")

    def samples(self, batch_size: int, max_length: int) -> int:
        """Return the number of samples of the fade."""
        return (
            self.tokens // max_length
            if self.steps is None and self.tokens
            else (self.steps or 0) * batch_size
        )


class Phase(AdapterSettings):
    """What a phase trains, on which tokens, and how: settings of adapters, those in `OVERRIDES`,
    and these.
    """

    model_config = ConfigDict(frozen=True)

    name: Label | None = None
    """Name of the phase in reports and directories; None: `phase-1`, `phase-2`, ..."""
    trains: Literal["full", "lora", "selection"]
    """`full`: every parameter. `lora`: adapters, with the model frozen. `selection`: the weights
    that `trainable` and `layers` select; it is the default if one of these is given."""
    epochs: Positive | None = None
    """Passes over the rows of `train_data`, with the steps and batches of a run without
    phases: see `num_train_epochs`."""
    steps: Count | None = None
    """Instead: optimizer steps; without a `mixture` on the rows of `train_data`, as `max_steps` of
    a run without phases."""
    tokens: Annotated[Tokens | None, AfterValidator(_length)] = Field(None, validate_default=True)
    """Instead: tokens to train on, padding included. A rest of less than an optimizer step is left
    out."""
    mixture: Mixture = Field(default_factory=list)
    """Data sets with their rates, which sum to 1. Without it, a phase of `epochs` or `steps` trains
    on the rows of `train_data`, one data set after the other."""
    learning_rate: Positive = 1e-4
    """Peak learning rate."""
    lr_scheduler_type: Scheduler = "linear"
    """Schedule of the learning rate, by `transformers`' name, or wsd, wsds, cosine_rewarm
    (`lema.engine.schedules` has the formulas). It counts the steps of this phase.
    """
    lr_scheduler_kwargs: dict[str, Any] | None = None
    """Further arguments of a `transformers` schedule, such as {min_lr_rate: 0.1} for
    cosine_with_min_lr.
    """
    warmup_steps: NotNegative | None = None
    """Steps in which the learning rate rises; None: `warmup_ratio` decides."""
    warmup_ratio: Beta | None = None
    """The same as a fraction of the schedule; None: 0.01 for wsd, wsds and cosine_rewarm, and 0
    for the others.
    """
    warmup_rounding: Literal["up", "down"] = "up"
    """How a fraction of warm-up becomes steps, with schedules of `transformers`."""
    decay_steps: NotNegative | None = None
    """Steps in which wsd and wsds fall; None: `decay_ratio` decides."""
    decay_ratio: Beta | None = None
    """The same as a fraction of the schedule; None: 0.1."""
    tail_steps: NotNegative | None = None
    """Steps at the end in which wsds stays low; None: `tail_ratio` decides."""
    tail_ratio: Beta | None = None
    """The same as a fraction of the schedule; None: 0.5."""
    schedule_steps: Count | None = None
    """Length of the schedule if the phase is only a part of it; None: the schedule ends with the
    phase.
    """
    schedule_start: NotNegative = 0
    """The step of the schedule with which the phase begins, if it continues a schedule."""
    optimizer: Literal["reset", "carry"] = "reset"
    """`reset`: begin with empty moments. `carry`: parameters that trained in the phase before
    keep their moments.
    """
    trainable: Annotated[NameList | None, BeforeValidator(_must_name)] = None
    """Modules to train, by the ends of their names; None: all modules in `layers`."""
    layers: Annotated[list[int | str] | None, BeforeValidator(_items)] = None
    """Layers to train: numbers from 0, "first:N", "last:N", "embeddings", "head"; None: all that
    `trainable` has.
    """
    merge: bool = False
    """Merge the adapters of earlier phases into the weights before this phase begins."""
    rounding: Literal["nearest", "stochastic"] | None = None
    """How `merge` rounds the weights to their type; None: nearest. In half precision, `nearest`
    loses changes that are small compared with the weight. `stochastic` keeps them on average."""
    fade: Annotated[FadeConfig | None, part(FadeConfig, optional=True)] = None
    """How the mixture gradually replaces that of the phase before: `{steps: 100, shape:
    cosine}`; None: at once.
    """
    data: Literal["continue", "restart"] = "continue"
    """`continue`: continue each data set where earlier phases stopped, so that no row is repeated
    before all rows have occurred. `restart`: begin each data set in a new order."""
    save: Literal["model", "delta"] | None = None
    """What a last phase of weights writes: a whole model, or only the weights that trained;
    None: the model.
    """

    overrides: dict[str, Any] = Field(default_factory=dict)
    """Other settings of the run that this phase changes. They may also be given like any other
    setting.
    """

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the default of every setting by name, the phase's own first."""
        every = super().defaults()
        phase_defaults = {
            name: default
            for name, default in every.items()
            if name not in AdapterSettings.model_fields
        }
        run = LemaConfig.defaults()
        return {**phase_defaults, **every, **{name: run[name] for name in sorted(OVERRIDES)}}

    @model_validator(mode="before")
    @classmethod
    def _derived(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        if "trains" not in values and {"trainable", "layers"} & values.keys():
            values = {**values, "trains": "selection"}
        share = values.get("warmup_steps")
        # as in transformers, it is then a share of all steps
        if isinstance(share, float) and 0 <= share < 1 and values.get("warmup_ratio") is None:
            values = {**values, "warmup_steps": None, "warmup_ratio": share}
        if overridden := OVERRIDES & values.keys():
            remaining = {key: value for key, value in values.items() if key not in overridden}
            values = {
                **remaining,
                "overrides": {
                    **remaining.get("overrides", {}),
                    **{key: values[key] for key in overridden},
                },
            }
        return values

    @model_serializer(mode="wrap")
    def _without_idle_settings(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = written(self)
        if self.trains == "lora":
            return values
        return {
            name: value
            for name, value in values.items()
            if name not in AdapterSettings.model_fields
        }

    def disagreements(self) -> Iterator[Problem]:
        """Yield what is wrong between the settings of the phase."""
        selected = [key for key in ("trainable", "layers") if getattr(self, key) is not None]
        if self.trains == "selection" and not selected:
            what = "trains: selection needs a selection"
            yield Problem("trains", what, "select modules with `trainable` or layers with `layers`")
        if self.trains != "selection":
            for key in selected:
                how = f"set trains: selection, or leave {key} out (trains is {self.trains})"
                yield Problem(key, f"{key} selects what trains", how)
        if self.trains == "lora":
            yield from super().disagreements()
        else:
            defaults = AdapterSettings.defaults()
            for key in (
                name
                for name, value in self.adapter_settings().items()
                if value != defaults[name]
                and (name, value) != ("lora_alpha", 2 * self.lora_rank)  # nobody gave it
            ):
                how = f"set trains: lora, or leave {key} out (trains is {self.trains})"
                yield Problem(key, f"{key} describes adapters, but this phase trains none", how)
        if self.rounding is not None and not self.merge:
            how = "set merge: true, or leave it out"
            yield Problem("rounding", "rounding needs merge: true", how)
        if self.trains == "lora" and self.save is not None:
            what = "save is for phases of weights, and this phase trains adapters"
            yield Problem("save", what, "leave save out")
        for steps, ratio in LENGTHS.values():
            if getattr(self, steps) is not None and getattr(self, ratio) is not None:
                yield Problem(ratio, f"{ratio} and {steps} both set this length", "keep one")
        yield from self._about_rows()
        if wrong := self.overrides.keys() - OVERRIDES:
            yield Problem(
                "overrides",
                f"overrides has {min(wrong)!r}, which a phase cannot change",
                "leave it out",
            )
            return
        try:
            LemaConfig("model", **{"gradient_checkpointing": True, **self.overrides})
        except SettingsError as error:
            yield from error.problems

    def _about_rows(self) -> Iterator[Problem]:
        """Yield what is wrong with the length of the phase and the rows that it trains on."""
        lengths = [name for name in PHASE_LENGTHS if getattr(self, name) is not None]
        if len(lengths) > 1:
            what = f"{' and '.join(lengths)} each give the length of the phase"
            yield Problem(lengths[1], what, "keep one")
        if not self.is_of_rows:
            yield from mixture_problems(self.mixture, "mixture")
            if self.epochs is not None:
                what = "a mixture has rates, and its data sets end at different times"
                how = (
                    "use tokens or steps, or leave mixture out to train on every row of train_data"
                )
                yield Problem("epochs", what, how)
            if self.lr_scheduler_type not in SCHEDULES:
                how = f"use one of {', '.join(SCHEDULES)}, or a phase of epochs without a mixture"
                what = f"a phase with a mixture has no schedule {self.lr_scheduler_type}"
                yield Problem("lr_scheduler_type", what, how)
            if self.lr_scheduler_kwargs is not None:
                what = "lr_scheduler_kwargs has no effect in a phase with a mixture"
                yield Problem("lr_scheduler_kwargs", what, "leave it out")
            return
        if self.fade is not None:
            what = "this phase has no mixture to fade into"
            yield Problem("fade", what, "leave fade out, or give it tokens and a mixture")
        if self.data == "restart":
            what = "data: restart has no effect: a phase without a mixture begins its rows anew"
            yield Problem("data", what, "leave it out")

    @property
    def data_sets(self) -> list[str]:
        """The names of the data sets that it reads, sorted; rows of `train_data` have that name."""
        if self.is_of_rows:
            return ["train_data"]
        return sorted({sampling.full_name for sampling in self.mixture})

    @property
    def is_of_rows(self) -> bool:
        """Whether it trains on the rows of `train_data` as a run without phases does, in epochs or
        steps; else samples come from a mixture.
        """
        return self.tokens is None and not self.mixture

    @property
    def adapters(self) -> AdapterSettings | None:
        """The adapters that train; None: none do."""
        return AdapterSettings(**self.adapter_settings()) if self.trains == "lora" else None

    def schedule_total(self, steps: int) -> int:
        """Return the steps the schedule is made for, where the phase has `steps`."""
        return self.schedule_steps or self.schedule_start + steps

    def spans(self, steps: int) -> Spans:
        """Return the lengths of the schedule's parts.

        Args:
            steps: the steps of the phase.

        Returns:
            The lengths, in steps.

        Raises:
            ConfigError: the parts do not fit into the phase.
        """
        lengths = {part: getattr(self, self.length_key(part)) for part in LENGTHS}
        try:
            if self.is_of_rows:
                return spans_as_trainer(
                    self.lr_scheduler_type,
                    self.schedule_total(steps),
                    self.warmup_rounding,
                    **lengths,
                )
            return spans_of(self.lr_scheduler_type, self.schedule_total(steps), **lengths)
        except ConfigError as error:
            where = self.length_key(error.where) if error.where in LENGTHS else error.where
            raise ConfigError(error.what, where=where, how=error.how) from error

    def length_key(self, part_name: str) -> str:
        """Return the setting that says how long a part of the schedule is."""
        steps, ratio = LENGTHS[part_name]
        return ratio if getattr(self, steps) is None else steps


def mixture_problems(mixture: Sequence[Sampling], key: str) -> Iterator[Problem]:
    """Yield what is wrong with the rates of a mixture, under its `key`."""
    try:
        check_rates(mixture)
    except ConfigError as error:
        yield problem_at(key, error.what, error.how)


def between_phases(phases: Sequence[Phase]) -> Iterator[Problem]:
    """Yield what does not fit between phases, in order."""
    before: Phase | None = None
    attached: AdapterSettings | None = None  # adapters that are not merged yet
    names: set[str | None] = set()
    for index, phase in enumerate(phases):
        path = f"phases[{index}]"
        if phase.name in names:
            yield problem_at(
                f"{path}.name", f"{phase.name} is the name of an earlier phase", "choose another"
            )
        names.add(phase.name)
        if phase.merge and attached is None:
            yield problem_at(
                f"{path}.merge",
                "there are no adapters to merge before this phase",
                "leave merge out",
            )
        elif attached is not None and not phase.merge and phase.trains != "lora":
            what = "this phase would change the weights for which earlier adapters were trained"
            yield problem_at(f"{path}.merge", what, "set merge: true")
        if phase.merge:
            attached = None
        if attached is not None and phase.adapters not in (None, attached):
            what = (
                f"the phase continues adapters of rank {attached.lora_rank}, and describes others"
            )
            yield problem_at(
                f"{path}.lora_rank",
                what,
                "use the same settings, or set merge: true for new adapters",
            )
        if phase.optimizer == "carry" and (why := _nothing_carried(before, phase)):
            yield problem_at(f"{path}.optimizer", f"carry, and {why}", "set optimizer: reset")
        if phase.fade is not None:
            yield from _fading(before, phase, f"{path}.fade")
        if phase.save is not None and index + 1 < len(phases):
            what = (
                "only the last phase has this setting; earlier phases write what the next one needs"
            )
            yield problem_at(f"{path}.save", what, "leave it out, or set it in the last phase")
        before = phase
        attached = attached or phase.adapters


def _fading(before: Phase | None, phase: Phase, path: str) -> Iterator[Problem]:
    if before is None:
        yield problem_at(
            path, "the first phase has no earlier mixture to fade from", "leave fade out"
        )
        return
    if before.is_of_rows:
        what = "the phase before has no mixture to fade from"
        yield problem_at(path, what, "leave fade out")
        return
    if rates_of(before.mixture) == rates_of(phase.mixture):
        yield problem_at(
            path, "the mixture equals that of the phase before, so nothing fades", "leave fade out"
        )
    styles = {sampling.full_name: sampling.style for sampling in before.mixture}
    for sampling in phase.mixture:
        if (was := styles.get(sampling.full_name, sampling.style)) is not sampling.style:
            what = (
                f"{sampling.full_name} is {was} in the phase before, and {sampling.style} in "
                "this one"
            )
            yield problem_at(path, what, "give a data set one style")


def _nothing_carried(before: Phase | None, phase: Phase) -> str:
    """Why no moment can be carried into a phase; empty where some can, as far as the plan alone
    can tell.
    """
    if before is None:
        return "there is no phase before this one"
    if phase.trains == "lora" and phase.merge:
        return "the adapters of this phase are new"
    if "lora" in (before.trains, phase.trains) and before.trains != phase.trains:
        return f"the phase before trains {before.trains}, so no parameter of this phase has moments"
    selections = (before.layers, before.trainable), (phase.layers, phase.trainable)
    if not {"full", "lora"} & {before.trains, phase.trains} and not may_overlap(*selections):
        return (
            f"the phase before trains {_selected(before)}, so no parameter of this phase has "
            "moments"
        )
    return ""


def _selected(phase: Phase) -> str:
    if phase.trains == "full":
        return "every weight"
    within = "the layers" if phase.layers is None else ", ".join(str(item) for item in phase.layers)
    return within if phase.trainable is None else f"{', '.join(phase.trainable)} of {within}"
