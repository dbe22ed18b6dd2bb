"""A folder of what towers have made: one safetensors file for each image.

A file appears whole or not at all, and has the digest of its numbers. One that is damaged counts as
absent. When the folder is full nothing more is added: what is there is read in every epoch, so that
to replace one file by another would gain nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from lema.errors import DiskError, ReadError, WeightsError
from lema.model.towers.cuts import Tree
from lema.storage.atomic import replace_file
from lema.storage.header import read_header
from lema.storage.verify import load_record

__all__ = ["TowerOutputs", "TowerStore"]

SUFFIX = ".safetensors"
DIGEST = "digest"
KIND = "kind"
TREE = "tree"


@dataclass(frozen=True)
class TowerOutputs:
    """What towers made of one image.

    Attributes:
        kind: the name of the class that it is of; empty: it is bare.
        values: tensors, or lists of them, by name.
    """

    kind: str
    values: Mapping[str, Any]


class TowerStore:
    """The outputs of towers in a folder.

    Args:
        folder: is made if need be.
        max_bytes: of all files in it.
        note: takes a sentence on what was found.

    Attributes:
        hits: outputs that were read.
        misses: outputs that were not there.
        nbytes: bytes of the files in the folder.

    Raises:
        DiskError: the folder cannot be made.
    """

    def __init__(self, folder: Path, max_bytes: int, note: Callable[[str], object]) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._note = note
        self._full = False
        self.hits = 0
        self.misses = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            how = "set tower_cache to a folder that may be written to"
            what = f"the outputs of towers cannot be kept there: {error.strerror}"
            raise DiskError(what, where=str(folder), how=how) from error
        self.nbytes = sum(_size(file) for file in folder.glob(f"*/*{SUFFIX}"))

    def read(self, key: str) -> TowerOutputs | None:
        """Return the outputs of a key, in host memory; None: they are not there, or damaged."""
        file = self._file(key)
        outputs = None
        if file.is_file():
            try:
                outputs = _read(file)
            except (ReadError, WeightsError, ValueError, LookupError, TypeError) as error:
                self._note(f"{file} is damaged and made anew: {error}")
                self._forget(file)
        self.hits += outputs is not None
        self.misses += outputs is None
        return outputs

    def write(self, key: str, outputs: TowerOutputs) -> None:
        """Keep the outputs of a key, if there is room. `DiskError`: they could not be written."""
        tensors: dict[str, Tensor] = {}
        tree = json.dumps(_described(outputs.values, tensors))
        about = f"{outputs.kind} {tree}"
        metadata = {DIGEST: _digest(about, tensors), KIND: outputs.kind, TREE: tree}
        content = save(tensors, metadata)
        file = self._file(key)
        if self.nbytes + len(content) > self._max_bytes:
            if not self._full:
                self._full = True
                what = f"{self._folder} has {self.nbytes:,} bytes, and {self._max_bytes:,} may be"
                self._note(
                    f"{what} there: what towers make of further images is not kept; raise "
                    "tower_cache_size, or delete the folder"
                )
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, content)
        self.nbytes += len(content)

    def _file(self, key: str) -> Path:
        return self._folder / key[:2] / f"{key}{SUFFIX}"

    def _forget(self, file: Path) -> None:
        self.nbytes -= _size(file)
        with suppress(FileNotFoundError):  # another process did it
            file.unlink()


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # another process replaced it
        return 0


def _read(file: Path) -> TowerOutputs:
    """Return the outputs in a file. `ReadError`, `WeightsError`, `ValueError`, `LookupError`,
    `TypeError`: it is damaged."""
    metadata, records = read_header(file)
    tensors = {name: load_record(record) for name, record in records.items()}
    about = f"{metadata[KIND]} {metadata[TREE]}"
    if metadata[DIGEST] != _digest(about, tensors):
        raise ValueError("what is in it is not what was written")
    return TowerOutputs(metadata[KIND], _restored(json.loads(metadata[TREE]), tensors))


def _digest(about: str, tensors: Mapping[str, Tensor]) -> str:
    digest = sha256(about.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _described(value: Tree, tensors: dict[str, Tensor]) -> Tree:
    """Return a tree as JSON has it, its tensors by number; these are added to `tensors`."""
    if isinstance(value, Mapping):
        return {"by_name": {name: _described(item, tensors) for name, item in value.items()}}
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_described(item, tensors) for item in value]}
    name = str(len(tensors))
    tensors[name] = value.detach().cpu().contiguous().clone()
    return name


def _restored(tree: Tree, tensors: Mapping[str, Tensor]) -> Tree:
    if isinstance(tree, str):
        return tensors[tree]
    ((kind, items),) = tree.items()
    if kind == "by_name":
        return {name: _restored(item, tensors) for name, item in items.items()}
    parts = [_restored(item, tensors) for item in items]
    return tuple(parts) if kind == "tuple" else parts
