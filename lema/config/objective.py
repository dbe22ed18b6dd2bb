"""The objectives of a run in one table: which data, reference and settings each of them has."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from lema.config.problems import Problem, meant

__all__ = [
    "OBJECTIVES",
    "OF_OBJECTIVES",
    "ObjectiveKind",
    "ObjectiveName",
    "ObjectiveSettings",
    "Reference",
    "disagreements_of_objective",
    "has_reference",
    "reference_of",
]

ObjectiveName = Literal["sft", "dpo", "ipo", "orpo", "simpo", "kto"]
Reference = Literal["adapter", "base"]


@dataclass(frozen=True)
class ObjectiveKind:
    """What the settings know of an objective.

    Attributes:
        examples: what its data has: rows of tokens, pairs of a chosen and a rejected row, or rows
            with a label.
        has_reference: whether it compares with another model.
        loss_types: the values of `loss_type`; the first is the default.
        settings: the further settings that it has a meaning for.
    """

    examples: Literal["rows", "pairs", "labelled rows"]
    has_reference: bool = False
    loss_types: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()

    @property
    def all_settings(self) -> tuple[str, ...]:
        """The settings that it has a meaning for, besides `objective`."""
        loss_type = ("loss_type",) if self.loss_types else ()
        reference = ("reference",) if self.has_reference else ()
        return (*loss_type, *reference, *self.settings)


LOSSES_OF_PAIRS = (
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard"),
    *("apo_zero", "apo_down", "sigmoid_norm", "aot", "aot_unpaired", "discopop", "sft"),
)

# `lema.engine.head.objectives` makes the losses of all but sft.
OBJECTIVES: Mapping[str, ObjectiveKind] = {
    # Of sft a reference, because a loop in Python may set an objective of its own.
    "sft": ObjectiveKind("rows", loss_types=("nll", "dft"), settings=("reference",)),
    "dpo": ObjectiveKind(
        "pairs",
        has_reference=True,
        loss_types=LOSSES_OF_PAIRS,
        settings=("beta", "label_smoothing"),
    ),
    "ipo": ObjectiveKind("pairs", has_reference=True, settings=("beta",)),
    "orpo": ObjectiveKind("pairs", settings=("beta",)),
    "simpo": ObjectiveKind(
        "pairs", settings=("beta", "label_smoothing", "simpo_gamma", "cpo_alpha")
    ),
    "kto": ObjectiveKind(
        "labelled rows",
        has_reference=True,
        loss_types=("kto", "apo_zero_unpaired"),
        settings=("beta", "desirable_weight", "undesirable_weight"),
    ),
}
SETTINGS = tuple(dict.fromkeys(name for kind in OBJECTIVES.values() for name in kind.all_settings))
OF_OBJECTIVES = ("objective", *SETTINGS)

# The losses of pairs that `label_smoothing` has a meaning for.
SMOOTHED = ("robust", "exo_pair", "aot", "aot_unpaired")
OF_TOKENS = ("eval_loss", "eval_perplexity")  # what an evaluation of sft measures


PREFERENCE_LEARNING_RATE = 5e-6
"""The learning rate of objectives that compare rows, where none is given: that of LLaMA-Factory's
and Unsloth's examples.
"""


def is_preference(objective: object) -> bool:
    """Whether an objective compares rows, by its name in settings or in a file."""
    return isinstance(objective, str) and objective in OBJECTIVES and objective != "sft"


def has_reference(objective: Any) -> bool:
    """Whether an objective compares with another model, by its name in settings or in a file."""
    if not isinstance(objective, str) or objective not in OBJECTIVES:
        return False
    return OBJECTIVES[objective].has_reference


class ObjectiveSettings(Protocol):
    """The settings that agree, or do not, with an objective; `LemaConfig` has them and says what
    they mean. Those of `OBJECTIVES` are looked up by name."""

    objective: ObjectiveName
    reference: Reference | None
    loss_type: str | None
    label_smoothing: float | None
    label_smoothing_factor: float
    lora_dropout: float
    batch_size: int
    cache_frozen_prefix: bool
    adapter_name_or_path: str | None

    @property
    def lora_bias(self) -> str:
        """Which biases train."""

    @property
    def best_by(self) -> tuple[str, bool]:
        """What evaluations are compared by, and whether more of it is better."""


def reference_of(config: ObjectiveSettings, *, begun: bool = False) -> Reference | None:
    """Return what the settings compare with: the adapter that training begins with, as it is then,
    or the base model; None: with nothing. `begun`: it begins with a saved adapter, even if the
    settings name none."""
    if config.reference is not None:
        return config.reference
    if not has_reference(config.objective):
        return None
    return "adapter" if begun or config.adapter_name_or_path is not None else "base"


def disagreements_of_objective(config: ObjectiveSettings) -> Iterator[Problem]:
    """Yield what does not go with the objective."""
    objective = config.objective
    kind = config.loss_type
    for name in SETTINGS:
        if getattr(config, name) is not None and name not in OBJECTIVES[objective].all_settings:
            objectives = [
                other for other, about in OBJECTIVES.items() if name in about.all_settings
            ]
            how = f"leave it out, or set objective to {' or '.join(objectives)}"
            how += (
                "; of sft it is label_smoothing_factor"
                if (name, objective) == ("label_smoothing", "sft")
                else ""
            )
            yield Problem(name, f"{name} has no effect with objective: {objective}", how)
    types = OBJECTIVES[objective].loss_types
    if types and kind is not None and kind not in types:
        what = (
            f"loss_type must be one of {', '.join(types)} with objective: {objective}, not {kind!r}"
        )
        yield Problem("loss_type", what, meant(kind, types))
    if objective == "dpo":
        if config.label_smoothing is not None and kind not in SMOOTHED:
            what = f"label_smoothing has no effect with loss_type: {kind or 'sigmoid'}"
            yield Problem(
                "label_smoothing",
                what,
                f"set loss_type to {' or '.join(SMOOTHED)}, or leave it out",
            )
        if kind == "exo_pair" and not config.label_smoothing:
            what = "exo_pair takes the logarithm of label_smoothing, which is 0"
            yield Problem("label_smoothing", what, "set it, to 0.001 for example")
    metric = config.best_by[0]
    if objective == "sft" and metric not in OF_TOKENS:
        how = f"there are {' and '.join(OF_TOKENS)}"
        yield Problem(
            "metric_for_best_model",
            f"metric_for_best_model: {metric} is not measured of tokens",
            how,
        )
    if objective == "sft":
        if kind == "dft" and config.label_smoothing_factor:
            yield Problem(
                "label_smoothing_factor",
                "loss_type: dft weights tokens by probability; leave one out",
            )
        return  # the others are losses of examples
    if config.label_smoothing_factor:
        what = f"label_smoothing_factor has no effect with objective: {objective}"
        yield Problem(
            "label_smoothing_factor", what, "leave it out; dpo and simpo have label_smoothing"
        )
    if config.lora_dropout:
        what = (
            f"objective: {objective} trains without dropout, as the reference and the "
            "published losses do"
        )
        yield Problem("lora_dropout", what, "leave it out")
    if reference_of(config) == "base" and config.lora_bias != "none":
        what = (
            f"objective: {objective} compares with the base model, but trained biases cannot "
            "be undone"
        )
        yield Problem("lora_bias", what, "set it to none, or compare with reference: adapter")
    if objective == "kto" and kind != "apo_zero_unpaired":
        if config.batch_size == 1:
            what = "kto estimates its KL term from other rows of the batch, but there are none"
            yield Problem(
                "batch_size", what, "set it to 2 or more, or loss_type: apo_zero_unpaired"
            )
        if config.cache_frozen_prefix:
            what = "the rows for kto's KL term are not cached"
            yield Problem("cache_frozen_prefix", what, "set it to false")
