"""A model in the hub's format: opened where it lies on disk, and written again, shard by shard."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lema.convert.prepare import visit_order
from lema.convert.tensors import METADATA, copy_companions, stored_name, write_config
from lema.model import meta_model, read_config
from lema.model.weight_names import checkpoint_dtype, match_names, target_dtypes
from lema.storage import GlobalBinaryIndex, resolve_model
from lema.storage.atomic import appearing
from lema.storage.header import DTYPE_BITS
from lema.storage.hub import own_weights
from lema.storage.quantized.records import Stored
from lema.storage.tensorfile import TensorSpec, tensor_file

__all__ = ["StoredModel", "open_stored", "rewritten_config", "tensor_specs", "write_model", "write_shards"]

SHARD_NAME = "{}-{:05}-of-{:05}.safetensors"  # the hub's, of "model"
Pieces = Callable[[str], Iterable[memoryview]]
"""Returns the bytes of a tensor by its name; called in the order in which they are written."""


@dataclass(frozen=True)
class StoredModel:
    """A model as it lies on disk."""

    directory: Path  # with its `config.json`
    index: GlobalBinaryIndex  # its files
    skeleton: PreTrainedModel  # itself, on `meta`, without adapters
    records: Mapping[str, Stored]  # where each of its tensors is, by the names they have in memory
    dtypes: Mapping[str, torch.dtype]  # the dtype that `transformers` gives each of them, for the requested dtype
    config_changes: Mapping[str, Any]  # what the `config.json` of a copy in these dtypes must say otherwise


def open_stored(
    name_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    weights: str | os.PathLike[str] | None = None,
    dtype: str | None = None,
    trust_remote_code: bool = False,
) -> StoredModel:
    """Open a model's config and headers, of a directory, one of its files, or a hub id with its `revision`. `weights`
    says where these lie if elsewhere; `dtype` is what to write the model in, None: the checkpoint's. `WeightsError`:
    the model is missing or damaged, does not fit its config, or must be prepared first."""
    directory = resolve_model(name_or_path, revision=revision, trust_remote_code=trust_remote_code)
    config = read_config(directory, trust_remote_code=trust_remote_code)
    index = GlobalBinaryIndex(weights or own_weights(name_or_path, directory))
    chosen = getattr(torch, dtype) if dtype else checkpoint_dtype(config, index)
    skeleton = meta_model(config, chosen, trust_remote_code=trust_remote_code)
    records, dtypes = match_names(skeleton, index), target_dtypes(skeleton)
    return StoredModel(directory, index, skeleton, records, dtypes, rewritten_config(dtype))


def rewritten_config(dtype: str | None) -> dict[str, Any]:
    """Return what the `config.json` of a rewritten model says otherwise: its dtype, where one was asked for, and that
    nothing is quantised, since what was is written expanded."""
    changes: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    return changes | {"quantization_config": None}


def tensor_specs(
    model: PreTrainedModel, records: Mapping[str, Stored], dtypes: Mapping[str, torch.dtype]
) -> list[TensorSpec]:
    """Return every stored tensor of a model without adapters in the order of a forward pass, with the type to write.
    Tied tensors are listed by each of their names."""
    state: dict[str, Tensor] = model.state_dict()
    return [
        (name, stored_name(name, dtypes[name]), tuple(state[name].shape))
        for name in visit_order(model)
        if name in records
    ]


def write_model(
    out: Path,
    specs: Sequence[TensorSpec],
    max_shard_size: int,
    pieces: Pieces,
    source: Path,
    changes: Mapping[str, Any],
    *,
    code: bool,
    beside: Callable[[Path], object] = lambda _: None,
) -> Path:
    """Write a model as a directory that appears when it is complete, and return that. What else belongs to it is copied
    from the directory `source`: its own code too if `code`, and the `config.json` with `changes`. At last `beside`
    writes what else is to be there. A file that could not be written is a `DiskError`."""
    with appearing(out) as partial, torch.no_grad():
        write_shards(partial, specs, max_shard_size, pieces)
        copy_companions(source, partial, code=code)
        write_config(source / "config.json", partial, changes)
        beside(partial)
    return out


def write_shards(
    directory: Path, specs: Sequence[TensorSpec], max_bytes: int, pieces: Pieces, stem: str = "model"
) -> None:
    """Write tensors, in their order, into files of at most `max_bytes`; a larger one has a file to itself. Where there
    are several files, their index says which tensor is where."""
    shards: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if shards[-1] and size + _bytes(spec) > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += _bytes(spec)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = SHARD_NAME.format(stem, number, len(shards)) if len(shards) > 1 else f"{stem}.safetensors"
        with tensor_file(directory / name, shard, METADATA) as out:
            for tensor, _, _ in shard:
                out.write(tensor, pieces(tensor))
                weight_map[tensor] = name
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(map(_bytes, specs))}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (directory / f"{stem}.safetensors.index.json").write_text(text, encoding="utf-8")


def _bytes(spec: TensorSpec) -> int:
    _, dtype, shape = spec
    return prod(shape) * DTYPE_BITS[dtype] // 8
