"""The files of the parallel library's checkpoints: one pickle for each rank and stage, which may not run code.

`model/dp_rank_00_tp_rank_TT_pp_rank_PP.pt` holds the tensors of a rank by name. Saved the other way it holds a
reference in the place of every tensor, and `tensor_N.pt` in a directory beside it, `....pt.tensors`, is the N-th. Only
tensors and such references are loaded; a file that asks for anything else is refused.
"""

from __future__ import annotations

import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lema.errors import AdapterError

__all__ = ["Stage", "find_stages", "load_rank"]

NAME = re.compile(r"dp_rank_00_tp_rank_(\d+)_pp_rank_(\d+)\.pt")
REFERENCE = ".serialization.TensorReference"  # the end of the full name of the one class that may be asked for

_UNREADABLE = (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, AttributeError, KeyError, TypeError)


@dataclass(frozen=True)
class Stage:
    """One pipeline stage: its number, the files of its ranks in their order, and what describes its tensors."""

    number: int
    files: tuple[Path, ...]
    metadata: Path


class Reference:
    """What stands in a file in the place of the tensor `tid`, which lies in a file of its own."""

    tid: Any = None


def find_stages(directory: Path) -> list[Stage]:
    """Find the files of every pipeline stage of a checkpoint.

    Args:
        directory: with `model/` and `mp_metadata_pp_rank_*.json`.

    Raises:
        AdapterError: a file is missing.
    """
    if (directory / "checkpoint").is_file() and not (directory / "done").is_file():
        raise AdapterError(
            "this checkpoint was not saved to its end: there is no file `done`",
            where=str(directory),
            how="use an earlier one, or save it again",
        )
    found: dict[int, dict[int, Path]] = {}
    for file in sorted((directory / "model").glob("dp_rank_*.pt")):
        if named := NAME.fullmatch(file.name):
            found.setdefault(int(named[2]), {})[int(named[1])] = file
    if not found:
        raise AdapterError("there are no shards here", where=str(directory / "model"), how="copy the directory again")
    stages = []
    ranks = 1 + max(rank for files in found.values() for rank in files)
    for number in range(1 + max(found)):
        files = found.get(number, {})
        if missing := [rank for rank in range(ranks) if rank not in files]:
            name = f"dp_rank_00_tp_rank_{missing[0]:02}_pp_rank_{number:02}.pt"
            raise AdapterError(f"the shard {name} is missing", where=str(directory / "model"), how="copy it again")
        metadata = directory / f"mp_metadata_pp_rank_{number}.json"
        if not metadata.is_file():
            raise AdapterError(f"{metadata.name} is missing", where=str(directory), how="copy it again")
        stages.append(Stage(number, tuple(files[rank] for rank in range(ranks)), metadata))
    return stages


def load_rank(file: Path) -> dict[str, Tensor]:
    """Load the tensors of one rank, by name; no code of the file's is run.

    Raises:
        AdapterError: the file is damaged, or holds something else than tensors.
    """
    folder = file.with_name(f"{file.name}.tensors")
    content = _load(file, references=True) if folder.is_dir() else _load(file)
    if not isinstance(content, dict):
        raise AdapterError("the shard is not a table of tensors", where=str(file))
    tensors: dict[str, Tensor] = {}
    for name, value in content.items():
        if isinstance(value, Reference):
            value = _load_tensor(folder, value.tid, file)
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise AdapterError(
                f"{name!r} is not a tensor but {type(value).__name__}", where=str(file), how="save the adapter alone"
            )
        tensors[name] = value.detach()
    return tensors


def _load_tensor(folder: Path, number: Any, file: Path) -> Any:
    if type(number) is not int:
        raise AdapterError(f"a reference to the tensor {number!r}", where=str(file), how="save the adapter again")
    part = folder / f"tensor_{number}.pt"
    if not part.is_file():
        raise AdapterError(f"{part.name} is missing", where=str(folder), how="copy the directory again")
    return _load(part)


def _load(file: Path, *, references: bool = False) -> Any:
    try:
        asked = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        odd = [name for name in asked if not (references and name.endswith(REFERENCE))]
        if odd:
            raise AdapterError(
                f"{file.name} holds objects of {', '.join(sorted(odd))}, and only tensors are loaded",
                where=str(file),
                how="do not trust it; or save the adapter alone, as tensors",
            )
        known: list[Any] = [(Reference, name) for name in asked]
        with torch.serialization.safe_globals(known):
            return torch.load(file, map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        raise AdapterError(f"{file.name} is damaged: {error}", where=str(file), how="copy it again") from error
