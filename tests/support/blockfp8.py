"""Tiny models published as fp8 with a scale for each block of a weight, as DeepSeek-V3 and
others are.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    FineGrainedFP8Config,
    PreTrainedConfig,
    PreTrainedModel,
)

from lema.storage.index import SINGLE_NAME

BLOCK = (16, 16)
LARGEST = 448.0  # of float8_e4m3fn


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes, and a float32 scale for each block; blocks at the edges may be smaller."""
    rows, columns = weight.shape
    grid = (-(-rows // BLOCK[0]), -(-columns // BLOCK[1]))
    whole = torch.zeros(grid[0] * BLOCK[0], grid[1] * BLOCK[1])
    whole[:rows, :columns] = weight
    blocks = whole.view(grid[0], BLOCK[0], grid[1], BLOCK[1])
    scales = blocks.abs().amax((1, 3)).clamp_min(1e-12) / LARGEST
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn).view(whole.shape)
    return codes[:rows, :columns].contiguous(), scales


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight, block by block as the format says."""
    rows, columns = codes.shape
    wide = scales.repeat_interleave(BLOCK[0], 0)[:rows].repeat_interleave(BLOCK[1], 1)[:, :columns]
    return (codes.float() * wide).to(dtype)


def is_quantised(name: str, weight: Tensor) -> bool:
    """Whether a published weight is one of those that are quantised: linear modules of layers,
    and experts.
    """
    return (
        weight.ndim == 2
        and ".layers." in name
        and name.endswith(".weight")
        and ".gate.weight" not in name
    )


def write(config: PreTrainedConfig, directory: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Publish a random model."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(directory)
    stored = load_file(directory / SINGLE_NAME)
    for name, weight in list(stored.items()):
        if is_quantised(name, weight):
            stored[name], stored[f"{name}_scale_inv"] = quantize(weight.float())
    save_file(stored, directory / SINGLE_NAME, metadata={"format": "pt"})
    settings = json.loads((directory / "config.json").read_text())
    settings["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(BLOCK),
    }
    (directory / "config.json").write_text(json.dumps(settings))
    return directory


def edit(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change what is stored."""
    stored = load_file(directory / SINGLE_NAME)
    change(stored)
    save_file(stored, directory / SINGLE_NAME, metadata={"format": "pt"})


def dequantized(directory: Path, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """Return the whole model as `transformers` dequantises it."""
    how = FineGrainedFP8Config(dequantize=True, weight_block_size=BLOCK)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, quantization_config=how)
    assert isinstance(model, PreTrainedModel)
    return model


def write_whole(directory: Path, out: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write what `transformers` dequantises as a model that is not quantised."""
    model = dequantized(directory, dtype)
    config = type(model.config).from_dict({**model.config.to_dict(), "quantization_config": None})
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=dtype)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(out)
    return out
