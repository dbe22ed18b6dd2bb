"""Steps of LEMA with the kernels of `liger-kernel` itself, against PEFT, on the CPU by Triton's
interpreter.
"""

import sys
from pathlib import Path
from typing import Any

import everytype
import pytest
import torch
from everytype import SEED, STREAMED, compare, difference, micro_batches, opened, write_model
from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
from parity import draw_b, trained
from peft import get_peft_model
from tinyconfig import tiny_config
from torch.nn.functional import cross_entropy
from transformers import (
    AutoConfig,
    Gemma3TextConfig,
    Glm4Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from lema.engine.head.loss import targets_of
from lema.model.skeleton import auto_class
from lema_cpu import CpuBackend
from lema_cuda import CudaBackend, liger

LAYERS = 8
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
}
# What is fused of each: modules that rotate, gated MLPs, norms.
DEEP: dict[str, tuple[PreTrainedConfig, str]] = {
    "llama": (LlamaConfig(**SIZES), "8 LlamaAttention, 8 LigerSwiGLUMLP, 16 LigerRMSNorm"),
    "qwen3": (Qwen3Config(**SIZES), "8 Qwen3Attention, 32 LigerRMSNorm, 8 LigerSwiGLUMLP"),
    "gemma3": (
        Gemma3TextConfig(**SIZES, query_pre_attn_scalar=16, sliding_window=5),
        "8 Gemma3Attention, 48 LigerRMSNorm, 8 LigerGEGLUMLP",
    ),
    "glm4": (Glm4Config(**SIZES), "8 LigerPhi3SwiGLUMLP, 32 LigerRMSNorm"),
}
KNOWN = [kind for kind in MODEL_TYPE_TO_APPLY_LIGER_FN if kind in STREAMED]
# Of these liger-kernel 0.8.5 needs names that this transformers does not have.
UNFIT = {"glm4v_moe", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"}
# their gradients in fp32 are themselves further from those in fp64
ROUGH = {
    "qwen3_5_moe",
    "qwen3_5_moe_text",
}
NOTHING = {"nemotron"}  # it has neither an RMS norm nor a gated MLP
FAST = {"arithmetic": "fast"}


class Fusing(CpuBackend):
    """The CPU, with the kernels of the CUDA backend."""

    fuse = CudaBackend.fuse
    attention = None


@pytest.fixture(autouse=True)
def _fusing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(everytype, "CpuBackend", Fusing)


def left_in_transformers() -> list[str]:
    """Return what Liger's code has left in transformers' modules and classes, and in torch's."""
    modules = [one for name, one in [*sys.modules.items()] if name.startswith("transformers.")]
    owners = [*modules, torch.nn, torch.nn.functional]
    owners += [one for module in modules for one in vars(module).values() if isinstance(one, type)]
    values = [(owner, name, one) for owner in owners for name, one in vars(owner).items()]
    return [
        f"{owner.__name__}.{name}"
        for owner, name, one in values
        if str(getattr(one, "__module__", "")).startswith("liger_kernel")
    ]


@pytest.mark.parametrize("recompute", [True, False, "auto"], ids=["recomputed", "kept", "auto"])
@pytest.mark.parametrize("name", DEEP)
def test_a_step_is_pefts_but_for_rounding(name: str, recompute: Any, tmp_path: Path) -> None:
    config, fused = DEEP[name]
    with opened(write_model(config, tmp_path / "said"), **FAST) as model:
        assert model.fused is not None and model.fused.endswith(f"fuses {fused}")
    found = compare(config, tmp_path / "compared", gradient_checkpointing=recompute, **FAST)
    assert max(found.logits, found.loss) <= 2e-6 and found.worst <= 1e-5 and not found.idle_layers


def test_what_trains_in_a_norm_has_its_gradient(tmp_path: Path) -> None:
    trains = {"lora_modules_to_save": ["input_layernorm"]}
    found = compare(DEEP["llama"][0], tmp_path, **FAST, **trains)
    assert any("layernorm" in name for name in found.gradients)
    assert found.worst <= 1e-5


def test_layers_whose_experts_are_leased_in_groups_compute_by_kernels_too(tmp_path: Path) -> None:
    found = compare("mixtral", tmp_path, experts_per_slot=2, **FAST)
    assert found.worst <= 1e-5


def test_exact_in_the_same_process_is_bitwise_pefts(tmp_path: Path) -> None:
    for name in ("llama", "gemma3"):
        compare(DEEP[name][0], tmp_path / f"{name} fast", **FAST)
        assert compare(DEEP[name][0], tmp_path / f"{name} exact").worst == 0


@pytest.mark.filterwarnings("ignore:PEFT does not adapt")  # the experts of some types
@pytest.mark.parametrize("kind", KNOWN)
def test_every_type_that_liger_knows(kind: str, tmp_path: Path) -> None:
    with opened(write_model(tiny_config(kind), tmp_path / "said"), **FAST) as model:
        said = model.fused
        modules = [*model.skeleton.modules()]
        fused = [one for one in modules if isinstance(vars(one).get("forward"), liger.Fused)]
    assert said is not None and ("fuses nothing" in said) is not bool(fused)
    assert ("does not fit" in said) is (kind in UNFIT)
    assert ("has nothing for" in said) is (kind in NOTHING)
    assert not left_in_transformers()
    if fused:
        found = compare(kind, tmp_path / "compared", **FAST)
        assert max(found.logits, found.loss) <= 2e-6 and not found.idle_layers
        assert found.worst <= 2e-5 or (
            kind in ROUGH and found.worst <= 1.5 * own_rounding(kind, tmp_path / "own")
        )


def own_rounding(kind: str, directory: Path) -> float:
    """Return how far the gradients of PEFT's own step in fp32 are from those in fp64, as
    `compare` measures it.
    """
    published = write_model(tiny_config(kind), directory)
    made = list[dict[str, Any]]()
    with opened(published) as model:
        adapter = model.lora_manager.peft_config["default"]
    for dtype in (torch.float32, torch.float64):
        # One expert after the other, because grouped products have no fp64.
        options = {"dtype": dtype, "experts_implementation": "eager"}
        base = auto_class(AutoConfig.from_pretrained(published)).from_pretrained(
            published, **options
        )
        torch.manual_seed(SEED)
        whole = get_peft_model(base, adapter).train()
        draw_b(whole)
        whole.to(dtype)
        if made:
            with torch.no_grad():
                for name, parameter in trained(whole).items():
                    parameter.copy_(made[0][name].detach())
        for batch in micro_batches():
            logits = whole(input_ids=batch["input_ids"], use_cache=False).logits
            cross_entropy(
                logits.flatten(0, 1), targets_of(batch["labels"]).flatten(), reduction="sum"
            ).backward()
        made.append(trained(whole))
    single, double = made
    return max(difference(single[name].grad.double(), one.grad) for name, one in double.items())
