"""One phase of training: what trains, on how many tokens of which mixture, with which schedule and adapters.

The adapter settings of a phase have the names that `LemaConfig` has for them, without `lora_`. The agreement of two
phases is checked here as well: the adapters, moments or model that one leaves must be those that the next one needs.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, InstanceOf, model_validator

from lema.config.nested import PhaseSettings, Several, Tokens, as_problem, must_name, part, unknown_part
from lema.config.peft import contradictions
from lema.config.problems import Problem, SettingsError
from lema.config.types import (
    Beta,
    Count,
    Indices,
    InitialValues,
    NameList,
    NotNegative,
    Pattern,
    Patterns,
    Positive,
    Targets,
    TokenIndices,
)
from lema.data import Sampling
from lema.data.sampling import SamplingError, check_rates
from lema.errors import ConfigError
from lema.train.phases.derived import FadeConfig, fade_problems
from lema.train.phases.selection import may_overlap, selection_problems
from lema.train.phases.steps import Spans, spans_of

__all__ = ["LoRAConfig", "Mixture", "Phase", "between_phases", "what_is_carried"]


PREFIX = "lora_"

# Lists of names that match whatever their order, and names that are given twice match once.
_SETS = ("target_modules", "exclude_modules", "modules_to_save")


class LoRAConfig(PhaseSettings):
    """The adapters of a phase (LoRA, arXiv:2106.09685).

    Raises:
        SettingsError: a setting is unknown, out of range, or contradicts another.
    """

    rank: Count = 16
    """Rank of the adapter's two matrices."""
    alpha: Positive = 16.0
    """Adapters are scaled by alpha / rank."""
    target_modules: Targets | None = None
    """Names of the modules to adapt, or one regular expression; None: every linear of the decoder layers."""
    dropout: Beta = 0.0
    """Dropout on the adapter's input."""
    exclude_modules: Targets | None = None
    """Modules not to adapt, though `target_modules` matches them; likewise names or one regular expression."""
    rank_pattern: dict[Pattern, Count] = Field(default_factory=dict)
    """Ranks that differ: the end of a module's name, or a regular expression for it, to a rank."""
    alpha_pattern: dict[Pattern, Positive] = Field(default_factory=dict)
    """Alphas that differ, likewise."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (rsLoRA, arXiv:2312.03732)."""
    layers_to_transform: Indices | None = None
    """Decoder layers to adapt, counted from 0: one number or several; None: all."""
    layers_pattern: Patterns | None = None
    """Name of the list that those numbers count in, where the model has several; only with them."""
    init: InitialValues = True
    """Initial values: true (A uniform, B zero), "gaussian" (A normal), "orthogonal", or false (both drawn)."""
    lora_bias: bool = False
    """Give the adapter's B a bias (PEFT's `lora_bias`)."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Biases of the model that train as well: "none", "all", or "lora_only", those of adapted modules."""
    modules_to_save: NameList | None = None
    """Names of modules to train whole and save beside the adapter, such as the embeddings or the head."""
    use_dora: bool = False
    """Train a magnitude for each row of the adapted weights (DoRA, arXiv:2402.09353)."""
    target_parameters: NameList | None = None
    """Names of parameters to adapt that belong to no linear module, such as the stacked weights of experts."""
    trainable_token_indices: TokenIndices | None = None
    """Rows of the embeddings to train: token ids, or the name of an embedding to its rows."""
    ensure_weight_tying: bool = False
    """Keep what is tied in the model tied where both of it train."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        problems = []
        for key, what in contradictions(SimpleNamespace(**self.settings())):
            said, _, how = _unprefixed(what).partition("; ")
            problems.append(Problem(key.removeprefix(PREFIX), said, how))
        if problems:
            raise Several(problems)
        return self

    def settings(self) -> dict[str, Any]:
        """Return every setting by the name that `LemaConfig` has for it."""
        return {f"{PREFIX}{name}": getattr(self, name) for name in type(self).model_fields}

    def numbers(self) -> dict[str, Any]:
        """Return every setting as plain JSON types, the same for adapters that are the same."""
        plain = self.model_dump(mode="json")
        plain |= {name: sorted(set(plain[name])) for name in _SETS if isinstance(plain[name], list)}
        layers = plain["layers_to_transform"]
        if layers is not None:
            plain["layers_to_transform"] = sorted({layers} if isinstance(layers, int) else set(layers))
        return plain


def _unprefixed(text: str) -> str:
    """Text about `LemaConfig`'s settings, said of these."""
    names = sorted(LoRAConfig.model_fields, key=len, reverse=True)
    return re.sub(rf"\b{PREFIX}({'|'.join(names)})\b", r"\1", text)


PARTS = ("warmup", "decay", "tail")


def _items(value: Any) -> Any:
    items = list(value) if isinstance(value, list | tuple) else value if value is None else [value]
    if items is not None and (problems := selection_problems(items, key="")):
        raise Several(problems)
    return items


def _sampling(**values: Any) -> Sampling:
    known = [field.name for field in fields(Sampling)]
    problems = [unknown_part(key, known) for key in values if key not in known]
    problems += [Problem(key, f"{key} is not given", f"add `{key}: ...`") for key in known[:2] if key not in values]
    if problems:
        raise SettingsError(problems)
    try:
        return Sampling(**values)
    except SamplingError as error:
        raise SettingsError([Problem(error.where, error.what, error.how)]) from error


Mixture = list[Annotated[InstanceOf[Sampling], part(Sampling, _sampling)]]

# Steps, or a fraction of all steps.
Length = NotNegative | Annotated[float, Field(ge=0, lt=1)]
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class Phase(PhaseSettings):
    """What trains, on how many tokens of what, and how fast.

    Raises:
        SettingsError: a setting is unknown, missing or out of range, or contradicts another; holds every problem.
    """

    name: Label | None = None
    """Name of the phase in reports and directories; None: `phase-1`, `phase-2`, ..."""
    trains: Literal["full", "lora", "selection"]
    """`full`: every parameter. `lora`: adapters, with the model frozen. `selection`: what `trainable` and `layers` say,
    and need not be written where they are."""
    tokens: Tokens
    """Tokens to train on, padding included; what is less than an optimizer step at the end is left out."""
    mixture: Mixture
    """Data sets with their rates, which sum to 1."""
    learning_rate: Positive
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine", "wsd", "wsds", "cosine_rewarm"] = "linear"
    """How the learning rate moves; `lema.train.phases.steps` has the formulas. It counts the steps of this phase."""
    warmup: Length | None = None
    """Steps over which it rises: a number, or a fraction of the schedule; None: the schedule's own."""
    decay: Length | None = None
    """Steps over which wsd and wsds fall, likewise."""
    tail: Length | None = None
    """Steps at the end over which wsds stays low, likewise."""
    schedule_steps: Count | None = None
    """Steps the schedule is made for, where the phase is one part of it; None: it ends with the phase."""
    schedule_start: NotNegative = 0
    """Step of the schedule that the phase begins with, where it goes on with one."""
    optimizer: Literal["reset", "carry"] = "reset"
    """`reset`: begin with empty moments. `carry`: what trained in the phase before keeps its own."""
    lora: Annotated[LoRAConfig | None, part(LoRAConfig, optional=True)] = None
    """The adapters, where `trains` is `lora`; None: the default ones."""
    trainable: Annotated[NameList | None, BeforeValidator(must_name)] = None
    """Modules to train, by the ends of their names; None: all of those in `layers`."""
    layers: Annotated[list[int | str] | None, BeforeValidator(_items)] = None
    """Layers to train: numbers from 0, "first:N", "last:N", "embeddings", "head"; None: all that have a `trainable`."""
    merge: bool = False
    """Merge the adapters of the phases before into the weights, before this phase begins."""
    rounding: Literal["nearest", "stochastic"] | None = None
    """How merged weights are rounded to their type, with `merge`; None: nearest. What is small beside a weight in half
    precision is lost to the nearest, and kept on average by stochastic."""
    fade: Annotated[FadeConfig | None, part(FadeConfig, optional=True)] = None
    """How the mixture comes in for that of the phase before: `{steps: 100, shape: cosine}`; None: at once."""
    data: Literal["continue", "restart"] = "continue"
    """`continue`: go on with each data set where the phases before left it, so that no row comes again before all have
    come. `restart`: begin with each in an order of its own."""
    save: Literal["model", "delta"] | None = None
    """What the last phase leaves, where it trains weights: a whole model, or what it trained alone; None: the model."""

    @model_validator(mode="before")
    @classmethod
    def _derived(cls, values: Any) -> Any:
        if isinstance(values, dict) and "trains" not in values and {"trainable", "layers"} & values.keys():
            return {**values, "trains": "selection"}
        return values

    @model_validator(mode="after")
    def _agree(self) -> Self:
        problems: list[Problem] = []
        selected = [key for key in ("trainable", "layers") if getattr(self, key) is not None]
        if self.trains == "selection" and not selected:
            what = "trains: selection, and nothing is selected, so that nothing would train"
            problems.append(Problem("trains", what, "name modules with `trainable`, or layers with `layers`"))
        if self.trains != "selection":
            how = f"set trains: selection, or leave {{}} out (trains is {self.trains})"
            problems += [Problem(key, f"{key} selects what trains", how.format(key)) for key in selected]
        if self.trains != "lora" and self.lora is not None:
            how = f"set trains: lora, or leave lora out (trains is {self.trains})"
            problems.append(Problem("lora", "lora describes adapters, and none train", how))
        if self.rounding is not None and not self.merge:
            problems.append(
                Problem("rounding", "rounding is of what is merged, and nothing is", "set merge: true, or leave it out")
            )
        if self.trains == "lora" and self.save is not None:
            what = "save is of weights that train, and this phase ends with an adapter"
            problems.append(Problem("save", what, "leave save out"))
        try:
            check_rates(self.mixture)
        except ConfigError as error:
            problems.append(as_problem(error, "mixture"))
        if problems:
            raise Several(problems)
        return self

    @property
    def adapters(self) -> LoRAConfig | None:
        """The adapters that train; None: none do."""
        return (self.lora or LoRAConfig()) if self.trains == "lora" else None

    def schedule_total(self, steps: int) -> int:
        """Return the steps the schedule is made for, where the phase has `steps`."""
        return self.schedule_steps or self.schedule_start + steps

    def spans(self, steps: int) -> Spans:
        """Return how long the parts of the schedule are, where the phase has `steps`.

        Raises:
            ConfigError: they do not fit into the schedule, or the schedule does not have them.
        """
        lengths = {name: getattr(self, name) for name in PARTS}
        return spans_of(self.schedule, self.schedule_total(steps), **lengths)


def between_phases(phases: Sequence[Phase]) -> Iterator[Problem]:
    """Yield what does not fit between phases, in order."""
    before: Phase | None = None
    attached: LoRAConfig | None = None  # adapters that are not merged yet
    names: set[str | None] = set()
    for place, phase in enumerate(phases):
        path = f"phases[{place}]"
        if phase.name in names:
            yield Problem(
                f"{path}.name", f"{path}.name: {phase.name} is the name of an earlier phase", "choose another"
            )
        names.add(phase.name)
        yield from _merging(phase, attached, f"{path}.merge")
        if phase.merge:
            attached = None
        if attached is not None and phase.adapters not in (None, attached):
            what = f"{path}.lora: the phase goes on with adapters of rank {attached.rank}, and describes others"
            yield Problem(f"{path}.lora", what, "make it like theirs, or set merge: true for new adapters")
        if phase.optimizer == "carry" and (why := _nothing_carried(before, phase)):
            what = f"{path}.optimizer: carry, and {why}"
            yield Problem(f"{path}.optimizer", what, "set optimizer: reset")
        yield from fade_problems(before, phase, f"{path}.fade")
        if phase.save is not None and place + 1 < len(phases):
            what = f"{path}.save: only the last phase is saved so; those before leave what the next one begins with"
            yield Problem(f"{path}.save", what, "leave it out, or set it in the last phase")
        before, attached = phase, attached or phase.adapters


def _merging(phase: Phase, attached: LoRAConfig | None, key: str) -> Iterator[Problem]:
    if phase.merge and attached is None:
        yield Problem(key, f"{key}: there are no adapters to merge before this phase", "leave merge out")
    elif attached is not None and not phase.merge and phase.trains != "lora":
        what = f"{key}: the weights would train below adapters that were made for them as they were"
        yield Problem(key, what, "set merge: true")


def _nothing_carried(before: Phase | None, phase: Phase) -> str:
    """Why no moment can be carried into a phase; empty where some can, as far as the plan alone can tell."""
    if before is None:
        return "there is no phase before this one"
    if phase.trains == "lora" and phase.merge:
        return "the adapters of this phase are new"
    if "lora" in (before.trains, phase.trains) and before.trains != phase.trains:
        return f"the phase before trains {before.trains}, so that nothing of this one has moments"
    if phase.trains != "lora" and not _both_train_some(before, phase):
        return f"the phase before trains {_selected(before)}, so that nothing of this one has moments"
    return ""


def _both_train_some(before: Phase, phase: Phase) -> bool:
    """Whether two phases of weights may train one of them both."""
    if "full" in (before.trains, phase.trains):
        return True
    return may_overlap((before.layers, before.trainable), (phase.layers, phase.trainable))


def what_is_carried(before: Phase | None, phase: Phase) -> str:
    """Return in words which moments of the optimizer a phase begins with, for a report."""
    if phase.optimizer == "reset" or before is None:
        return "none: the optimizer begins anew"
    if phase.trains == "lora":
        return "those of the adapters"
    if (before.trains, before.layers, before.trainable) == (phase.trains, phase.layers, phase.trainable):
        return f"those of {_selected(phase)}"
    return f"those of what both phases train: of {_selected(phase)}, as far as {_selected(before)} trained before"


def _selected(phase: Phase) -> str:
    if phase.trains == "full":
        return "every weight"
    within = "the layers" if phase.layers is None else ", ".join(str(item) for item in phase.layers)
    return within if phase.trainable is None else f"{', '.join(phase.trainable)} of {within}"
