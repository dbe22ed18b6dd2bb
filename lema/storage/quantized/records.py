"""A quantised parameter on disk: several stored tensors, under names of its library's choosing,
that expand to one.

The libraries that quantise and expand are imported only when a quantised model is prepared or
opened (`quiet_import`).
"""

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lema.config.printing import hushed
from lema.errors import ConfigError, WeightsError, installing
from lema.storage.header import TensorRecord
from lema.storage.index import GlobalBinaryIndex
from lema.storage.slices import AssembledRecord

__all__ = [
    "CUT",
    "NARROW",
    "STORED",
    "PartSpecs",
    "QuantizedRecord",
    "Stored",
    "collected",
    "cut_when_expanded",
    "nonsense",
    "parsed",
    "pieces",
    "quiet_import",
]

# in place of a library: one tensor, named `STORED`, of a narrower type, which is only cast
NARROW = "narrow"
STORED = "stored"


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


def cut_when_expanded(
    record: QuantizedRecord, axis: int, ranges: Sequence[tuple[int, int]]
) -> QuantizedRecord:
    """Return ranges of a parameter along an axis: it is read whole, and cut when it is expanded."""
    shape = list(record.shape)
    shape[axis] = sum(stop - start for start, stop in ranges)
    about = {**record.about, CUT: (axis, tuple(ranges), record.shape)}
    return replace(record, shape=tuple(shape), about=about)


def collected(
    index: GlobalBinaryIndex, name: str, part_names: Mapping[str, str]
) -> dict[str, TensorRecord]:
    """Return what is stored of a parameter, by what the library calls each tensor.
    `WeightsError`: one is missing."""
    if missing := [stored for stored in part_names.values() if stored not in index]:
        what = f"the quantised parameter {name!r} lacks {', '.join(missing)}"
        how = "download or prepare the model again; the copy is not complete"
        raise WeightsError(what, where=str(index.path), how=how)
    return {part: index[stored] for part, stored in part_names.items()}


def parsed(text: str | bytes, name: str, where: Path) -> dict[str, Any]:
    """Return what a library says of a parameter, as JSON. `WeightsError`: it is none."""
    try:
        about = json.loads(text)
    except ValueError as error:
        raise nonsense(name, where) from error
    if not isinstance(about, dict):
        raise nonsense(name, where)
    return about


def nonsense(name: str, where: Path) -> WeightsError:
    """Return the error of a parameter whose description makes no sense."""
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
