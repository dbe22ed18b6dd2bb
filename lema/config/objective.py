"""Checks of the settings of objectives: which setting has an effect with which objective."""

from collections.abc import Iterator
from typing import Literal, Protocol

from lema.config.problems import Problem, meant

__all__ = [
    "OF_OBJECTIVES",
    "ObjectiveName",
    "ObjectiveSettings",
    "Reference",
    "disagreements_of_objective",
    "reference_of",
]

ObjectiveName = Literal["sft", "dpo", "ipo", "orpo", "simpo", "kto"]
Reference = Literal["adapter", "base"]

OF_PAIRS = ("dpo", "ipo", "orpo", "simpo")  # objectives whose examples are pairs of rows
WITH_REFERENCE = ("dpo", "ipo", "kto")  # those that compare with another model

# The values of `loss_type`; the first is the default.
LOSS_TYPES: dict[str, tuple[str, ...]] = {
    "sft": ("nll", "dft"),
    "dpo": (
        *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust"),
        *(
            "bco_pair",
            "sppo_hard",
            "apo_zero",
            "apo_down",
            "sigmoid_norm",
            "aot",
            "aot_unpaired",
            "discopop",
            "sft",
        ),
    ),
    "kto": ("kto", "apo_zero_unpaired"),
}
# the losses of pairs that `label_smoothing` has a meaning for
SMOOTHED = (
    "robust",
    "exo_pair",
    "aot",
    "aot_unpaired",
)

OF_TOKENS = ("eval_loss", "eval_perplexity")  # what an evaluation of sft measures

# The objectives that each further setting says something of.
OBJECTIVES_BY_SETTING = {
    "loss_type": tuple(LOSS_TYPES),
    # of sft, because a loop in Python may set an objective of its own
    "reference": (
        "sft",
        *WITH_REFERENCE,
    ),
    "beta": (*OF_PAIRS, "kto"),
    "label_smoothing": ("dpo", "simpo"),
    "simpo_gamma": ("simpo",),
    "cpo_alpha": ("simpo",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
}
OF_OBJECTIVES = ("objective", *OBJECTIVES_BY_SETTING)


class ObjectiveSettings(Protocol):
    """The settings that agree, or do not, with an objective; `LemaConfig` has them and says what
    they mean. Those of `OBJECTIVES_BY_SETTING` are looked up by name."""

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
    if config.objective not in WITH_REFERENCE:
        return None
    return "adapter" if begun or config.adapter_name_or_path is not None else "base"


def disagreements_of_objective(config: ObjectiveSettings) -> Iterator[Problem]:
    """Yield what does not go with the objective."""
    objective = config.objective
    kind = config.loss_type
    for name, objectives in OBJECTIVES_BY_SETTING.items():
        if getattr(config, name) is not None and objective not in objectives:
            how = f"leave it out, or set objective to {' or '.join(objectives)}"
            how += (
                "; of sft it is label_smoothing_factor"
                if (name, objective) == ("label_smoothing", "sft")
                else ""
            )
            yield Problem(name, f"{name} has no effect with objective: {objective}", how)
    types = LOSS_TYPES.get(objective)
    if types is not None and kind is not None and kind not in types:
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
