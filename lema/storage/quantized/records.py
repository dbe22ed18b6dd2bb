"""A quantised parameter on disk: several stored tensors, under names of its library's choosing,
that expand to one.

The libraries that quantise and expand are imported only when a quantised model is prepared or
opened (`quiet_import`).
"""

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lema.config.printing import hushed
from lema.errors import ConfigError, ModelError, WeightsError, installing
from lema.storage.header import TensorRecord, are_sizes
from lema.storage.index import GlobalBinaryIndex
from lema.storage.slices import AssembledRecord, part_of

__all__ = [
    "CUT",
    "NARROW",
    "STORED",
    "PartSpecs",
    "QuantizedRecord",
    "Stored",
    "fold",
    "part_of_quantized",
    "pieces",
    "quiet_import",
]

# in place of a library: one tensor, named `STORED`, of a narrower type, which is only cast
NARROW = "narrow"
STORED = "stored"
QUANT_STATE = ".quant_state.bitsandbytes__"
FLOATS = ("float32", "float16", "bfloat16")
LARGEST_STATE = 1 << 16  # bytes of bitsandbytes' state of a weight; it needs fewer than 300
TORCHAO_CLASSES = ("Int8Tensor", "Float8Tensor")

# Options of a torchao tensor with which its products differ from those of the expanded tensor.
CHANGES_PRODUCTS = ("act_quant_kwargs", "act_pre_scale")


@dataclass(frozen=True)
class QuantizedRecord:
    """One parameter that is stored quantised."""

    name: str
    library: str  # whose format it is
    # What the library calls each stored tensor -> where it is.
    parts: Mapping[str, TensorRecord | AssembledRecord]
    shape: tuple[int, ...]
    about: Mapping[str, Any]  # the library's description of the parameter, besides its tensors

    @property
    def file(self) -> Path:
        """The file of its first tensor."""
        return next(iter(self.parts.values())).file

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(part.nbytes for part in self.parts.values())


Stored = TensorRecord | AssembledRecord | QuantizedRecord
# the key of `about` for the axis and ranges that alone are used of what expands to a shape: all
# three
CUT = "cut"


def part_of_quantized(
    record: QuantizedRecord, axis: int, ranges: Sequence[tuple[int, int]]
) -> QuantizedRecord:
    """Return ranges of a quantised parameter along an axis. Of torchao's, with one scale per row,
    no more is read; what has blocks is read whole, and cut when it has been expanded. The numbers
    are those of the whole in any case."""
    shape = list(record.shape)
    shape[axis] = sum(stop - start for start, stop in ranges)
    if record.library != "torchao":
        return replace(
            record,
            shape=tuple(shape),
            about={**record.about, CUT: (axis, tuple(ranges), record.shape)},
        )
    by_row = axis < len(shape) - 1
    parts = {
        what: part_of(part, axis, ranges)
        if isinstance(part, TensorRecord) and (by_row or what == "qdata")
        else part
        for what, part in record.parts.items()
    }
    data = record.about["_data"] | {"block_size": [1] * (len(shape) - 1) + [shape[-1]]}
    return replace(record, parts=parts, shape=tuple(shape), about={**record.about, "_data": data})


def fold(index: GlobalBinaryIndex) -> dict[str, Stored]:
    """Return every tensor of an index by name, with the tensors of each quantised parameter as one.
    `WeightsError`: tensors of a quantised parameter are missing, or what is said of it makes no
    sense; `ModelError`: a parameter is quantised in a form that is not expanded here."""
    quantized = [*_torchao(index), *_bitsandbytes(index), *_bitsandbytes_int8(index)]
    parts = {part.name for record in quantized for part in record.parts.values()}
    unquantized: dict[str, Stored] = {
        name: record for name, record in index.items() if name not in parts
    }
    return unquantized | {record.name: record for record in quantized}


def _torchao(index: GlobalBinaryIndex) -> list[QuantizedRecord]:
    """Find the parameters that torchao's flattened state dicts describe in the files' metadata."""
    described: dict[str, str] = {}
    for metadata in filter(lambda entries: "tensor_names" in entries, index.metadata.values()):
        described |= {
            name: text
            for name, text in metadata.items()
            if "." in name and '"_tensor_data_names"' in text
        }
    records = []
    for name, text in described.items():
        about = _parsed(text, name, index.path)
        kind = about.get("_type")
        names = about.get("_tensor_data_names")
        data = about.get("_data")
        if not isinstance(names, list) or "qdata" not in names or not isinstance(data, dict):
            raise _nonsense(name, index.path)
        changing = [key for key in CHANGES_PRODUCTS if data.get(key) is not None or key in names]
        if kind not in TORCHAO_CLASSES or changing:
            what = f"the parameter is quantised as torchao's {kind}" + (
                f" with {changing[0]}" if changing else ""
            )
            how = "use weights that are quantised alone, to int8 or fp8, or the unquantised model"
            raise ModelError(what, where=f"{index.path}: {name}", how=how)
        owner, _, leaf = name.rpartition(".")
        parts = _collected(index, name, {part: f"{owner}._{leaf}_{part}" for part in names})
        block = data.get("block_size")
        shape = parts["qdata"].shape
        if block != [1] * (len(shape) - 1) + [*shape[-1:]] or any(
            part.shape != (*shape[:-1], 1) for what, part in parts.items() if what != "qdata"
        ):
            what = (
                f"the parameter has blocks of {block}, and only one scale per row is expanded here"
            )
            how = "quantise it by row: `lema prepare --quantize` does"
            raise ModelError(what, where=f"{index.path}: {name}", how=how)
        records.append(QuantizedRecord(name, "torchao", parts, shape, about))
    return records


def _bitsandbytes(index: GlobalBinaryIndex) -> list[QuantizedRecord]:
    """Find the parameters that have one of bitsandbytes' packed quantisation states."""
    records = []
    for stored, record in index.items():
        name, separator, kind = stored.partition(QUANT_STATE)
        if not separator:
            continue
        if record.dtype != "U8" or record.nbytes > LARGEST_STATE:
            raise _nonsense(name, index.path)
        with record.file.open("rb") as stream:
            stream.seek(record.offset)
            about = _parsed(stream.read(record.nbytes), name, index.path)
        if about.get("quant_type") != kind or not are_sizes(about.get("shape")):
            raise _nonsense(name, index.path)
        part_names = {"": name, "absmax": f"{name}.absmax", "quant_map": f"{name}.quant_map"}
        if "nested_offset" in about:
            part_names |= {part: f"{name}.{part}" for part in ("nested_absmax", "nested_quant_map")}
        parts = _collected(index, name, part_names | {f"quant_state.bitsandbytes__{kind}": stored})
        if not _fits(parts, about):
            raise _nonsense(name, index.path)
        # Codes are bytes, whatever type `bnb_4bit_quant_storage` gave them; as floats, some would
        # be called NaN.
        parts[""] = replace(parts[""], dtype="U8", shape=(parts[""].nbytes, 1))
        records.append(QuantizedRecord(name, "bitsandbytes", parts, tuple(about["shape"]), about))
    return records


def _bitsandbytes_int8(index: GlobalBinaryIndex) -> list[QuantizedRecord]:
    """Find the parameters of 8 bits that have bitsandbytes' absolute maxima of their rows."""
    records = []
    for stored, record in index.items():
        owner, _, leaf = stored.rpartition(".")
        weight = index.get(f"{owner}.weight")
        if leaf != "SCB" or weight is None or weight.dtype != "I8":
            continue
        if record.dtype != "F32" or len(weight.shape) != 2 or record.nbytes != 4 * weight.shape[0]:
            raise _nonsense(weight.name, index.path)
        parts = {"": weight, "SCB": record}
        if (layout := index.get(f"{owner}.weight_format")) is not None:
            with layout.file.open("rb") as stream:
                stream.seek(layout.offset)
                if layout.nbytes != 1 or stream.read(1) != b"\0":
                    what = (
                        "the parameter is stored in tiles, as bitsandbytes does for older devices"
                    )
                    how = (
                        "save the model again with a newer bitsandbytes, or use the unquantised one"
                    )
                    raise ModelError(what, where=f"{index.path}: {weight.name}", how=how)
            parts["weight_format"] = layout
        records.append(
            QuantizedRecord(
                weight.name, "bitsandbytes", parts, weight.shape, {"quant_type": "int8"}
            )
        )
    return records


def _fits(parts: Mapping[str, TensorRecord], about: Mapping[str, Any]) -> bool:
    """Whether tensors are as long as the library takes them to be: it does not ask, and would
    read past their ends.
    """
    block = about.get("blocksize")
    nested = about.get("nested_blocksize", 1)
    if not are_sizes([block, nested]) or 0 in (block, nested):
        return False
    if "nested_absmax" in parts and not (
        type(about["nested_offset"]) is float and about.get("nested_dtype") in FLOATS
    ):
        return False
    elements = prod(about["shape"])
    blocks = -(-elements // block)
    sizes = {
        "": (elements + 1) // 2,
        "absmax": blocks * (1 if "nested_absmax" in parts else 4),
        "quant_map": 16 * 4,
    }
    if "nested_absmax" in parts:
        sizes |= {"nested_absmax": -(-blocks // nested) * 4, "nested_quant_map": 256 * 4}
    return all(parts[part].nbytes == nbytes for part, nbytes in sizes.items())


def _collected(
    index: GlobalBinaryIndex, name: str, part_names: Mapping[str, str]
) -> dict[str, TensorRecord]:
    if missing := [stored for stored in part_names.values() if stored not in index]:
        what = f"the quantised parameter {name!r} lacks {', '.join(missing)}"
        how = "download or prepare the model again; the copy is not complete"
        raise WeightsError(what, where=str(index.path), how=how)
    return {part: index[stored] for part, stored in part_names.items()}


def _parsed(text: str | bytes, name: str, where: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except ValueError as error:
        raise _nonsense(name, where) from error
    if not isinstance(parsed, dict):
        raise _nonsense(name, where)
    return parsed


def _nonsense(name: str, where: Path) -> WeightsError:
    what = f"the metadata of the quantised parameter {name!r} does not define how to expand it"
    return WeightsError(what, where=str(where), how="download or prepare the model again")


PartSpecs = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # part -> dtype, shape

# Both libraries make temporaries of several bytes per weight: of a piece they fit a processor's
# cache, of a whole weight they would be larger than the layer. A device with thousands of cores
# wants larger pieces.
PIECE_ON_HOST = 1 << 20
PIECE_ON_DEVICE = 1 << 24  # weights


def quiet_import(module: str) -> ModuleType:
    """Import a module of one of the libraries; one that is not installed is a `ConfigError`."""
    try:
        with hushed():
            return importlib.import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        what = (
            f"the weights are quantised in the format of {library}, which cannot be imported: "
            f"{error}"
        )
        raise ConfigError(what, where=library, how=installing("quantize")) from error


def pieces(
    tensor: Tensor, units: int | None = None, elements: int | None = None, block: int = 1
) -> Iterator[slice]:
    """Cut a tensor along its first dimension, between `block`s of it; or `units` with so many
    `elements` in all.
    """
    length = tensor.shape[0] if units is None else units
    most = PIECE_ON_HOST if tensor.device.type == "cpu" else PIECE_ON_DEVICE
    size = max(1, most * length // max(elements or tensor.numel(), 1) // block) * block
    return (slice(start, min(start + size, length)) for start in range(0, length, size))
