"""Checkpoints without their weights: config.json, and a file with a true header and nothing behind
it.

Names and shapes are the published ones: `transformers` turns those in memory back into them, as
`save_pretrained` does, on tensors without memory; then each form says as what a weight is stored. A
plan reads no more of a model than this.
"""

import json
import re
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from lema.errors import ConfigError
from lema.model import meta_model
from lema_tools.models.checkpoints import Checkpoint, config_of

__all__ = [
    "BLOCK",
    "EXPERT",
    "GROUP",
    "LINEAR",
    "SETTINGS",
    "TOWER",
    "layout_of",
    "write_headers",
    "write_hollow",
]

LINEAR = re.compile(r"layers\.\d+\..*(proj(_with_mqa)?|w[123]|w[qko](_[ab])?|wkv)\.weight$")
EXPERT = re.compile(r"layers\.\d+\..*experts\.\d+\..*\.weight$")
TOWER = re.compile(r"vision|visual")
BLOCK = 128  # rows and columns that share a scale of fp8
GROUP = 32  # values that share one of fp4 and int4
PACKED_GROUP = 128  # inputs that share one of gptq and awq
STORED = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.bool: "BOOL",
}
SIZES = {
    "F32": 4,
    "BF16": 2,
    "F16": 2,
    "I64": 8,
    "I32": 4,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "U8": 1,
    "I8": 1,
    "BOOL": 1,
}

Shape = tuple[int, ...]
Layout = dict[str, tuple[str, Shape]]  # a tensor's name to its type in the file and its shape

_BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
_UNQUANTIZED = [
    "lm_head",
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
]
SETTINGS: Mapping[str, dict[str, Any] | None] = {  # `quantization_config` of each form
    "bf16": None,
    "bf16, experts fused": None,
    "fp8 in blocks": _BLOCKS,
    "fp8 per tensor": {
        "quant_method": "fp8",
        "weight_block_size": None,
        "activation_scheme": "static",
    },
    "fp4 experts, fp8": _BLOCKS,
    "mxfp4": {"quant_method": "mxfp4"},
    "int4 experts": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": _INT4, "input_activations": None}
        },
        "ignore": _UNQUANTIZED,
    },
    "gptq": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": PACKED_GROUP,
        "sym": True,
        "desc_act": False,
    },
    "awq": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": PACKED_GROUP,
        "zero_point": True,
        "version": "gemm",
    },
}


def write_hollow(checkpoint: Checkpoint, directory: Path) -> Path:
    """Write a named checkpoint without its weights, or raise a ConfigError: its sizes are not
    known here.
    """
    if checkpoint.sizes is None:
        how = "give the directory of the model, or a hub id in the cache"
        raise ConfigError(
            f"the config of {checkpoint.name} is not known offline", where=checkpoint.name, how=how
        )
    config = config_of(checkpoint)
    config.dtype = torch.bfloat16
    settings = SETTINGS[checkpoint.form]
    directory.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(directory)
    if settings is not None:
        file = directory / "config.json"
        content = json.loads(file.read_text(encoding="utf-8")) | {"quantization_config": settings}
        file.write_text(json.dumps(content), encoding="utf-8", newline="\n")
    write_headers(directory / "model.safetensors", layout_of(config, checkpoint.form))
    return directory


def layout_of(config: PreTrainedConfig, form: str) -> Layout:
    """Return how a model of that config is stored in a form: names, types and shapes."""
    model = meta_model(config, torch.bfloat16)
    named: dict[str, nn.Parameter | torch.Tensor] = dict(model.named_parameters())
    stored = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if name in named or name in dict(model.named_buffers())
    }
    published = revert_weight_conversion(model, stored)
    # transformers writes the layers of Kimi-K2.5 under the name that only its tower has for them.
    shapes = {
        name.replace("model.model.blocks.", "model.model.layers."): (
            STORED[tensor.dtype],
            tuple(tensor.shape),
        )
        for name, tensor in published.items()
    }
    if form == "bf16, experts fused":
        return _fused(shapes)
    layout: Layout = {}
    for name, (dtype, shape) in shapes.items():
        quantized = FORMS[form](name, shape) if len(shape) > 1 and not TOWER.search(name) else None
        layout |= {name: (dtype, shape)} if quantized is None else quantized
    return layout


def write_headers(file: Path, layout: Layout) -> None:
    """Write a .safetensors file of which only the header is on the disk, and which is as long as
    the real one.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in layout.items():
        begin = end
        end = end + SIZES[dtype] * prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(raw).to_bytes(8, "little") + raw)
        out.truncate(8 + len(raw) + end)


def _fused(shapes: Layout) -> Layout:
    """Stack experts, `[experts, out, in]`, and put the two side by side that are computed so."""
    layout: Layout = {}
    count = 1 + max(
        int(match[1]) for name in shapes if (match := re.search(r"\.experts\.(\d+)\.", name))
    )
    for name, (dtype, shape) in shapes.items():
        if not (match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)):
            layout[name] = dtype, shape
        elif match[2] == "0" and match[3] == "gate":
            layout[f"{match[1]}.gate_up_proj"] = dtype, (count, 2 * shape[0], shape[1])
        elif match[2] == "0" and match[3] == "down":
            layout[f"{match[1]}.down_proj"] = dtype, (count, *shape)
    return layout


def _plain(name: str, shape: Shape) -> None:  # noqa: ARG001 # a form is asked with both
    return None


def _blocks(name: str, shape: Shape, scale: str = "weight_scale_inv") -> Layout | None:
    if not LINEAR.search(name):
        return None
    scales = tuple(-(-size // BLOCK) for size in shape)
    return {name: ("F8_E4M3", shape), name.removesuffix("weight") + scale: ("F32", scales)}


def _tensors(name: str, shape: Shape) -> Layout | None:
    if not LINEAR.search(name):
        return None
    scales = {
        f"{name}_scale_inv": ("BF16", ()),
        f"{name.removesuffix('weight')}activation_scale": ("F32", ()),
    }
    return {name: ("F8_E4M3", shape), **scales}


def _fp4(name: str, shape: Shape) -> Layout | None:
    if not EXPERT.search(name):
        return _blocks(name, shape, "scale")
    scale = name.removesuffix("weight") + "scale"
    return {
        name: ("I8", (shape[0], shape[1] // 2)),
        scale: ("F8_E8M0", (shape[0], shape[1] // GROUP)),
    }


def _mxfp4(name: str, shape: Shape) -> Layout | None:
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return None
    experts, inputs, outputs = shape  # in memory; in the file rows are outputs
    groups = (experts, outputs, inputs // GROUP)
    return {f"{name}_blocks": ("U8", (*groups, GROUP // 2)), f"{name}_scales": ("U8", groups)}


def _int4(name: str, shape: Shape) -> Layout | None:
    if not EXPERT.search(name):
        return None
    packed = {f"{name}_packed": ("I32", (shape[0], shape[1] // 8)), f"{name}_shape": ("I64", (2,))}
    return {**packed, f"{name}_scale": ("BF16", (shape[0], shape[1] // GROUP))}


def _gptq(name: str, shape: Shape) -> Layout | None:
    return _packed(name, shape, (shape[1] // 8, shape[0]), numbers={"g_idx": ("I32", (shape[1],))})


def _awq(name: str, shape: Shape) -> Layout | None:
    return _packed(name, shape, (shape[1], shape[0] // 8), numbers={})


def _packed(name: str, shape: Shape, words: Shape, numbers: Layout) -> Layout | None:
    """Eight codes are a word; words lie as inputs by outputs."""
    if not LINEAR.search(name):
        return None
    outputs = shape[0]
    groups = -(-shape[1] // PACKED_GROUP)
    parts = {
        "qweight": ("I32", words),
        "qzeros": ("I32", (groups, outputs // 8)),
        "scales": ("F16", (groups, outputs)),
    }
    return {
        name.removesuffix("weight") + part: stored for part, stored in (parts | numbers).items()
    }


FORMS: Mapping[str, Callable[[str, Shape], Layout | None]] = {
    "bf16": _plain,
    "fp8 in blocks": _blocks,
    "fp8 per tensor": _tensors,
    "fp4 experts, fp8": _fp4,
    "mxfp4": _mxfp4,
    "int4 experts": _int4,
    "gptq": _gptq,
    "awq": _awq,
}
