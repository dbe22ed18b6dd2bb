"""LEMA's own adapter shards: one safetensors file for each rank, and the layout of every tensor.

The directory holds `tp_00.safetensors`, `tp_01.safetensors`, ... and `layout.json`: a version, the
number of ranks, a SHA-256 of every file, and the layout of every tensor. Every projection keeps its
own A and B.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from lema.backend.host.files import flush
from lema.backend.layout import (
    Difference,
    KvLayout,
    Layout,
    consolidate,
    differences,
    layout_from_dict,
    shard,
)
from lema.errors import AdapterError, ConfigError, DataError, ModelError, WeightsError, unreadable
from lema.lora.shards import layout_of_tensor, module_of
from lema.model.partition import layout_at, layouts_of
from lema.storage.regular import read_regular
from lema.storage.verify import load_tensors

__all__ = ["LAYOUTS", "LEMA", "join"]

LAYOUTS = "layout.json"
VERSION = 1


class _Lema:
    marks = LAYOUTS

    def read(
        self,
        directory: Path,
        config: Mapping[str, Any],
        model: nn.Module | None,  # noqa: ARG002 # of the protocol: these shards record their shapes
        kv_layout: KvLayout | None,
        *,
        check: bool,
    ) -> tuple[dict[str, Tensor], dict[str, list[Difference]], int, dict[str, Any]]:
        """Read the files of all ranks, by the layouts in the same directory."""
        if kv_layout is not None:
            raise ConfigError(
                "these shards record their layout", where="kv_layout", how="leave it out"
            )
        return *_read(directory, check=check), dict(config)

    def write(
        self,
        directory: Path,
        tensors: Mapping[str, Tensor],
        config: Mapping[str, Any],  # noqa: ARG002 # of the protocol: this format holds any adapter
        model: PreTrainedModel,
        tp: int,
        kv_layout: KvLayout,
    ) -> None:
        """Write a file for each rank. `ModelError`: the model's plan does not cover a module of
        the adapter.
        """
        plan = layouts_of(model, tp, kv_layout)
        layouts = {}
        for name, tensor in tensors.items():
            module, leaf = module_of(name)
            try:
                layouts[name] = layout_of_tensor(leaf, layout_at(module, plan), tensor.dim())
            except ModelError as error:
                raise ModelError(
                    error.what, where=f"tensor {name} of the adapter", how=error.how
                ) from error
        _write(directory, tensors, layouts, tp)


LEMA = _Lema()


def join(
    shards: Sequence[Tensor], layout: Layout, name: str, *, check: bool
) -> tuple[Tensor, list[Difference]]:
    """Put one tensor of an adapter together; return it, and the replicas that differ (none, if
    `check`). `AdapterError`: the ranks do not hold pieces of one tensor; or, if `check`, replicas
    differ."""
    try:
        return consolidate(shards, layout, check=check), [] if check else differences(
            shards, layout
        )
    except DataError as error:
        raise AdapterError(error.what, where=name, how=error.how) from error


def _write(
    directory: Path, tensors: Mapping[str, Tensor], layouts: Mapping[str, Layout], tp: int
) -> None:
    """Cut an adapter up and write its pieces, in a directory that does not exist yet.
    `ConfigError`: a tensor cannot be divided among the ranks as its layout says; `OSError`: a file
    could not be written."""
    directory.mkdir()
    hashes = {}
    for rank in range(tp):
        file = directory / f"tp_{rank:02}.safetensors"
        pieces = {name: shard(tensor, layouts[name], rank) for name, tensor in tensors.items()}
        save_file(pieces, file, metadata={"format": "pt"})
        hashes[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
        flush(file)
    described = {
        name: {"shape": list(tensor.shape), **layouts[name].to_dict()}
        for name, tensor in tensors.items()
    }
    content = {"version": VERSION, "tp": tp, "files": hashes, "tensors": described}
    (directory / LAYOUTS).write_text(
        json.dumps(content, indent=1) + "\n", encoding="utf-8", newline="\n"
    )
    flush(directory / LAYOUTS)


def _read(
    directory: Path, *, check: bool
) -> tuple[dict[str, Tensor], dict[str, list[Difference]], int]:
    """Read files of `_write`, and join them. Return the tensors, the replicas that differ (none, if
    `check`), and the number of ranks. `AdapterError`: a file is missing, damaged, or contradicts
    the layout; or, if `check`, replicas differ."""
    file = directory / LAYOUTS
    try:
        content = json.loads(read_regular(file))
    except (OSError, DataError, ValueError, RecursionError) as error:
        what = f"{file.name} cannot be read: {error}"
        raise unreadable(file, error, AdapterError, what, "save it again") from error
    if (
        isinstance(content, dict)
        and type(content.get("version")) is int
        and content["version"] > VERSION
    ):
        what = (
            f"these shards have version {content['version']} of their format, and this lema "
            f"reads {VERSION}"
        )
        raise AdapterError(what, where=str(file), how="upgrade lema")
    sound = (
        isinstance(content, dict)
        and content.get("version") == VERSION
        and type(content.get("tp")) is int
        and 1 <= content["tp"] <= 4096
        and isinstance(content.get("files"), dict)
        and isinstance(content.get("tensors"), dict)
        and all(isinstance(entry, dict) for entry in content["tensors"].values())
    )
    if not sound:
        raise AdapterError(
            f"{file.name} does not describe shards of an adapter",
            where=str(file),
            how="save it again",
        )
    layouts = {}
    shapes = {}
    for name, entry in content["tensors"].items():
        shapes[name] = entry.pop("shape", None)
        try:
            layouts[name] = layout_from_dict(entry)
        except (DataError, ConfigError) as error:
            raise AdapterError(f"{name}: {error.what}", where=str(file), how=error.how) from error
    tp = content["tp"]
    names = [f"tp_{rank:02}.safetensors" for rank in range(tp)]
    if sorted(content["files"]) != sorted(names) or any(
        layout.tp != tp for layout in layouts.values()
    ):
        raise AdapterError(f"it does not describe {tp} ranks", where=str(file), how="save it again")
    ranks = []
    for file in (directory / name for name in names):
        if not file.is_file():
            how = "copy the directory again, with all its files"
            raise AdapterError(f"the shard {file.name} is missing", where=str(file), how=how)
        try:
            if hashlib.sha256(file.read_bytes()).hexdigest() != content["files"][file.name]:
                raise AdapterError(
                    f"{file.name} is not the file that was saved",
                    where=str(file),
                    how="copy it again",
                )
            ranks.append(load_tensors(file))
        except (OSError, WeightsError) as error:
            what = (
                f"the shard {file.name} is damaged: "
                f"{error.what if isinstance(error, WeightsError) else error}"
            )
            raise unreadable(file, error, AdapterError, what, "copy it again") from error
        if odd := sorted(ranks[-1].keys() ^ layouts.keys()):
            raise AdapterError(f"it has other tensors than {LAYOUTS}: {odd[0]}", where=str(file))
    tensors = {}
    differing_by_name = {}
    for name, layout in layouts.items():
        tensors[name], differing = join(
            [rank_tensors[name] for rank_tensors in ranks], layout, name, check=check
        )
        if differing:
            differing_by_name[name] = differing
        if list(tensors[name].shape) != shapes[name]:
            raise AdapterError(
                f"{name} has the shape {list(tensors[name].shape)}, and had {shapes[name]}",
                where=name,
            )
    return tensors, differing_by_name, tp
