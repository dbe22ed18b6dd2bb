"""Models in the forms of integers that llm-compressor writes, with what their codes stand for."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from quantized import ARCHITECTURE, published
from safetensors.torch import load_file, save_file
from tiny import Checkpoint
from torch import Tensor

__all__ = ["FILE", "FORMS", "Form", "compressed", "expanded", "write_compressed"]

FILE = "model.safetensors"
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Form:
    """How llm-compressor writes a weight of integers."""

    bits: int = 4
    symmetric: bool = False
    group_size: int | None = 32  # None: a scale for each output
    # of groups that are not neighbours: "" none are, "numbered", "unused": all numbers are -1
    ordered: str = ""
    packed: bool = True
    activations: bool = False  # servers are told to round each row of inputs to 8 bits

    @property
    def scheme(self) -> dict[str, Any]:
        strategy = "channel" if self.group_size is None else "group"
        order = "group" if self.ordered else None
        settings = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": self.symmetric,
            "strategy": strategy,
        }
        return settings | {"group_size": self.group_size, "actorder": order}

    @property
    def quantization_config(self) -> dict[str, Any]:
        form = "pack-quantized" if self.packed else "int-quantized"
        inputs = {
            "num_bits": 8,
            "type": "int",
            "symmetric": True,
            "strategy": "token",
            "dynamic": True,
        }
        group = {
            "targets": ["Linear"],
            "weights": self.scheme,
            "input_activations": inputs if self.activations else None,
            "output_activations": None,
        }
        settings = {
            "quant_method": "compressed-tensors",
            "format": form,
            "quantization_status": "compressed",
        }
        return settings | {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}


FORMS: Mapping[str, Form] = {
    "int4, groups": Form(),
    "int4, channels": Form(group_size=None),
    "int4, channels, symmetric": Form(group_size=None, symmetric=True),
    "int8, groups": Form(bits=8),
    "int8, channels": Form(bits=8, group_size=None),
    "int3, groups": Form(bits=3),
    "int8, channels, not packed": Form(bits=8, group_size=None, packed=False),
    "int4, numbered groups": Form(ordered="numbered"),
    "int4, numbered groups, symmetric": Form(ordered="numbered", symmetric=True),
    "int8, numbered groups": Form(bits=8, ordered="numbered"),
    "int3, numbered groups": Form(bits=3, ordered="numbered"),
    "int4, numbers that say nothing": Form(ordered="unused"),
}


def compressed(name: str, weight: Tensor, form: Form) -> tuple[Tensors, Tensor]:
    """Return the stored tensors of a weight, `[outputs, inputs]`, and what they stand for, in
    the scales' type.
    """
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    outputs, inputs = weight.shape
    size = form.group_size or inputs
    numbers = torch.arange(inputs) // size
    if form.ordered == "numbered":
        numbers = numbers[
            torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs + outputs))
        ]
    grouped = torch.stack(
        [weight[:, numbers == group].float() for group in range(inputs // size)], 1
    )
    least = -(2 ** (form.bits - 1))
    most = 2 ** (form.bits - 1) - 1
    low = grouped.amin(-1).clamp_max(0)
    high = grouped.amax(-1).clamp_min(0)
    if form.symmetric:
        scales = torch.maximum(-low, high) / most
        zeros = torch.zeros(low.shape, dtype=torch.int8)
        scales = scales.to(torch.bfloat16)
    else:
        scales = ((high - low) / (most - least)).to(torch.bfloat16)
        zeros = (least - low / scales.float()).round().clamp(least, most).to(torch.int8)
    by_input = scales[:, numbers], zeros[:, numbers]
    codes = (
        (weight.float() / by_input[0].float() + by_input[1])
        .round()
        .clamp(least, most)
        .to(torch.int8)
    )
    expected = (codes.to(torch.bfloat16) - by_input[1].to(torch.bfloat16)) * by_input[0]
    made: Tensors = {f"{name}_scale": scales}
    if form.packed:
        made |= {
            f"{name}_packed": pack_to_int32(codes, form.bits),
            f"{name}_shape": torch.tensor([outputs, inputs]),
        }
    else:
        made[name] = codes
    if not form.symmetric:
        made[f"{name}_zero_point"] = (
            pack_to_int32(zeros, form.bits, packed_dim=0) if form.packed else zeros
        )
    if form.ordered:
        made[f"{name}_g_idx"] = (
            numbers.int() if form.ordered == "numbered" else torch.full((inputs,), -1).int()
        )
    return made, expected


def expanded(held: Mapping[str, Tensor], form: Form) -> Tensors:
    """Return all tensors of a model, those that are packed by what their codes stand for, in the
    scales' type.
    """
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    found: Tensors = {}
    for stored, tensor in held.items():
        name, _, part = stored.rpartition("weight")
        name = f"{name}weight"
        if part == "_packed":
            scales = held[f"{name}_scale"]
            codes = unpack_from_int32(tensor, form.bits, torch.Size(held[f"{name}_shape"].tolist()))
            numbers = torch.arange(codes.shape[1]) * scales.shape[1] // codes.shape[1]
            numbers = held[f"{name}_g_idx"] if form.ordered == "numbered" else numbers
            zeros = unpack_from_int32(
                held[f"{name}_zero_point"], form.bits, scales.shape, packed_dim=0
            )
            found[name] = (codes.to(scales.dtype) - zeros[:, numbers].to(scales.dtype)) * scales[
                :, numbers
            ]
        elif f"{name}_packed" not in held:
            found[stored] = tensor
    return found


def write_compressed(form: Form, directory: Path, num_layers: int, **changes: Any) -> Checkpoint:
    """Write a Llama of bf16 in a form, and, as fp32, what its weights stand for. `changes` are of
    its config.
    """
    whole = published(directory / "whole", num_hidden_layers=num_layers, **changes)
    weights = {
        name: one
        for file in sorted(whole.glob("*.safetensors"))
        for name, one in load_file(file).items()
    }
    stored = dict[str, Tensor]()
    plain = dict[str, Tensor]()
    for name, weight in weights.items():
        made, plain[name] = (
            compressed(name, weight, form) if "proj.weight" in name else ({name: weight}, weight)
        )
        stored |= made
    for file in whole.glob("*.safetensors*"):
        file.unlink()
    save_file({name: one.float() for name, one in plain.items()}, whole / FILE, {"format": "pt"})
    small = directory / "small"
    small.mkdir()
    save_file(
        {name: one.contiguous() for name, one in stored.items()}, small / FILE, {"format": "pt"}
    )
    config = json.loads((whole / "config.json").read_text())
    (small / "config.json").write_text(
        json.dumps(config | {"quantization_config": form.quantization_config})
    )
    return Checkpoint(ARCHITECTURE, whole, small)
