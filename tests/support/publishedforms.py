"""Tiny models written as publishers write theirs: names of `save_pretrained`, and weights
quantised beside scales.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import packedforms
import torch
from aligned import aligned
from everytype import write_model
from libraryversions import skip_unless_expanded
from packedforms import packed
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from lema.model.skeleton import auto_class

__all__ = ["FORMS", "Form", "dequantized", "write_dequantized", "write_published"]


LINEAR = re.compile(r"layers\.\d+\..*(proj(_with_mqa)?|w[123]|w[qko](_[ab])?|wkv)\.weight$")
EXPERT = re.compile(r"layers\.\d+\..*experts\.\d+\..*\.weight$")
TOWER = re.compile(r"vision|visual")
FP8 = torch.float8_e4m3fn
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # of E2M1, without their sign
BLOCK = 128
GROUP = 32

Tensors = dict[str, Tensor]
Form = Callable[[Mapping[str, Tensor]], tuple[Tensors, dict[str, Any] | None]]


def plain(weights: Mapping[str, Tensor]) -> tuple[Tensors, None]:
    """Nothing quantised."""
    return dict(weights), None


def fused(weights: Mapping[str, Tensor]) -> tuple[Tensors, None]:
    """Experts stacked, `[experts, out, in]`, and the two that are computed side by side as one."""
    made: Tensors = {}
    parts = defaultdict[str, dict[str, list[Tensor]]](lambda: defaultdict(list))
    for name, weight in weights.items():  # as they are counted
        if expert := re.fullmatch(r"(.*\.experts)\.\d+\.(gate|up|down)_proj\.weight", name):
            parts[expert[1]][expert[2]].append(weight)
        else:
            made[name] = weight
    for name, lists in parts.items():
        stacked = {part: torch.stack(tensors) for part, tensors in lists.items()}
        made[f"{name}.gate_up_proj"] = torch.cat([stacked["gate"], stacked["up"]], dim=1)
        made[f"{name}.down_proj"] = stacked["down"]
    return made, None


def fp8_blocks(weights: Mapping[str, Tensor]) -> tuple[Tensors, dict[str, Any]]:
    """DeepSeek-V3's: a scale for each block of 128 x 128."""
    settings = {"fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
    return _each(weights, LINEAR, _blocks), {"quant_method": "fp8"} | settings


def fp8_tensors(weights: Mapping[str, Tensor]) -> tuple[Tensors, dict[str, Any]]:
    """Mistral's: a scale for each tensor, and one for its inputs."""

    def one(name: str, weight: Tensor) -> Tensors:
        scale = weight.abs().max() / torch.finfo(FP8).max
        beside = {
            f"{name}_scale_inv": scale,
            f"{name.removesuffix('weight')}activation_scale": torch.tensor(1.0),
        }
        return {name: (weight / scale).to(FP8)} | beside

    settings = {"weight_block_size": None, "activation_scheme": "static"}
    return _each(weights, LINEAR, one), {"quant_method": "fp8"} | settings


def fp4_experts(weights: Mapping[str, Tensor]) -> tuple[Tensors, dict[str, Any]]:
    """DeepSeek-V4's: experts of two E2M1 a byte with a power of two for each 32, all other
    linears fp8 in blocks.
    """

    def one(name: str, weight: Tensor) -> Tensors:
        packed, exponents = _e2m1(weight)
        scale = f"{name.removesuffix('weight')}scale"
        return {name: packed.view(torch.int8), scale: exponents.view(torch.float8_e8m0fnu)}

    def other(name: str, weight: Tensor) -> Tensors:
        made = _blocks(name, weight)
        return {name: made[name], f"{name.removesuffix('weight')}scale": made[f"{name}_scale_inv"]}

    _, settings = fp8_blocks({})
    experts = _each(
        {name: one_ for name, one_ in weights.items() if EXPERT.search(name)}, EXPERT, one
    )
    return experts | _each(
        {name: one_ for name, one_ in weights.items() if name not in experts}, LINEAR, other
    ), settings


def mxfp4(weights: Mapping[str, Tensor]) -> tuple[Tensors, dict[str, Any]]:
    """gpt-oss's: stacked experts, `[experts, in, out]` in memory, as blocks of 32 inputs and
    their exponents.
    """
    made: Tensors = {}
    for name, weight in weights.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            made[name] = weight
            continue
        packed, exponents = _e2m1(weight.transpose(1, 2).contiguous())
        made |= {
            f"{name}_blocks": packed.unflatten(-1, (-1, GROUP // 2)),
            f"{name}_scales": exponents,
        }
    return made, {"quant_method": "mxfp4"}


def int4(weights: Mapping[str, Tensor]) -> tuple[Tensors, dict[str, Any]]:
    """Kimi-K2-Thinking's: experts of eight int4 a word with a scale for each 32, by
    compressed-tensors.
    """
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    def one(name: str, weight: Tensor) -> Tensors:
        groups = weight.float().unflatten(-1, (-1, GROUP))
        scale = (groups.abs().amax(-1, keepdim=True) / 7).clamp_min(1e-6).to(torch.bfloat16)
        whole = (groups / scale).round().clamp(-8, 7).flatten(-2).to(torch.int8)
        packed = pack_to_int32(whole, 4)
        shape = torch.tensor(weight.shape, dtype=torch.int64)
        return {
            f"{name}_packed": packed,
            f"{name}_scale": scale.squeeze(-1),
            f"{name}_shape": shape,
        }

    scheme = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": GROUP,
    }
    ignore = [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ]
    return _each(weights, EXPERT, one), _compressed("pack-quantized", scheme, ignore)


def fp8_channels(weights: Mapping[str, Tensor]) -> tuple[Tensors, dict[str, Any]]:
    """What llm-compressor writes: fp8 with a scale for each row, by compressed-tensors."""

    def one(name: str, weight: Tensor) -> Tensors:
        scale = weight.float().abs().amax(1, keepdim=True) / torch.finfo(FP8).max
        return {name: (weight / scale).to(FP8), f"{name}_scale": scale.to(torch.bfloat16)}

    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    return _each(weights, LINEAR, one), _compressed("float-quantized", scheme, ["lm_head"])


def nvfp4(weights: Mapping[str, Tensor]) -> tuple[Tensors, dict[str, Any]]:
    """What llm-compressor writes for NVIDIA's devices: two E2M1 a byte, fp8 scales of 16, and
    one for the tensor.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    name_of_form = "nvfp4-pack-quantized"
    scheme = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor_group",
        "group_size": 16,
    }
    compressor = BaseCompressor.get_value_from_registry(name_of_form)
    whole = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(**scheme), format=name_of_form
    )

    def one(name: str, weight: Tensor) -> Tensors:
        largest = (torch.finfo(FP8).max * 6 / weight.float().abs().max()).reshape(1)
        scale = weight.float().unflatten(-1, (-1, 16)).abs().amax(-1) / 6 * largest
        parts = {
            "weight": weight,
            "weight_scale": scale.to(FP8).float(),
            "weight_global_scale": largest,
        }
        return {
            name.removesuffix("weight") + part: made
            for part, made in compressor.compress(parts, whole).items()
        }

    return _each(weights, LINEAR, one), _compressed(name_of_form, scheme, ["lm_head"])


def gptq(weights: Mapping[str, Tensor]) -> tuple[Tensors, dict[str, Any]]:
    """Qwen's: eight int4 a word, a scale and a zero point less one for each 128 inputs, and
    their groups' numbers.
    """
    return _each(
        weights, LINEAR, partial(packed, form=packedforms.GPTQ)
    ), packedforms.GPTQ.quantization_config


def awq(weights: Mapping[str, Tensor]) -> tuple[Tensors, dict[str, Any]]:
    """Qwen's: eight int4 a word, in the order of a kernel, with a scale and a zero point for
    each 128 inputs.
    """
    return _each(
        weights, LINEAR, partial(packed, form=packedforms.AWQ)
    ), packedforms.AWQ.quantization_config


PACKED = {"gptq": packedforms.GPTQ, "awq": packedforms.AWQ}
FORMS: Mapping[str, Form] = {
    "bf16": plain,
    "bf16, experts fused": fused,
    "fp8 in blocks": fp8_blocks,
    "fp8 per tensor": fp8_tensors,
    "fp8 per channel": fp8_channels,
    "fp4 experts, fp8": fp4_experts,
    "mxfp4": mxfp4,
    "int4 experts": int4,
    "nvfp4": nvfp4,
    "gptq": gptq,
    "awq": awq,
}


def write_published(config: PreTrainedConfig, form: str, directory: Path) -> Path:
    """Write a random model of `config` in a published form, with the config that says so.

    Its experts are wide enough for several blocks and groups.
    """
    for part in (config, config.get_text_config()):
        for size in ("intermediate_size", "moe_intermediate_size"):
            if isinstance(getattr(part, size, None), int):
                setattr(part, size, BLOCK if form in PACKED else 2 * BLOCK)
        if form in PACKED:
            part.hidden_size = BLOCK
            part.head_dim = BLOCK // 4
    write_model(config, directory, torch.bfloat16)
    weights: Tensors = {}
    for file in sorted(directory.glob("*.safetensors*")):
        stored = load_file(file) if file.suffix == ".safetensors" else {}
        # transformers writes the layers of Kimi-K2.5 under the name that only its tower has for
        # them.
        weights |= {
            name.replace("model.model.blocks.", "model.model.layers."): one
            for name, one in stored.items()
        }
        file.unlink()
    made, settings = FORMS[form](weights)
    save_file(
        {name: one.contiguous() for name, one in made.items()},
        directory / "model.safetensors",
        {"format": "pt"},
    )
    if settings is not None:
        file = directory / "config.json"
        file.write_text(
            json.dumps(json.loads(file.read_text()) | {"quantization_config": settings})
        )
    return directory


def dequantized(directory: Path) -> torch.nn.Module:
    """Load a model whole, as its own quantizer dequantises it, or a slow reader where there is
    none.

    What it leaves in bf16 is widened, which is exact.
    """
    config = AutoConfig.from_pretrained(directory)
    if settings := getattr(config, "quantization_config", None):
        if settings["quant_method"] in PACKED:
            return _read_slowly(directory, PACKED[settings["quant_method"]])
        skip_unless_expanded(settings["quant_method"])
        config.quantization_config = settings | {"dequantize": True}
    model = aligned(
        auto_class(config).from_pretrained(directory, config=config, dtype=torch.float32)
    )
    model.float().config.use_cache = False
    model.config.__dict__.pop("quantization_config", None)
    model.hf_quantizer = None
    model.is_quantized = False
    return model


def _read_slowly(directory: Path, form: packedforms.PackedForm) -> torch.nn.Module:
    """Load a model whose packed weights are read code by code, because transformers expands none
    of them.
    """
    with TemporaryDirectory() as scratch:
        plain = Path(scratch)
        config = json.loads((directory / "config.json").read_text())
        del config["quantization_config"]
        (plain / "config.json").write_text(json.dumps(config))
        weights = packedforms.expanded(load_file(directory / "model.safetensors"), form)
        save_file(
            {name: one.contiguous() for name, one in weights.items()}, plain / "model.safetensors"
        )
        return dequantized(plain)


def write_dequantized(published: Path, directory: Path) -> Path:
    """Write what a published model is dequantised to as one that is not quantised, in fp32."""
    whole = dequantized(published)
    plain = auto_class(whole.config).from_config(whole.config, dtype=torch.float32)
    plain.load_state_dict(whole.state_dict())
    plain.save_pretrained(directory)
    whole.config.save_pretrained(directory)
    return directory


def _each(
    weights: Mapping[str, Tensor],
    which: re.Pattern[str],
    quantize: Callable[[str, Tensor], Tensors],
) -> Tensors:
    made: Tensors = {}
    for name, weight in weights.items():
        wanted = which.search(name) and not TOWER.search(name) and weight.ndim == 2
        made |= quantize(name, weight) if wanted else {name: weight}
    return made


def _blocks(name: str, weight: Tensor) -> Tensors:
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    grid = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scale = (grid.abs().amax((1, 3), keepdim=True) / torch.finfo(FP8).max).clamp_min(1e-12)
    values = (grid / scale).flatten(2).flatten(0, 1)[:rows, :columns].to(FP8)
    return {name: values, f"{name}_scale_inv": scale[:, 0, :, 0]}


def _e2m1(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return two values a byte, `[..., columns / 2]`, and the exponents of each 32 of a row,
    both uint8.
    """
    groups = weight.float().unflatten(-1, (-1, GROUP))
    exponents = (groups.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 6).log2().ceil()
    scaled = groups / exponents.exp2()
    codes = (scaled.abs().unsqueeze(-1) - VALUES).abs().argmin(-1) + 8 * (scaled < 0)
    pairs = codes.flatten(-2).to(torch.uint8).unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4), (exponents.squeeze(-1) + 127).to(torch.uint8)


def _compressed(form: str, weights: dict[str, Any], ignore: list[str]) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignore,
    }
