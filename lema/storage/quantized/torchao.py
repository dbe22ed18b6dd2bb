"""int8 and fp8 as torchao stores them: one scale per row, named as its flattened state dicts are.

https://github.com/pytorch/ao/tree/main/torchao/prototype/safetensors has the layout, which
`transformers` writes too.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lema.errors import ModelError
from lema.storage.header import TensorRecord
from lema.storage.index import GlobalBinaryIndex
from lema.storage.quantized.records import (
    PartSpecs,
    QuantizedRecord,
    collected,
    nonsense,
    parsed,
    pieces,
    quiet_import,
)
from lema.storage.slices import part_of

__all__ = [
    "KINDS",
    "cut_rows",
    "expand",
    "find",
    "metadata",
    "part_name",
    "part_of_quantized",
    "quantize",
    "settings",
    "specs",
    "takes",
]

KINDS: tuple[str, ...] = ("int8", "fp8")

CLASSES = ("Int8Tensor", "Float8Tensor")

# Options of a tensor with which its products differ from those of the expanded tensor.
CHANGES_PRODUCTS = ("act_quant_kwargs", "act_pre_scale")

ANY = "_.weight"  # a name for the library to split


def takes(shape: Sequence[int]) -> bool:
    """Whether a weight of this shape can be quantised: one scale per row fits any."""
    return len(shape) in (2, 3)


def specs(kind: str, shape: Sequence[int], dtype: torch.dtype) -> tuple[PartSpecs, dict[str, Any]]:
    """Say what a weight becomes: the dtype and shape of each part, and what the library says of
    it.
    """
    parts, about = _flat(_quantized(kind, torch.empty(tuple(shape), dtype=dtype, device="meta")))
    return {part: (tensor.dtype, tuple(tensor.shape)) for part, tensor in parts.items()}, about


def quantize(kind: str, weight: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Quantise a weight, `[rows, columns]` or several of them; return its parts, and what the
    library says of it.
    """
    flat = weight.flatten(0, -2)
    done = [_flat(_quantized(kind, flat[rows]))[0] for rows in pieces(flat)]
    parts = {
        part: torch.cat([_plain(piece[part]) for piece in done]).view(done[0][part].dtype)
        for part in done[0]
    }
    # torchao divides a row of zeros by its scale, which is zero
    if parts["qdata"].is_floating_point():
        _plain(parts["qdata"]).masked_fill_(parts["scale"] == 0, 0)
    of_shape, about = specs(kind, weight.shape, weight.dtype)
    return {part: parts[part].view(shape) for part, (_, shape) in of_shape.items()}, about


def expand(parts: Mapping[str, Tensor], about: Mapping[str, Any], out: Tensor) -> None:
    """Fill `out` with what the library dequantises the parts to, some rows at a time."""
    support = quiet_import("torchao.prototype.safetensors.safetensors_utils")
    data = about["_data"] | {part: tensor.flatten(0, -2) for part, tensor in parts.items()}
    quantized = support.object_from_dict(
        {**about, "_data": data | {"block_size": about["_data"]["block_size"][-2:]}}
    )
    flat = out.flatten(0, -2)
    for rows in pieces(flat):
        flat[rows].copy_(quantized[rows].dequantize(out.dtype))


def find(index: GlobalBinaryIndex) -> list[QuantizedRecord]:
    """Find the parameters that torchao's flattened state dicts describe in the files' metadata."""
    described: dict[str, str] = {}
    for header in filter(lambda entries: "tensor_names" in entries, index.metadata.values()):
        described |= {
            name: text
            for name, text in header.items()
            if "." in name and '"_tensor_data_names"' in text
        }
    records = []
    for name, text in described.items():
        about = parsed(text, name, index.path)
        kind = about.get("_type")
        names = about.get("_tensor_data_names")
        data = about.get("_data")
        if not isinstance(names, list) or "qdata" not in names or not isinstance(data, dict):
            raise nonsense(name, index.path)
        changing = [key for key in CHANGES_PRODUCTS if data.get(key) is not None or key in names]
        if kind not in CLASSES or changing:
            what = f"the parameter is quantised as torchao's {kind}" + (
                f" with {changing[0]}" if changing else ""
            )
            how = "use weights that are quantised alone, to int8 or fp8, or the unquantised model"
            raise ModelError(what, where=f"{index.path}: {name}", how=how)
        owner, _, leaf = name.rpartition(".")
        parts = collected(index, name, {part: f"{owner}._{leaf}_{part}" for part in names})
        block = data.get("block_size")
        shape = parts["qdata"].shape
        if block != [1] * (len(shape) - 1) + [*shape[-1:]] or any(
            part.shape != (*shape[:-1], 1) for what, part in parts.items() if what != "qdata"
        ):
            what = (
                f"the parameter has blocks of {block}, and only one scale per row is expanded here"
            )
            how = "quantise it by row: quantize_base and `lema prepare --quantize` do"
            raise ModelError(what, where=f"{index.path}: {name}", how=how)
        records.append(QuantizedRecord(name, "torchao", parts, shape, about))
    return records


def part_of_quantized(
    record: QuantizedRecord, axis: int, ranges: Sequence[tuple[int, int]]
) -> QuantizedRecord:
    """Return ranges of a parameter along an axis; with one scale per row, no more is read."""
    shape = list(record.shape)
    shape[axis] = sum(stop - start for start, stop in ranges)
    by_row = axis < len(shape) - 1
    parts = {
        what: part_of(part, axis, ranges)
        if isinstance(part, TensorRecord) and (by_row or what == "qdata")
        else part
        for what, part in record.parts.items()
    }
    data = record.about["_data"] | {"block_size": [1] * (len(shape) - 1) + [shape[-1]]}
    return replace(record, parts=parts, shape=tuple(shape), about={**record.about, "_data": data})


def cut_rows(record: QuantizedRecord, first: int, end: int) -> QuantizedRecord:
    """Return some rows of a weight along its first dimension."""
    return part_of_quantized(record, 0, [(first, end)])


def part_name(parameter: str, part: str) -> str:
    """Return what a part is called in a file."""
    owner, _, leaf = parameter.rpartition(".")
    return f"{owner}._{leaf}_{part}"


def metadata(abouts: Mapping[str, Mapping[str, Any] | None]) -> dict[str, str]:
    """Return what the library writes into a file's header; None: a tensor that is not quantised."""
    described = {
        name: json.dumps({"_type": "Tensor"} if about is None else about)
        for name, about in abouts.items()
    }
    return described | {"tensor_names": json.dumps(list(abouts))}


def settings(kind: str, dtype: torch.dtype, unchanged: Sequence[str]) -> dict[str, Any]:  # noqa: ARG001  as for others
    """Return the `quantization_config` for `transformers`. Weights expand to `dtype`, but for
    modules `unchanged`.
    """
    from transformers import TorchAoConfig
    from transformers.utils import import_utils

    # A command hides torchao while it imports the libraries (`lema.cli.libraries`), and this
    # remembers that.
    if (forget := getattr(import_utils.is_torchao_available, "cache_clear", None)) is not None:
        forget()

    return dict(TorchAoConfig(_config(kind), modules_to_not_convert=list(unchanged)).to_dict())


def _config(kind: str) -> Any:
    quantization = quiet_import("torchao.quantization")
    config = (
        quantization.Int8WeightOnlyConfig if kind == "int8" else quantization.Float8WeightOnlyConfig
    )
    return config(version=2)


def _quantized(kind: str, weight: Tensor) -> Tensor:
    linear = nn.Linear(1, 1, bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    quiet_import("torchao.quantization").quantize_(linear, _config(kind))
    return linear.weight.data


def _flat(weight: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    support = quiet_import("torchao.prototype.safetensors.safetensors_support")
    tensors, described = support.flatten_tensor_state_dict({ANY: weight})
    prefix = part_name(ANY, "")
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}, json.loads(
        described[ANY]
    )


def _plain(tensor: Tensor) -> Tensor:
    """The tensor as integers, where torch knows its floats only as storage."""
    return tensor.view(torch.int8) if tensor.dtype.itemsize == 1 else tensor
