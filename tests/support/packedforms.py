"""Models in GPTQ's and AWQ's published packing, written and read slowly, one code at a time.

The layouts are those of GPTQModel's `pack_block` and `dequantize_weight`, and of its `pack_awq` and
`dequantize_gemm`.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from quantized import published
from safetensors.torch import load_file, save_file
from tiny import Architecture, Checkpoint
from torch import Tensor
from transformers import LlamaConfig

__all__ = ["AWQ", "FORMS", "GPTQ", "PackedForm", "expanded", "packed", "write_packed"]

WIDTHS: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256}  # one and two groups of 128
# which of eight neighbouring outputs each code of a word is of
AWQ_ORDER = (
    0,
    2,
    4,
    6,
    1,
    3,
    5,
    7,
)
WORD = 32

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class PackedForm:
    """One of the forms in which such models are published."""

    method: str = "gptq"
    bits: int = 4
    group_size: int = 128  # -1: all inputs
    desc_act: bool = False
    less_one: bool = True  # of zero points: gptq, not gptq_v2
    numbered: bool = True  # g_idx is stored
    symmetric: bool = False  # all zero points are the middle code, as servers' kernels want gptq's
    settings: Mapping[str, Any] | None = None  # the config's, if they are not the method's own

    @property
    def quantization_config(self) -> dict[str, Any]:
        """What config.json says."""
        told: dict[str, Any] = {
            "quant_method": self.method,
            "bits": self.bits,
            "group_size": self.group_size,
        }
        if self.settings is not None:
            return told | dict(self.settings)
        if self.method == "awq":
            return told | {"version": "gemm", "zero_point": True}
        return told | {
            "desc_act": self.desc_act,
            "sym": self.symmetric,
            "checkpoint_format": "gptq" if self.less_one else "gptq_v2",
        }


def _auto_round(**settings: Any) -> dict[str, Any]:
    return {"quant_method": "auto-round", "data_type": "int", "sym": False} | settings


GPTQ = PackedForm()
AWQ = PackedForm("awq", numbered=False)
FORMS: Mapping[str, PackedForm] = {
    "gptq, groups of 128": GPTQ,
    "gptq, groups of 128, desc_act": replace(GPTQ, desc_act=True),
    "gptq, symmetric": replace(GPTQ, symmetric=True),
    "gptq, groups of 32": replace(GPTQ, group_size=32),
    "gptq, groups of 32, desc_act": replace(GPTQ, group_size=32, desc_act=True),
    "gptq v2, groups of 32, desc_act": replace(GPTQ, group_size=32, desc_act=True, less_one=False),
    "gptq v2, groups of 128": replace(GPTQ, less_one=False),
    "gptq, one group": replace(GPTQ, group_size=-1),
    "gptq, without numbers of groups": replace(GPTQ, numbered=False),
    "gptq, 8 bits": replace(GPTQ, bits=8),
    "gptq, 2 bits": replace(GPTQ, bits=2, group_size=32),
    "awq, groups of 128": AWQ,
    "awq, groups of 32": replace(AWQ, group_size=32),
    "awq, one group": replace(AWQ, group_size=-1),
    "auto-round, as gptq": replace(
        GPTQ, numbered=False, settings=_auto_round(packing_format="auto_round:auto_gptq")
    ),
    "auto-round, as gptq v2": replace(
        GPTQ, numbered=False, less_one=False, settings=_auto_round(packing_format="auto_round")
    ),
    "auto-round, as awq": replace(AWQ, settings=_auto_round(packing_format="auto_round:auto_awq")),
}


def packed(name: str, weight: Tensor, form: PackedForm) -> Tensors:
    """Quantise one weight, `[outputs, inputs]`, by rounding; return its stored tensors."""
    outputs, inputs = weight.shape
    size = inputs if form.group_size == -1 else min(inputs, form.group_size)
    groups = inputs // size
    most = 2**form.bits - 1
    number_of = torch.arange(inputs) // size
    if form.desc_act:
        number_of = number_of[
            torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs + outputs))
        ]
    # [groups, outputs, size]
    grouped = torch.stack([weight[:, number_of == group].float() for group in range(groups)])
    low = grouped.amin(-1).clamp_max(0)
    high = grouped.amax(-1).clamp_min(0)
    middle = 2 ** (form.bits - 1)
    if form.symmetric:
        scales = (torch.maximum(-low, high) / (middle - 1)).clamp_min(1e-4).half()
        zeros = torch.full(scales.shape, middle, dtype=torch.int32)
    else:
        scales = ((high - low) / most).clamp_min(1e-4).half()
        zeros = (-low / scales).round().clamp(1, most).int()
    codes = (
        (weight / scales.float()[number_of].t() + zeros[number_of].t()).round().clamp(0, most).int()
    )
    stem = name.removesuffix("weight")
    write = _awq_words if form.method == "awq" else _gptq_words
    words, zero_words = write(codes.tolist(), zeros.tolist(), form)
    made = {
        f"{stem}qweight": _int32(words),
        f"{stem}qzeros": _int32(zero_words),
        f"{stem}scales": scales,
    }
    return made | ({f"{stem}g_idx": number_of.int()} if form.numbered else {})


def _gptq_words(
    codes: list[list[int]], zeros: list[list[int]], form: PackedForm
) -> tuple[Any, Any]:
    words = [_words(row, range(WORD // form.bits), form.bits) for row in codes]  # of each output
    stored = [[zero - form.less_one for zero in row] for row in zeros]  # of each group
    zero_words = [_words(row, range(WORD // form.bits), form.bits) for row in stored]
    return list(zip(*words, strict=True)), zero_words


def _awq_words(codes: list[list[int]], zeros: list[list[int]], form: PackedForm) -> tuple[Any, Any]:
    words = [_words(row, AWQ_ORDER, form.bits) for row in zip(*codes, strict=True)]  # of each input
    return words, [_words(row, AWQ_ORDER, form.bits) for row in zeros]  # of each group


def _words(codes: Sequence[int], order: Sequence[int], bits: int) -> list[int]:
    """Put neighbouring codes in words; `order` says which of them lies in each place, from the
    lowest bits on.
    """
    words = []
    for start in range(0, len(codes), len(order)):
        word = 0
        for place, number in enumerate(order):
            word |= codes[start + number] << (bits * place)
        words.append(word)
    return words


def _int32(words: list[list[int]]) -> Tensor:
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)  # the upper half becomes negative


def expanded(tensors: Mapping[str, Tensor], form: PackedForm) -> Tensors:
    """Return all tensors of a model, the packed ones read code by code, `[outputs, inputs]`, in
    the scales' type.
    """
    found: Tensors = {}
    for name, tensor in tensors.items():
        stem, _, part = name.rpartition(".")
        if part == "qweight":
            parts = {one: tensors[f"{stem}.{one}"] for one in ("qweight", "qzeros", "scales")}
            found[f"{stem}.weight"] = _read(parts, tensors.get(f"{stem}.g_idx"), form)
        elif part not in ("qzeros", "scales", "g_idx"):
            found[name] = tensor
    return found


def _read(parts: Mapping[str, Tensor], numbers: Tensor | None, form: PackedForm) -> Tensor:
    scales = parts["scales"]
    order = AWQ_ORDER if form.method == "awq" else range(WORD // form.bits)
    words = parts["qweight"] if form.method == "awq" else parts["qweight"].t()
    rows = [_codes(row, order, form.bits) for row in words.tolist()]
    # [outputs, inputs]
    codes = torch.tensor(rows).t() if form.method == "awq" else torch.tensor(rows)
    # [groups, outputs]
    zeros = torch.tensor([_codes(row, order, form.bits) for row in parts["qzeros"].tolist()])
    if form.method == "gptq" and form.less_one:
        zeros += 1
    inputs = codes.shape[1]
    groups = len(scales)
    number_of = torch.arange(inputs) * groups // inputs if numbers is None else numbers
    weight = torch.empty(codes.shape, dtype=scales.dtype)
    for number in range(inputs):
        group = int(number_of[number])
        weight[:, number] = (codes[:, number] - zeros[group]).to(scales.dtype) * scales[group]
    return weight


def _codes(words: Sequence[int], order: Sequence[int], bits: int) -> list[int]:
    """Return the codes of words, as `_words` put them there."""
    codes = [0] * (len(words) * len(order))
    for start, word in enumerate(words):
        for place, number in enumerate(order):
            codes[start * len(order) + number] = (word % 2**WORD) >> (bits * place) & (2**bits - 1)
    return codes


def write_packed(
    form: PackedForm,
    directory: Path,
    which: Callable[[str], Any] = re.compile(r"proj\.weight$").search,
    **changes: Any,
) -> Checkpoint:
    """Write a Llama of 8 layers in a form, and, in fp32, what its weights are when they are read
    slowly.
    """
    whole = published(directory / "whole", **WIDTHS | changes)
    weights = {
        name: one
        for file in sorted(whole.glob("*.safetensors"))
        for name, one in load_file(file).items()
    }
    stored: Tensors = {}
    for name, weight in weights.items():
        stored |= packed(name, weight, form) if which(name) else {name: weight}
    for file in whole.glob("*.safetensors*"):
        file.unlink()
    metadata = {"format": "pt"}
    plain = {name: one.float() for name, one in expanded(stored, form).items()}
    save_file(plain, whole / "model.safetensors", metadata)
    streamed = directory / "packed"
    streamed.mkdir()
    save_file(
        {name: one.contiguous() for name, one in stored.items()},
        streamed / "model.safetensors",
        metadata,
    )
    config = json.loads((whole / "config.json").read_text())
    config["quantization_config"] = form.quantization_config
    (streamed / "config.json").write_text(json.dumps(config))
    return Checkpoint(Architecture(LlamaConfig), whole, streamed)
