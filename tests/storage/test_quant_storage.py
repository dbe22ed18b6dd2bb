"""Codes of bitsandbytes' four bits are codes, whatever type a checkpoint gives them
(`bnb_4bit_quant_storage`).
"""

from pathlib import Path

import pytest
import torch
from bitsandbytes import functional
from parity import assert_same, draw_b, streamed_model, streamed_step, whole_model, whole_step
from quantized import ARCHITECTURE, LINEARS, NUM_LAYERS, published
from safetensors.torch import load_file, save_file
from tiny import Checkpoint, micro_batches
from torch import Tensor
from transformers import BitsAndBytesConfig

from lema.convert.tensors import read_tensor
from lema.errors import NonFiniteError
from lema.storage import GlobalBinaryIndex
from lema.storage.quantized.formats import cut_rows
from lema.storage.quantized.records import QuantizedRecord, fold

WEIGHTS = "model.safetensors"
# those that transformers allows
STORAGES = (
    "uint8",
    "int8",
    "float16",
    "bfloat16",
    "float32",
    "float64",
)


def quantise(
    weight: Tensor, storage: torch.dtype, nested: bool
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the stored tensors of a weight by the ends of their names, and what the library
    makes of them.
    """
    packed, state = functional.quantize_4bit(
        weight, quant_type="nf4", quant_storage=storage, compress_statistics=nested
    )
    beside = {f".{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    return {"": packed, **beside}, functional.dequantize_4bit(packed, state)


def written(directory: Path, storage: str, nested: bool) -> Checkpoint:
    """Write a model in four bits, and as what the library expands it to. One row of each weight is
    all codes of the largest number, which are bits of NaN in each floating type."""
    whole = published(directory / "whole")
    streamed = published(directory / "streamed")
    stored: dict[str, Tensor] = {}
    for file in sorted(whole.glob("*.safetensors")):
        expanded = load_file(file)
        for name, weight in expanded.items():
            stored[name] = weight
            if name.endswith("proj.weight"):
                weight[0] = 1.0
                parts, expanded[name] = quantise(weight, getattr(torch, storage), nested)
                stored |= {name + end: part.contiguous() for end, part in parts.items()}
        save_file(expanded, file, {"format": "pt"})
    for file in streamed.glob("*.safetensors*"):
        file.unlink()
    save_file(stored, streamed / WEIGHTS, {"format": "pt"})
    return Checkpoint(ARCHITECTURE, whole, streamed)


def test_all_storages_of_transformers_are_among_those_tested() -> None:
    for storage in STORAGES:
        BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage=storage)
    with pytest.raises(ValueError, match="bnb_4bit_quant_storage"):
        BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage="float8_e4m3fn")


@pytest.mark.parametrize("storage", STORAGES)
def test_a_step_is_that_of_the_weights_of_the_library(storage: str, tmp_path: Path) -> None:
    checkpoint = written(tmp_path, storage, nested=storage in ("bfloat16", "float32", "uint8"))
    whole = whole_model(checkpoint)
    batches = micro_batches(2)
    draw_b(whole)
    with streamed_model(checkpoint) as model:
        assert sum(len(layer.expansions) for layer in model.memory.layers) == LINEARS * NUM_LAYERS
        draw_b(model.lora_manager)
        assert_same(streamed_step(model, batches), whole_step(whole, batches))


def test_a_scale_that_is_nan_is_still_refused(tmp_path: Path) -> None:
    checkpoint = written(tmp_path, "bfloat16", nested=False)
    stored = load_file(checkpoint.streamed / WEIGHTS)
    stored["model.layers.3.mlp.up_proj.weight.absmax"][1] = torch.nan
    save_file(stored, checkpoint.streamed / WEIGHTS, {"format": "pt"})
    with (
        pytest.raises(NonFiniteError, match=r"up_proj.weight \(absmax\)"),
        streamed_model(checkpoint) as model,
    ):
        streamed_step(model, micro_batches(1))


@pytest.mark.parametrize("storage", STORAGES)
def test_rows_are_cut_by_codes(storage: str, tmp_path: Path) -> None:
    """As groups of experts, which are rows of one stored matrix."""
    parts, expected = quantise(torch.randn(6, 128), getattr(torch, storage), nested=True)
    save_file(
        {f"w{end}": part for end, part in parts.items()}, tmp_path / WEIGHTS, {"format": "pt"}
    )
    (record,) = fold(GlobalBinaryIndex(tmp_path)).values()
    assert isinstance(record, QuantizedRecord)
    assert torch.equal(read_tensor(record, torch.float32), expected)
    assert torch.equal(read_tensor(cut_rows(record, 2, 5), torch.float32), expected[2:5])
