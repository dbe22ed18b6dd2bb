"""Weights published as fp8 in blocks: used as `transformers` dequantises them, refused by name
where they are odd.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import blockfp8
import pytest
import torch
from parity import assert_same, draw_b, streamed_model, streamed_step, whole_model, whole_step
from quantized import tensors_of
from tiny import ARCHITECTURES, Checkpoint
from torch import Tensor
from transformers import DeepseekV3Config, LlamaConfig, MixtralConfig, PreTrainedConfig

from lema import LemaConfig, LemaModel
from lema.convert.prepare import prepare
from lema.convert.tensors import read_tensor
from lema.errors import NonFiniteError, WeightsError
from lema.model import meta_model, read_config
from lema.model.weight_names import map_names, target_dtypes
from lema.storage import GlobalBinaryIndex
from lema.storage.quantized import records
from lema.storage.quantized.formats import PLAN
from lema.storage.quantized.records import QuantizedRecord

SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama(**changes: Any) -> LlamaConfig:
    return LlamaConfig(**SIZES | changes)


def mixtral(**changes: Any) -> MixtralConfig:
    return MixtralConfig(**SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2} | changes)


def deepseek(rope: int = 16) -> DeepseekV3Config:
    attention = {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": 16,
    }
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }
    sizes = SIZES | {
        "num_key_value_heads": 4,
        "num_hidden_layers": 3,
        "v_head_dim": 16,
        "moe_intermediate_size": 16,
    }
    return DeepseekV3Config(**sizes, **attention, **experts)


def mapped(directory: Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    return map_names(meta_model(read_config(directory), dtype), GlobalBinaryIndex(directory)).stored


@pytest.mark.parametrize("pieces", [1 << 20, 256], ids=["whole", "cut"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "config", [llama(), mixtral(), deepseek()], ids=lambda config: config.model_type
)
def test_every_weight_is_what_transformers_dequantises(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    pieces: int,
) -> None:
    monkeypatch.setattr(records, "PIECE_ON_HOST", pieces)
    directory = blockfp8.write(config, tmp_path, dtype)
    found = mapped(directory, dtype)
    expected = blockfp8.dequantized(directory, dtype).state_dict()
    assert found.keys() == expected.keys()
    quantized = {
        name: record for name, record in found.items() if isinstance(record, QuantizedRecord)
    }
    assert len(quantized) >= 6 * config.num_hidden_layers
    assert any(step.units > 1 for record in quantized.values() for step in record.about[PLAN].steps)
    wanted = target_dtypes(meta_model(read_config(directory), dtype))  # that of a router is fp32
    for name, record in found.items():
        assert torch.equal(read_tensor(record, wanted[name]), expected[name]), name


def test_a_last_block_that_is_not_full_keeps_its_scale(tmp_path: Path) -> None:
    # DeepSeek-V3's kv_a_proj_with_mqa has 576 rows, of blocks of 128; transformers 5.23 divides the
    # rows evenly.
    directory = blockfp8.write(deepseek(rope=8), tmp_path)
    stored: dict[str, Tensor] = {}
    blockfp8.edit(directory, stored.update)
    name = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
    assert stored[name].shape[0] % blockfp8.BLOCK[0]
    expected = blockfp8.dequantize(stored[name], stored[f"{name}_scale_inv"], torch.bfloat16)
    assert torch.equal(read_tensor(mapped(directory)[name], torch.bfloat16), expected)


@pytest.mark.parametrize("config", [llama(), mixtral()], ids=lambda config: config.model_type)
def test_a_step_is_that_of_peft_on_the_dequantised_model(
    tmp_path: Path, config: PreTrainedConfig
) -> None:
    directory = blockfp8.write(config, tmp_path / "published", torch.float32)
    whole = blockfp8.write_whole(directory, tmp_path / "whole", torch.float32)
    checkpoint = Checkpoint(
        replace(ARCHITECTURES[config.model_type], config=lambda: config), whole, directory
    )
    generator = torch.Generator().manual_seed(1)
    batches = [
        {"input_ids": torch.randint(3, 48, (2, length), generator=generator)} for length in (9, 12)
    ]
    batches = [batch | {"labels": batch["input_ids"]} for batch in batches]
    peft = whole_model(checkpoint, dtype=torch.float32)
    draw_b(peft)
    expected = whole_step(peft, batches)
    with streamed_model(checkpoint) as model:
        draw_b(model.lora_manager)
        assert_same(streamed_step(model, batches), expected)


def without(*names: str) -> Callable[[dict[str, Tensor]], None]:
    def change(stored: dict[str, Tensor]) -> None:
        for name in names:
            del stored[name]

    return change


def as_it_was(stored: dict[str, Tensor]) -> None:
    """Give an expert the scales of smaller blocks."""
    stored[f"{EXPERTS}.1.w1.weight_scale_inv"] = torch.ones(48 // 8, 32 // 8)


def of_nothing(stored: dict[str, Tensor]) -> None:
    stored["model.layers.2.input_layernorm.weight_scale_inv"] = torch.ones(1, 1)


EXPERTS = "model.layers.1.block_sparse_moe.experts"
Q_PROJ = "model.layers.2.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(f"{Q_PROJ}_scale_inv"), rf"{Q_PROJ}: .*{Q_PROJ} has no scales"),
        (
            without(Q_PROJ),
            rf"{Q_PROJ}: \[32, 32\] in the model, \[2, 2\] from 1 tensors .*{Q_PROJ}_scale_inv",
        ),
        (
            without(f"{EXPERTS}.1.w1.weight_scale_inv"),
            "layers.1.mlp.experts.gate_up_proj: .*w1.*number 1 is missing",
        ),
        (
            without(f"{EXPERTS}.2.w3.weight", f"{EXPERTS}.2.w3.weight_scale_inv"),
            "gate_up_proj: .*w3.*number 2 is missing",
        ),
        (
            as_it_was,
            r"w1.weight_scale_inv is \[6, 4\], and blocks of \[16, 16\] have \[3, 2\] scales",
        ),
        (of_nothing, r"input_layernorm.weight: .*there are scales without a quantised weight"),
    ],
    ids=[
        "no scales",
        "no weight",
        "an expert without",
        "an expert less",
        "other blocks",
        "scales of nothing",
    ],
)
def test_what_is_odd_is_refused_by_name(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    directory = blockfp8.write(mixtral(num_hidden_layers=3), tmp_path)
    blockfp8.edit(directory, change)
    with pytest.raises(WeightsError, match=message):
        mapped(directory)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_code_that_is_no_number_is_refused_by_name(tmp_path: Path, code: int) -> None:
    directory = blockfp8.write(llama(), tmp_path)

    def spoil(stored: dict[str, Tensor]) -> None:
        stored[Q_PROJ].view(torch.uint8)[3, 5] = code

    blockfp8.edit(directory, spoil)
    with pytest.raises(NonFiniteError, match=Q_PROJ) as caught:
        model = LemaModel(LemaConfig(str(directory), device="cpu", lora_rank=2))
        try:
            model.initialize_lora()
            tokens = torch.randint(3, 48, (1, 8))
            model.adapter.loss([{"input_ids": tokens, "labels": tokens}])
        finally:
            model.close()
    assert "element [3, 5]" in str(caught.value)


@pytest.mark.parametrize("kind", [None, "int8"])
def test_it_is_prepared_as_what_it_expands_to(tmp_path: Path, kind: str | None) -> None:
    directory = blockfp8.write(mixtral(num_hidden_layers=2), tmp_path / "published")
    whole = blockfp8.write_whole(directory, tmp_path / "whole")
    found = prepare(directory, tmp_path / "one", quantize=kind).weights
    other = prepare(whole, tmp_path / "other", quantize=kind).weights
    assert tensors_of(found) == tensors_of(other)
