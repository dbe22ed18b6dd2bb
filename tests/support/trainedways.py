"""Adapters that train more than LoRA's matrices, on the whole model with PEFT alone and
streamed.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from aligned import aligned
from parity import ALPHA, RANK, SEED, trained
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import Checkpoint
from torch import nn
from transformers import AutoModelForCausalLM

from lema import LemaConfig, LemaModel
from lema_cpu import CpuBackend

ENDS = {"llama": ("embed_tokens", "lm_head"), "gpt2": ("wte", "lm_head")}


def lora(checkpoint: Checkpoint, **options: Any) -> LoraConfig:
    """PEFT's config of an adapter of every linear module, and what `options` add."""
    settings = {
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": sorted(checkpoint.architecture.targets),
        "fan_in_fan_out": checkpoint.architecture.transposed,
        "task_type": "CAUSAL_LM",
    }
    return LoraConfig(**settings | options)


@contextmanager
def unwarned() -> Iterator[None]:
    """PEFT warns of unusual wishes; what it does then is what is tested."""
    with warnings.catch_warnings():
        for words in (
            "Model has `tie_word_embeddings=True`",
            "fan_in_fan_out is set to",
            "`lora_bias=True` was passed",
            "Adapter 'default': .* LoRA tensor",
        ):
            warnings.filterwarnings("ignore", message=words)
        yield


def whole_model(
    checkpoint: Checkpoint, *, dtype: torch.dtype | None = None, **options: Any
) -> PeftModel:
    base = aligned(AutoModelForCausalLM.from_pretrained(checkpoint.published, dtype=dtype))
    # keys out of a cache lie otherwise in memory, and products of them round otherwise
    base.config.use_cache = False
    torch.manual_seed(SEED)
    with unwarned():
        return get_peft_model(base, lora(checkpoint, **options)).train()


@contextmanager
def bare_model(
    checkpoint: Checkpoint, settings: dict[str, Any] | None = None
) -> Iterator[LemaModel]:
    """Open the model for streaming, without an adapter."""
    config = LemaConfig(
        str(checkpoint.streamed), device="cpu", device_memory=None, save_steps=0, **settings or {}
    )
    model = LemaModel(config, backend=CpuBackend(poison=True))
    try:
        yield model
    finally:
        model.close()


def attach(model: LemaModel, checkpoint: Checkpoint, **options: Any) -> None:
    with unwarned():
        model.attach_lora(lora(checkpoint, **options), seed=SEED)
    model.lora_manager.train()


@contextmanager
def streamed_model(
    checkpoint: Checkpoint, settings: dict[str, Any] | None = None, **options: Any
) -> Iterator[LemaModel]:
    """Open the model for streaming, with the adapter that `options` of PEFT's say."""
    with bare_model(checkpoint, settings) as model:
        attach(model, checkpoint, **options)
        yield model


def assert_begins_as(model: LemaModel, whole: PeftModel) -> None:
    """Names, values, dtypes and places of everything that trains are those of PEFT."""
    found = trained(model.lora_manager)
    expected = trained(whole)
    assert list(found) == list(expected)
    for name, parameter in found.items():
        assert parameter.dtype == expected[name].dtype, name
        assert torch.equal(parameter, expected[name]), name
        assert parameter.untyped_storage().nbytes() == parameter.nbytes, (
            f"{name} keeps more memory than its own"
        )


def disturb(model: nn.Module) -> None:
    """Move everything that trains, so that no gradient is zero and nothing is as it began."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, parameter in sorted(trained(model).items()):
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


WAYS: dict[str, dict[str, Any]] = {
    "head": {"modules_to_save": ["lm_head"]},
    "embeddings": {"modules_to_save": ["embeddings"]},
    "both": {"modules_to_save": ["embeddings", "lm_head"]},
    "lora on both": {"target_modules": ["embeddings", "lm_head"]},
    "all biases": {"bias": "all"},
    "adapted biases": {"bias": "lora_only"},
    "bias of B": {"lora_bias": True, "bias": "all"},
    "magnitudes": {"use_dora": True},
    "magnitudes of both": {"use_dora": True, "target_modules": ["embeddings", "lm_head"]},
    "norms": {"modules_to_save": ["norms"]},
    "blocks of layers": {"modules_to_save": ["mlp"]},
    "rows of the embeddings": {"trainable_token_indices": list(range(3, 96, 4))},
    "everything": {
        "modules_to_save": ["embeddings", "lm_head", "norms"],
        "bias": "all",
        "use_dora": True,
    },
}


def options_of(way: str, name: str, checkpoint: Checkpoint) -> dict[str, Any]:
    """Spell a way as the architecture does."""
    norms = {"llama": ["norm"], "gpt2": ["ln_1", "ln_2", "ln_f"]}[name]
    spelled = dict(WAYS[way])
    for key in ("modules_to_save", "target_modules"):
        if key in spelled:
            spelled[key] = [
                ENDS[name][0] if one == "embeddings" else one
                for one in spelled[key]
                if one != "norms"
            ]
            spelled[key] += norms if "norms" in WAYS[way][key] else []
    if "target_modules" in spelled:
        spelled["target_modules"] = sorted(
            {*spelled["target_modules"], *checkpoint.architecture.targets}
        )
    return spelled
