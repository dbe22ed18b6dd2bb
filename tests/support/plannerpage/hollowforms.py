"""Checkpoints without weights, as they are published and as `lema prepare --quantize` writes them."""

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

from lema.convert.conversion import Conversion, opened_source
from lema_tools.models.checkpoints import Checkpoint
from lema_tools.models.published import (
    SETTINGS,
    SIZES,
    STORED,
    Layout,
    layout_of,
    write_headers,
    write_hollow,
)

__all__ = ["AS_PUBLISHED", "FORMS", "write_config", "write_form"]

AS_PUBLISHED = "published"
QUANTISED = ("nf4", "int8", "fp8")
FORMS = (AS_PUBLISHED, *QUANTISED)
STATE = "quant_state.bitsandbytes__nf4"


def write_form(checkpoint: Checkpoint, form: str, directory: Path) -> Path | None:
    """Write a checkpoint without its weights in a form; None: LEMA does not quantise it, because it
    is published quantised."""
    published = write_hollow(checkpoint, directory / AS_PUBLISHED)
    if form == AS_PUBLISHED:
        return published
    if SETTINGS[checkpoint.form] is not None:
        return None
    return write_quantised(published, form, directory)


def write_config(config: Mapping[str, Any], form: str, directory: Path) -> Path:
    """Write a checkpoint of a config.json without its weights in a form; they are of the number
    type that the config names, or bfloat16."""
    published = directory / AS_PUBLISHED
    opened = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    opened.dtype = getattr(torch, config.get("dtype", "bfloat16"))
    published.mkdir(parents=True, exist_ok=True)
    opened.save_pretrained(published)
    write_headers(published / "model.safetensors", _layout_in(opened.dtype, opened))
    return published if form == AS_PUBLISHED else write_quantised(published, form, directory)


def _layout_in(dtype: torch.dtype, config: PreTrainedConfig) -> Layout:
    """Return how a model is stored whose weights are of a number type."""
    layout = layout_of(config, "bf16")
    return {
        name: (STORED[dtype] if stored == STORED[torch.bfloat16] else stored, shape)
        for name, (stored, shape) in layout.items()
    }


def write_quantised(published: Path, form: str, directory: Path) -> Path:
    """Write what a checkpoint without its weights is quantised to."""
    quantised = directory / form
    quantised.mkdir(exist_ok=True)
    opened = opened_source(published, None, False)
    conversion = Conversion(opened, quantize=form, assembled=True)
    written = conversion.form
    quantizer = conversion.quantizer
    assert quantizer is not None, "the form is one of quantised weights"
    names = [name for section in conversion.sections for name in section.names]
    specs = [spec for section in conversion.sections for spec in section.specs]
    shapes = {name: list(tensor.shape) for name, tensor in opened.model.state_dict().items()}
    states = {
        f"{name}.{STATE}": _state(shapes[written.owner(name)])
        for name in quantizer.chosen
        if form == "nf4"
    }
    _write_file(quantised / "model.safetensors", specs, quantizer.metadata(names), states)
    content = json.loads((published / "config.json").read_text(encoding="utf-8"))
    settings = json.loads(json.dumps(quantizer.settings(opened.rename), default=str))
    content["quantization_config"] = settings
    (quantised / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return quantised


def _state(shape: list[int]) -> bytes:
    """Return what bitsandbytes says of a weight, without which it is not known to be quantised."""
    about = {
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": "bfloat16",
        "shape": shape,
        "nested_blocksize": 256,
        "nested_dtype": "float32",
        "nested_offset": 0.0,
    }
    return json.dumps(about).encode()


def _write_file(
    file: Path, specs: list[Any], metadata: dict[str, str], states: dict[str, bytes]
) -> None:
    """Write a header, and of what is behind it only the states."""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, dtype, shape in specs:
        begin = end
        end = end + SIZES[dtype] * prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    start = 8 + len(raw)
    with file.open("wb") as out:
        out.write(len(raw).to_bytes(8, "little") + raw)
        for name, content in states.items():
            begin, stop = header[name]["data_offsets"]
            out.seek(start + begin)
            out.write(content.ljust(stop - begin))
        out.truncate(start + end)
