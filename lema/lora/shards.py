"""An adapter in shards on disk: one safetensors file for each rank, and the layout of every tensor.

The directory `adapter_shards` holds `tp_00.safetensors`, `tp_01.safetensors`, ... and `layout.json`: a version, the
number of ranks, a SHA-256 of every file, and the layout of every tensor. An adapter's layout is derived from that of
the module it adapts. The axis of the rank is never cut, so an adapter of rank 4 lies over 8 ranks like any other.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lema.backend.layout import Difference, Layout, consolidate, differences, layout_from_dict, replicated, shard
from lema.errors import AdapterError, ConfigError, DataError
from lema.storage.atomic import flush

__all__ = ["LAYOUTS", "SHARDS", "join", "layout_of_tensor", "module_of", "read_shards", "write_shards"]

SHARDS = "adapter_shards"
LAYOUTS = "layout.json"
VERSION = 1


def join(held: Sequence[Tensor], layout: Layout, name: str, *, check: bool) -> tuple[Tensor, list[Difference]]:
    """Put one tensor of an adapter together; return it, and which replicas differ (none, if `check`). `AdapterError`:
    the ranks do not hold pieces of one tensor; or, if `check`, replicas differ."""
    try:
        return consolidate(held, layout, check=check), [] if check else differences(held, layout)
    except DataError as error:
        raise AdapterError(error.what, where=name, how=error.how) from error


def write_shards(directory: Path, tensors: Mapping[str, Tensor], layouts: Mapping[str, Layout], tp: int) -> None:
    """Cut an adapter up and write its pieces, in a directory that does not exist yet. `ConfigError`: a tensor cannot be
    divided among the ranks as its layout says; `OSError`: a file could not be written."""
    directory.mkdir()
    hashes = {}
    for rank in range(tp):
        file = directory / f"tp_{rank:02}.safetensors"
        pieces = {name: shard(tensor, layouts[name], rank) for name, tensor in tensors.items()}
        save_file(pieces, file, metadata={"format": "pt"})
        hashes[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
        flush(file)
    described = {name: {"shape": list(tensor.shape), **layouts[name].to_dict()} for name, tensor in tensors.items()}
    content = {"version": VERSION, "tp": tp, "files": hashes, "tensors": described}
    (directory / LAYOUTS).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    flush(directory / LAYOUTS)


def read_shards(directory: Path, *, check: bool) -> tuple[dict[str, Tensor], dict[str, list[Difference]], int]:
    """Read what `write_shards` wrote, and put it together. Return the tensors, which replicas of which differ (none, if
    `check`), and over how many ranks they lay. `AdapterError`: a file is missing, damaged, or not what the layout says;
    or, if `check`, replicas differ."""
    file = directory / LAYOUTS
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"{file.name} cannot be read: {error}", where=str(file), how="save it again") from error
    if isinstance(content, dict) and type(content.get("version")) is int and content["version"] > VERSION:
        what = f"these shards have version {content['version']} of their format, and this lema reads {VERSION}"
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
        raise AdapterError(f"{file.name} does not describe shards of an adapter", where=str(file), how="save it again")
    layouts, shapes = {}, {}
    for name, entry in content["tensors"].items():
        shapes[name] = entry.pop("shape", None)
        try:
            layouts[name] = layout_from_dict(entry)
        except (DataError, ConfigError) as error:
            raise AdapterError(f"{name}: {error.what}", where=str(file), how=error.how) from error
    tp = content["tp"]
    names = [f"tp_{rank:02}.safetensors" for rank in range(tp)]
    if sorted(content["files"]) != sorted(names) or any(layout.tp != tp for layout in layouts.values()):
        raise AdapterError(f"it does not describe {tp} ranks", where=str(file), how="save it again")
    ranks = []
    for file in (directory / name for name in names):
        if not file.is_file():
            how = "copy the directory again, with all its files"
            raise AdapterError(f"the shard {file.name} is missing", where=str(file), how=how)
        try:
            if hashlib.sha256(file.read_bytes()).hexdigest() != content["files"][file.name]:
                raise AdapterError(f"{file.name} is not the file that was saved", where=str(file), how="copy it again")
            ranks.append(load_file(file))
        except (OSError, SafetensorError) as error:
            what = f"the shard {file.name} is damaged: {error}"
            raise AdapterError(what, where=str(file), how="copy it again") from error
        if odd := sorted(ranks[-1].keys() ^ layouts.keys()):
            raise AdapterError(f"it has other tensors than {LAYOUTS}: {odd[0]}", where=str(file))
    tensors, found = {}, {}
    for name, layout in layouts.items():
        tensors[name], differing = join([held[name] for held in ranks], layout, name, check=check)
        if differing:
            found[name] = differing
        if list(tensors[name].shape) != shapes[name]:
            raise AdapterError(f"{name} is {list(tensors[name].shape)}, and was {shapes[name]}", where=name)
    return tensors, found, tp


PREFIX = "base_model.model."  # of names in a model of PEFT's

LEAF = re.compile(
    r"\.(lora_A\.weight|lora_B\.(?:weight|bias)|lora_embedding_[AB]|lora_magnitude_vector(?:\.weight)?"
    r"|(?:base_layer\.)?(?:weight|bias))$"
)


def module_of(name: str) -> tuple[str, str]:
    """Return the module that a tensor of PEFT's files is of, as the base model names it, and which tensor of it. A name
    of another kind is returned whole, with an empty text."""
    found = LEAF.search(name)
    if found is None or not name.startswith(PREFIX):
        return name, ""
    return name[len(PREFIX) : found.start()], found[1]


def layout_of_tensor(leaf: str, module: Layout, axes: int) -> Layout:
    """Return the layout of the tensor `leaf` of a module whose weight has the layout `module`. Column-parallel: A
    `[rank, input]` is whole on every rank, B `[output, rank]` is cut along its outputs, heads and fused parts as they
    are in the module. Row-parallel: A is cut along its inputs, B is whole. Where an embedding's vocabulary is cut, both
    are whole. A tensor with a single axis (`axes`) goes along the module's outputs."""
    whole = replicated(module.tp)
    if axes > 1 and leaf.endswith("weight") and not leaf.startswith("lora_"):
        return module  # one that trains whole
    of_a = leaf.startswith(("lora_A", "lora_embedding_A"))
    if module.kind == "embedding":  # cut along the hidden size, or else by its entries
        return whole if of_a or module.dim == 0 else replace(module, dim=0)
    along_outputs = module.dim == 0
    return whole if module.kind == "replicated" or of_a == along_outputs else module
