"""The files of each rank: `model/dp_rank_00_tp_rank_TT_pp_rank_PP.pt`, a pickle with the rank's
tensors by name.

In the other form (xser) a file holds a reference instead of every tensor, and the N-th tensor is
`tensor_N.pt` in a neighbouring directory, `....pt.tensors`. Only tensors and such references are
loaded. All other objects are refused, because a pickle may run code.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lema.errors import AdapterError, WeightsError
from lema.storage.header import UNREADABLE, check_pickled

__all__ = ["find_stages", "load_rank", "rank_file"]

NAME = re.compile(r"dp_rank_00_tp_rank_(\d+)_pp_rank_(\d+)\.pt")
# the end of the full name of the only class that may be loaded
REFERENCE = ".serialization.TensorReference"


def rank_file(rank: int, stage: int = 0) -> str:
    """Return the name of the file of one rank of a pipeline stage."""
    return f"dp_rank_00_tp_rank_{rank:02}_pp_rank_{stage:02}.pt"


class Reference:
    """The reference to the tensor `tid`, which is in a separate file."""

    tid: Any = None


def find_stages(directory: Path) -> list[tuple[Path, list[Path]]]:
    """Return each pipeline stage's metadata file, and the files of its ranks in order. A checkpoint
    is a directory with `model/` and `mp_metadata_pp_rank_*.json`. `AdapterError`: a file is
    missing."""
    if (directory / "checkpoint").is_file() and not (directory / "done").is_file():
        what = "this checkpoint is incomplete: there is no file `done`"
        raise AdapterError(what, where=str(directory), how="use an earlier one, or save it again")
    files_by_stage: dict[int, dict[int, Path]] = {}
    for file in sorted((directory / "model").glob("dp_rank_*.pt")):
        if named := NAME.fullmatch(file.name):
            files_by_stage.setdefault(int(named[2]), {})[int(named[1])] = file
    if not files_by_stage:
        raise AdapterError(
            "there are no shards here",
            where=str(directory / "model"),
            how="copy the directory again",
        )
    stages = []
    ranks = 1 + max(rank for files in files_by_stage.values() for rank in files)
    for number in range(1 + max(files_by_stage)):
        files = files_by_stage.get(number, {})
        # there may be millions of ranks
        missing = next((rank for rank in range(ranks) if rank not in files), None)
        if missing is not None:
            what = f"the shard {rank_file(missing, number)} is missing"
            raise AdapterError(what, where=str(directory / "model"), how="copy it again")
        metadata = directory / f"mp_metadata_pp_rank_{number}.json"
        if not metadata.is_file():
            raise AdapterError(
                f"{metadata.name} is missing", where=str(directory), how="copy it again"
            )
        stages.append((metadata, [files[rank] for rank in range(ranks)]))
    return stages


def load_rank(file: Path) -> dict[str, Tensor]:
    """Load the tensors of one rank, by name, without running code in the file. `AdapterError`: the
    file is damaged, or holds other objects than tensors."""
    folder = file.with_name(f"{file.name}.tensors")
    content = _load(file, references=True) if folder.is_dir() else _load(file)
    if not isinstance(content, dict):
        raise AdapterError("the shard is not a table of tensors", where=str(file))
    tensors: dict[str, Tensor] = {}
    for name, value in content.items():
        if isinstance(value, Reference):
            if type(value.tid) is not int:
                what = f"a reference to the tensor {value.tid!r}"
                raise AdapterError(what, where=str(file), how="save the adapter again")
            part = folder / f"tensor_{value.tid}.pt"
            if not part.is_file():
                raise AdapterError(
                    f"{part.name} is missing", where=str(folder), how="copy the directory again"
                )
            value = _load(part)
        if not isinstance(name, str) or not isinstance(value, Tensor):
            what = f"{name!r} is not a tensor but {type(value).__name__}"
            raise AdapterError(what, where=str(file), how="save the adapter alone")
        tensors[name] = value.detach()
    return tensors


def _load(file: Path, *, references: bool = False) -> Any:
    try:
        check_pickled(file)
        asked = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        odd = [name for name in asked if not (references and name.endswith(REFERENCE))]
        if odd:
            what = (
                f"{file.name} holds objects of {', '.join(sorted(odd))}, and only tensors are "
                "loaded"
            )
            raise AdapterError(
                what, where=str(file), how="do not trust it; or save the adapter alone, as tensors"
            )
        allowed: list[Any] = [(Reference, name) for name in asked]
        with torch.serialization.safe_globals(allowed):
            return torch.load(file, map_location="cpu", weights_only=True)
    except WeightsError as error:
        raise AdapterError(error.what, where=error.where, how=error.how) from error
    except UNREADABLE as error:
        raise AdapterError(
            f"{file.name} is damaged: {error}", where=str(file), how="copy it again"
        ) from error
