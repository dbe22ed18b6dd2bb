"""One phase of training: what trains, on how many tokens of what, and how fast."""

from dataclasses import fields
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, InstanceOf, model_validator

from lema.data.sampling import Sampling, SamplingError, check_rates
from lema.errors import ConfigError
from lema.phaseplan.adapters import LoRAConfig
from lema.phaseplan.nested import Several, as_problem, part, unknown_part
from lema.phaseplan.samples import FadeConfig
from lema.phaseplan.selection import selection_problems
from lema.phaseplan.settings import PhaseSettings, Tokens, must_name
from lema.problems import Problem, SettingsError
from lema.schedules import Spans, spans_of
from lema.settingtypes import Count, NameList, NotNegative

__all__ = ["Mixture", "Phase"]

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
Positive = Annotated[float, Field(gt=0)]


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
    """How the learning rate moves; `lema.schedules` has the formulas. It counts the steps of this phase."""
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
