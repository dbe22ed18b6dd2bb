"""Tensors on their way from one checkpoint into another: read, cast, and laid out as bytes;
small files are copied.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lema.convert.mergemark import MERGE_NAME
from lema.errors import ModelError
from lema.model.outer_weights import read_stored
from lema.model.sequence.rope import SETTING, with_rope
from lema.storage import TensorFile
from lema.storage.atomic import replace_file
from lema.storage.header import TensorRecord
from lema.storage.index import ASSEMBLED, PREPARED_MARK, WEIGHTS_KEY
from lema.storage.modelfiles import CODE, COMPANIONS, MAX_BYTES, TEMPLATES
from lema.storage.quantized.records import QuantizedRecord, Stored
from lema.storage.regular import read_regular
from lema.storage.slices import AssembledRecord
from lema.storage.tensorfile import read_into, read_pieces
from lema.stream.placement import DTYPES

__all__ = ["bytes_of", "cast_pieces", "read_tensor", "stored_name", "write_cast", "write_config"]

METADATA = {"format": "pt", PREPARED_MARK: ASSEMBLED}  # of a file in the assembled form
STORED_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def read_tensor(record: Stored, dtype: torch.dtype) -> Tensor:
    """Return the whole tensor in memory, as `dtype`; expanded, where it is quantised. `ReadError`:
    its bytes could not be read; `ModelError`: it is stored in a form no model computes with."""
    for part in records_of(record):
        _torch_dtype(part)
    return read_stored(record, dtype)


def records_of(record: Stored) -> Iterable[TensorRecord]:
    """Return the stored tensors that a tensor is made of."""
    if isinstance(record, QuantizedRecord):
        return [leaf for part in record.parts.values() for leaf in records_of(part)]
    return (
        [piece.record for piece in record.pieces]
        if isinstance(record, AssembledRecord)
        else [record]
    )


def cast_pieces(record: Stored, dtype: torch.dtype) -> Iterator[memoryview]:
    """Yield the tensor's bytes as `dtype`, a bounded piece at a time; each is valid until the next
    is asked for. One that is assembled or quantised comes in one piece, as it is used. Errors are
    those of `read_tensor`."""
    if not isinstance(record, TensorRecord):
        yield bytes_of(read_tensor(record, dtype))
        return
    stored = _torch_dtype(record)
    cast = torch.empty(0, dtype=dtype)
    for piece in read_pieces(record):
        if stored == dtype:
            yield piece
            continue
        items = torch.frombuffer(piece, dtype=stored)
        # the first piece is the longest
        cast = cast if cast.numel() else torch.empty(items.numel(), dtype=dtype)
        yield bytes_of(cast[: items.numel()].copy_(items))


def write_cast(out: TensorFile, name: str, record: TensorRecord, dtype: torch.dtype) -> None:
    """Write the tensor of `record` as `name`, which `out` announced with `dtype`; nothing is read
    twice or held. Errors are those of `read_tensor`, and `DiskError`: the bytes could not be
    written."""
    if _torch_dtype(record) != dtype:
        out.write(name, cast_pieces(record, dtype))
        return
    done = 0
    for space in out.space(name):
        read_into(record, space, done)
        done += len(space)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the tensor's bytes, C-contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def stored_name(name: str, dtype: torch.dtype) -> str:
    """Return what safetensors calls `dtype`, that of the tensor `name`; a type without a name is
    a `ModelError`.
    """
    if (stored := STORED_NAMES.get(dtype)) is None:
        raise ModelError(
            f"tensor {name!r} is {dtype}, which cannot be written", where=name, how="give a dtype"
        )
    return stored


def copy_companions(directory: Path, out: Path, *, code: bool = False) -> None:
    """Copy the other small files of a model, except `config.json`, the index of its shards, and
    what says of which adapter it is the merge. The model's own code is copied as well if `code`.
    `WeightsError`: one of them is a link that leaves the directory; `DiskError`: one could not be
    written."""
    patterns = COMPANIONS + (CODE if code else ())
    files = {
        file.name: file
        for pattern in patterns
        for file in directory.glob(pattern)
        if file.is_file()
    }
    for name, file in sorted(files.items()):
        if name not in ("config.json", MERGE_NAME) and not name.endswith(".index.json"):
            replace_file(out / name, read_regular(file, MAX_BYTES, inside=True))
    for file in sorted((directory / TEMPLATES).glob("*.jinja")):
        content = read_regular(file, inside=True)
        (out / TEMPLATES).mkdir(exist_ok=True)
        replace_file(out / TEMPLATES / file.name, content)


def write_config(source: Path, out: Path, changes: Mapping[str, Any]) -> None:
    """Copy a `config.json` into the directory `out`, with `changes`: dtypes by name; None takes a
    key away, and rotary parameters are those of the text's part. What a part of the config, as that
    of the text, says of the same is changed too; where changes say how weights are quantised, no
    part says so any more. The key that names other files of weights than the usual ones is left
    out, because those that are written have the usual names.
    """
    config = json.loads(read_regular(source))
    plain: dict[str, Any] = {
        key: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
        for key, value in changes.items()
    }
    config.pop(WEIGHTS_KEY, None)
    if "dtype" in plain:
        config.pop("torch_dtype", None)  # the older name of the same key
    if "quantization_config" in plain:
        _drop_quantization(config)
    rope = plain.pop(SETTING, None)
    added = {key: value for key, value in plain.items() if value is not None and key not in config}
    written = _changed(config, plain) | added
    written = written if rope is None else with_rope(written, rope)
    replace_file(out / "config.json", (json.dumps(written, indent=2) + "\n").encode())


OF_PARTS = ("dtype", "torch_dtype", "tie_word_embeddings")


def _changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config, or a part of one, with what it says already changed."""
    changes = {**changes, **({"torch_dtype": changes["dtype"]} if "dtype" in changes else {})}
    inside = {key: value for key, value in changes.items() if key in OF_PARTS}
    changed: dict[str, Any] = {}
    for key, value in config.items():
        if key in changes:
            changed |= {} if changes[key] is None else {key: changes[key]}
        else:
            changed[key] = _changed(value, inside) if isinstance(value, dict) else value
    return changed


def _drop_quantization(config: dict[str, Any]) -> None:
    for part in config.values():
        if isinstance(part, dict):
            part.pop("quantization_config", None)
            _drop_quantization(part)


def _torch_dtype(record: TensorRecord) -> torch.dtype:
    if (dtype := DTYPES.get(record.dtype)) is None:
        what = (
            f"tensor {record.name!r} is stored as {record.dtype}, which models do not compute with"
        )
        raise ModelError(what, where=str(record.file), how="use a checkpoint that is not quantised")
    return dtype
