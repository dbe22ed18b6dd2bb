"""The adapters of a phase: what `LemaConfig` has for adapters, by the same names without `lora_`."""

import re
from types import SimpleNamespace
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from lema.peftoptions import contradictions
from lema.phaseplan.nested import Several
from lema.phaseplan.settings import PhaseSettings
from lema.problems import Problem
from lema.settingtypes import Beta, Count, Indices, InitialValues, NameList, Pattern, Patterns, Targets, TokenIndices

__all__ = ["LoRAConfig"]

PREFIX = "lora_"
# Lists of names that match whatever their order, and names that are given twice match once.
_SETS = ("target_modules", "exclude_modules", "modules_to_save")

Positive = Annotated[float, Field(gt=0)]


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
