"""int8 and fp8 as torchao stores them: one scale per row, named as its flattened state dicts are.

https://github.com/pytorch/ao/tree/main/torchao/prototype/safetensors has the layout, which
`transformers` writes too.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lema.storage.quantized.records import PartSpecs, pieces, quiet_import

__all__ = ["expand", "metadata", "part_name", "quantize", "settings", "specs", "takes"]

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
