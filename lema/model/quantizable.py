"""The weights of a model that can be quantised, and where they would lie if they were.

A plan of a run whose base is to be quantised goes by this, before a byte is converted.
"""

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from lema.config import LemaConfig
from lema.errors import ConfigError
from lema.model.quantizers.methods import quantization_settings
from lema.model.skeleton import find_layers
from lema.storage.header import DTYPE_BITS, TensorRecord
from lema.storage.modelfiles import read_config_file
from lema.storage.quantized.formats import KINDS, LIBRARIES
from lema.storage.quantized.records import PartSpecs, QuantizedRecord, Stored
from lema.storage.tensorfile import TensorSpec, run_order
from lema.storage.verify import DTYPES

__all__ = [
    "LinearWeight",
    "QuantizedDirectory",
    "as_quantized",
    "kind_to_quantize",
    "linear_weights",
    "with_quantization",
]

STORED_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
# method in `quantization_config` -> what says that the weights are of a kind already
SAME = {"nf4": {"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"}}


@dataclass(frozen=True)
class LinearWeight:
    """The weight of a linear module, or of several experts, in a decoder layer."""

    layer: int
    name: str  # in the model
    inner: str  # in the layer
    parameter: Tensor


def linear_weights(
    model: PreTrainedModel, dtypes: Mapping[str, torch.dtype]
) -> Iterator[LinearWeight]:
    """Yield the weights of linear modules and experts in decoder layers, but for those that are
    kept in a wider type than others; `dtypes` say in which each tensor is."""
    layers_name, layers = find_layers(model)
    narrow = min(dtype.itemsize for dtype in dtypes.values() if dtype.is_floating_point)
    for number, layer in enumerate(layers):
        for inner, parameter in _weights(layer):
            name = f"{layers_name}.{number}.{inner}"
            if dtypes[name].itemsize <= narrow:
                yield LinearWeight(number, name, inner, parameter)


def _weights(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a layer's linear modules, and of experts that lie in one tensor of
    three dimensions.
    """
    for name, module in layer.named_modules():
        # as transformers marks modules that hold several experts
        experts = hasattr(module, "has_gate")
        for leaf, parameter in module.named_parameters(recurse=False):
            if (isinstance(module, nn.Linear) and leaf == "weight") or (
                experts and parameter.ndim == 3
            ):
                yield f"{name}.{leaf}", parameter


def kind_to_quantize(settings: LemaConfig, config: PreTrainedConfig, where: Path) -> str | None:
    """Return what the settings have the weights of a model quantised to; None: nothing, because
    they ask for nothing, or the weights are of that kind already.

    Args:
        settings: the settings of the run.
        config: the model's config.
        where: the model's directory, for messages.

    Raises:
        ConfigError: the weights are quantised to another kind already.
    """
    kind = settings.quantize_base
    stored = quantization_settings(config)
    if kind is None or stored is None:
        return kind
    about = stored if isinstance(stored, dict) else stored.to_dict()
    method = str(getattr(about.get("quant_method"), "value", about.get("quant_method")))
    described = {**about, "quant_method": method}
    if (same := SAME.get(kind)) and same.items() <= described.items():
        return None
    what = f"the weights of this model are quantised already, by the method {method!r}"
    how = (
        "leave quantize_base out; or write the model in the other form first: "
        f"`lema prepare {where} OUT --quantize {kind}`"
    )
    raise ConfigError(what, where=f"quantize_base: {kind}", how=how)


@dataclass(frozen=True)
class QuantizedDirectory:
    """A directory with the weights of a model in a quantised form."""

    path: Path
    kind: str  # what the weights are quantised to
    base_bytes: int  # of the weights that they were made of
    # lets others replace the directory; until then, or until this is gone, they wait
    release: Callable[[], object] = lambda: None


def with_quantization(config: PreTrainedConfig, directory: Path) -> PreTrainedConfig:
    """Return a model's config with what the `config.json` of a `directory`, which has the same
    model with quantised weights, says of these. Errors are those of `read_config_file`."""
    about = read_config_file(directory)
    quantized = deepcopy(config)
    changes = {"quantization_config": about["quantization_config"]}
    if getattr(quantized, "dtype", None) is None:
        changes["dtype"] = getattr(torch, str(about["dtype"]))
    quantized.update(changes)
    return quantized


def as_quantized(
    model: PreTrainedModel,
    records: Mapping[str, Stored],
    dtypes: Mapping[str, torch.dtype],
    kind: str,
) -> dict[str, Stored]:
    """Return where the tensors of a model would be if its linear weights were quantised: those of
    a layer one after the other. The files are those of the model, whose bytes stand for those that
    are not there yet, so that it can be timed how fast they are read.

    Args:
        model: the model, on `meta`.
        records: where its tensors are.
        dtypes: what each of its tensors is.
        kind: what linear weights are quantised to.

    Raises:
        ConfigError: the library of this kind is not installed.
    """
    library = LIBRARIES[KINDS[kind]]
    chosen = {
        weight.name
        for weight in linear_weights(model, dtypes)
        if library.takes(weight.parameter.shape)
    }
    prefix = f"{find_layers(model)[0]}."
    inside = {name: record for name, record in records.items() if name.startswith(prefix)}
    quantized = {
        name: library.specs(kind, record.shape, dtypes[name])
        for name, record in inside.items()
        if name in chosen
    }
    layers: dict[str, dict[tuple[str, str], TensorSpec]] = {}  # each by name and part
    for name, record in inside.items():
        layer = layers.setdefault(name.removeprefix(prefix).partition(".")[0], {})
        shapes: PartSpecs = {"": (dtypes[name], tuple(record.shape))}
        shapes = quantized[name][0] if name in quantized else shapes
        for part, (dtype, shape) in shapes.items():
            stored_name = library.part_name(name, part) if name in quantized else name
            layer[name, part] = (stored_name, STORED_NAMES[dtype], shape)
    largest = max(
        {record.file for record in records.values()}, key=lambda file: file.stat().st_size
    )
    places = {
        key: record
        for layer in layers.values()
        for key, record in _placed(layer, records, largest).items()
    }
    planned = dict(records)
    for name, record in inside.items():
        if name in quantized:
            shapes, about = quantized[name]
            parts = {part: places[name, part] for part in shapes}
            planned[name] = QuantizedRecord(name, KINDS[kind], parts, tuple(record.shape), about)
        else:
            planned[name] = places[name, ""]
    return planned


def _placed(
    layer: Mapping[tuple[str, str], TensorSpec], records: Mapping[str, Stored], largest: Path
) -> dict[tuple[str, str], TensorRecord]:
    """Return where the tensors of a layer lie, in the order in which they are written: one after
    the other in the `largest` file of the model; or, where that is smaller than the layer, each in
    its own file."""
    specs = sorted(layer.items(), key=lambda item: run_order(item[1]))
    sizes = [prod(shape) * DTYPE_BITS[dtype] // 8 for _, (_, dtype, shape) in specs]
    is_whole = largest.stat().st_size >= sum(sizes)
    placed: dict[tuple[str, str], TensorRecord] = {}
    offset = 0
    for (key, (name, dtype, shape)), nbytes in zip(specs, sizes, strict=True):
        file = largest if is_whole else records[key[0]].file
        placed[key] = TensorRecord(name, file, offset if is_whole else 0, nbytes, dtype, shape)
        offset += nbytes
    return placed
