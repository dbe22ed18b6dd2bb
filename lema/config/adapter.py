"""The settings of adapters (LoRA, arXiv:2106.09685): those of a run, and those of each of its
phases.
"""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from lema.config import types
from lema.config.peft import contradictions
from lema.config.problems import Problem
from lema.config.settings import LARGEST, OfAdapter, Reported, Settings, Silent

__all__ = ["AdapterSettings"]

# Lists of names that match in any order; a name that occurs twice matches once.
_SETS = ("lora_target_modules", "lora_exclude_modules", "lora_modules_to_save")


class AdapterSettings(Settings):
    """Settings of adapters and other trained parameters, with PEFT's names after `lora_`."""

    lora_rank: OfAdapter[types.Count] = 16
    """Rank of the adapter's two matrices (LoRA, arXiv:2106.09685)."""
    lora_alpha: OfAdapter[types.Scale] = 32
    """The adapter's output is multiplied by lora_alpha / lora_rank. Not given: 2 x `lora_rank`."""
    lora_target_modules: OfAdapter[types.Targets | None] = None
    """Modules to adapt: names or one regular expression; "all-linear": PEFT's choice of that name;
    "peft": those that PEFT adapts by default in this type of model, such as q_proj and v_proj;
    None: every linear module of the layers, and experts."""
    lora_dropout: Reported[types.Beta] = 0.0
    """Dropout on the adapter's input."""
    lora_exclude_modules: OfAdapter[types.Targets | None] = None
    """Modules to leave out although `lora_target_modules` matches them: names or one regular
    expression.
    """
    lora_rank_pattern: OfAdapter[dict[types.Pattern, types.Count]] = Field(default_factory=dict)
    """Ranks of single modules: from the end of a module's name, or a regular expression, to a
    rank.
    """
    lora_alpha_pattern: OfAdapter[dict[types.Pattern, types.Scale]] = Field(default_factory=dict)
    """Alphas of single modules, in the same form."""
    lora_use_rslora: OfAdapter[bool] = False
    """Scale by lora_alpha / sqrt(lora_rank) instead (rsLoRA, arXiv:2312.03732)."""
    lora_layers_to_transform: OfAdapter[types.Indices | None] = None
    """Decoder layers to adapt, counted from 0: one number or several; None: all."""
    lora_layers_pattern: OfAdapter[types.Patterns | None] = None
    """Name of the list of layers that these numbers refer to, if the model has several lists."""
    lora_init: Silent[types.InitialValues] = True
    """Initial values: true (A uniform, B zero), "gaussian" (A normal), "orthogonal", or false (A
    and B random).
    """
    lora_lora_bias: OfAdapter[bool] = False
    """Give the adapter's B a bias (PEFT's `lora_bias`)."""
    lora_bias: OfAdapter[Literal["none", "all", "lora_only"]] = "none"
    """Biases of the model that also train: "none", "all", or "lora_only" (those of adapted
    modules).
    """
    lora_modules_to_save: OfAdapter[types.NameList | None] = None
    """Modules that train whole and are saved with the adapter, such as the embeddings or the
    head.
    """
    lora_use_dora: OfAdapter[bool] = False
    """Train a magnitude for each row of the adapted weights (DoRA, arXiv:2402.09353)."""
    lora_target_parameters: OfAdapter[types.Several | None] = None
    """Parameters to adapt that do not belong to a linear module, such as stacked weights of
    experts; []: none; None: those of experts, if lora_target_modules is None."""
    lora_trainable_token_indices: OfAdapter[types.TokenIndices | None] = None
    """Rows of the embeddings to train: token ids, or a map from the name of an embedding to its
    rows.
    """
    lora_ensure_weight_tying: OfAdapter[bool] = False
    """Keep tied parameters tied if both train."""

    def __init__(self, **settings: object) -> None:
        rank = settings.get("lora_rank")
        derived: dict[str, object] = {}
        if "lora_alpha" not in settings and isinstance(rank, int) and 0 < rank <= LARGEST // 2:
            derived["lora_alpha"] = 2 * rank
        super().__init__(**settings, **derived)
        # these were not given: with another rank they are others
        self.__pydantic_fields_set__.difference_update(derived)

    def disagreements(self) -> Iterator[Problem]:
        """Yield combinations that PEFT does not allow."""
        for key, what in contradictions(self):
            yield Problem(key, what)

    def adapter_settings(self) -> dict[str, Any]:
        """Return the settings of adapters alone, by name."""
        return {name: getattr(self, name) for name in AdapterSettings.model_fields}

    def adapter_numbers(self) -> dict[str, Any]:
        """Return these settings as plain JSON types, the same for adapters that are the same."""
        plain = self.model_dump(mode="json", include=set(AdapterSettings.model_fields))
        plain |= {name: sorted(set(plain[name])) for name in _SETS if isinstance(plain[name], list)}
        layers = plain["lora_layers_to_transform"]
        if layers is not None:
            plain["lora_layers_to_transform"] = sorted(
                {layers} if isinstance(layers, int) else set(layers)
            )
        plain["lora_alpha"] = float(plain["lora_alpha"])  # 16 and 16.0 are one alpha, and two texts
        plain["lora_alpha_pattern"] = {
            name: float(alpha) for name, alpha in plain["lora_alpha_pattern"].items()
        }
        return plain
