"""A model in the hub's format: opened where it lies on disk, and written again, shard by shard."""

import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from lema.convert.published import PublishedForm
from lema.convert.tensors import copy_companions, write_config
from lema.errors import WeightsError
from lema.lora.class_names import ClassNames, compare_classes, named_reader
from lema.model import meta_model, read_config
from lema.model.quantizable import with_quantization
from lema.model.sequence.rope import SETTING, RopeParameters, rope_of, set_rope
from lema.model.weight_names import NameMap, checkpoint_dtype, map_names, target_dtypes
from lema.storage import GlobalBinaryIndex, resolve_model
from lema.storage.atomic import appearing
from lema.storage.header import DTYPE_BITS
from lema.storage.hub import own_weights
from lema.storage.quantized.records import Stored
from lema.storage.tensorfile import TensorSpec, tensor_file

__all__ = [
    "StoredModel",
    "open_stored",
    "published_skeleton",
    "rewritten_config",
    "write_model",
    "write_shards",
]

SHARD_NAME = "{}-{:05}-of-{:05}.safetensors"  # the hub's, of "model"
Value = TypeVar("Value")
Pieces = Callable[[str], Iterable[memoryview]]
"""Returns the bytes of a tensor by its name; called in the order in which they are written."""


@dataclass(frozen=True)
class StoredModel:
    """A model as it lies on disk, of the class that its config names."""

    directory: Path  # with its `config.json`
    index: GlobalBinaryIndex  # its files
    skeleton: PreTrainedModel  # itself, on `meta`, without adapters
    classes: ClassNames  # what the class that trains calls its tensors
    names: NameMap  # where each of its tensors is
    # the dtype that `transformers` gives each of them, for the requested dtype
    dtypes: Mapping[str, torch.dtype]
    # what the `config.json` of a copy in these dtypes must say otherwise
    config_changes: Mapping[str, Any]

    @cached_property
    def records(self) -> Mapping[str, Stored]:
        """Where the values of each tensor are, by the names they have in memory; tied ones are
        at the same place.
        """
        return self.names.stored | {
            name: self.names.stored[source] for name, source in self.names.tied.items()
        }

    def by_own_names(self, tensors: Mapping[str, Value]) -> dict[str, Value]:
        """Return what is known by the names of the class that trains by the names of this one; of
        tensors that are tied by each name."""
        by_name = {self.classes.in_own(name): tensor for name, tensor in tensors.items()}
        for pair in self.skeleton.all_tied_weights_keys.items():
            if (
                tied := next((by_name[name] for name in pair if name in by_name), None)
            ) is not None:
                by_name |= dict.fromkeys(pair, tied)
        return by_name

    def form(self) -> PublishedForm:
        """Return how it is written again; to be asked before an adapter is attached. Of what is not
        written there is a warning."""
        form = PublishedForm(self.skeleton, self.names, self.index, self.dtypes)
        for sentence in form.sentences():
            warnings.warn(sentence, stacklevel=3)
        return form


def open_stored(
    name_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    weights: str | os.PathLike[str] | None = None,
    dtype: str | None = None,
    trust_remote_code: bool = False,
    quantized: Path | None = None,
    rope_parameters: RopeParameters | None = None,
) -> StoredModel:
    """Open a model's config and headers, of a directory, one of its files, or a hub id with its
    `revision`. `weights` says where these lie if elsewhere, and `quantized` where they lie
    quantised; `dtype` is what to write the model in, None: the checkpoint's. `rope_parameters` take
    the place of the model's. Where the files do not have all of the class that the config names,
    the class that trains is opened, with a warning.
    `WeightsError`: the model is missing or damaged, does not fit its config, or must be prepared
    first."""
    directory = resolve_model(name_or_path, revision=revision, trust_remote_code=trust_remote_code)
    config = read_config(directory, trust_remote_code=trust_remote_code)
    if rope_parameters is not None:
        set_rope(config, rope_parameters)
    index = GlobalBinaryIndex(quantized or weights or own_weights(name_or_path, directory))
    if quantized is not None:
        config = with_quantization(config, quantized)
    chosen = checkpoint_dtype(config, index, dtype)
    model, names, changes = published_skeleton(
        config, index, chosen, trust_remote_code=trust_remote_code
    )
    classes = compare_classes(model, config, trust_remote_code=trust_remote_code)
    changes = changes | rewritten_config(dtype)
    if rope_parameters is not None:
        changes[SETTING] = rope_of(config)
    return StoredModel(directory, index, model, classes, names, target_dtypes(model), changes)


def published_skeleton(
    config: PreTrainedConfig,
    index: GlobalBinaryIndex,
    dtype: torch.dtype,
    *,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, NameMap, dict[str, Any]]:
    """Return a model on `meta` of the class that its config names, where its tensors are, and what
    the config must say otherwise: where the files have only what trains, that class. What another
    class reads, which the config names or `transformers` does not know, is not unused.
    `WeightsError`: as `map_names`."""
    trains = meta_model(deepcopy(config), dtype, trust_remote_code=trust_remote_code)
    classes = compare_classes(trains, config, trust_remote_code=trust_remote_code)
    if classes.published is not None:
        model = meta_model(deepcopy(config), dtype, kind=type(classes.published))
        try:
            return model, map_names(model, index), {}
        except WeightsError as error:
            names = map_names(trains, index)
            message = (
                f"config.json names {type(model).__name__}, which these files do not have all "
                f"of ({error.what:.200})"
            )
            warnings.warn(f"{message}; what is written is a {type(trains).__name__}", stacklevel=3)
        return trains, names, {"architectures": [type(trains).__name__]}
    names = map_names(trains, index)
    reads = named_reader(config)
    ignored = [record for record in names.unused if reads(record.name)]
    unused = [record for record in names.unused if not reads(record.name)]
    return trains, replace(names, ignored=[*names.ignored, *ignored], unused=unused), {}


def rewritten_config(dtype: str | None) -> dict[str, Any]:
    """Return what the `config.json` of a rewritten model says otherwise: its dtype, where one was
    asked for, and that nothing is quantised, since what was is written expanded."""
    changes: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    return changes | {"quantization_config": None}


def write_model(
    out: Path,
    specs: Sequence[TensorSpec],
    max_shard_size: int,
    pieces: Pieces,
    source: Path,
    changes: Mapping[str, Any],
    *,
    code: bool,
    write_extra: Callable[[Path], object] = lambda _: None,
) -> Path:
    """Write a model as a directory that appears when it is complete, and return that. What else
    belongs to it is copied from the directory `source`: its own code too if `code`, and the
    `config.json` with `changes`. At last `write_extra` writes what else is to be there. A file that
    could not be written is a `DiskError`."""
    with appearing(out) as partial, torch.no_grad():
        write_shards(partial, specs, max_shard_size, pieces)
        copy_companions(source, partial, code=code)
        write_config(source / "config.json", partial, changes)
        write_extra(partial)
    return out


def write_shards(
    directory: Path,
    specs: Sequence[TensorSpec],
    max_bytes: int,
    pieces: Pieces,
    stem: str = "model",
) -> None:
    """Write tensors, in their order, into files of at most `max_bytes`; a larger one has a file to
    itself. Where there are several files, their index says which tensor is where."""
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
        name = (
            SHARD_NAME.format(stem, number, len(shards))
            if len(shards) > 1
            else f"{stem}.safetensors"
        )
        with tensor_file(directory / name, shard, {"format": "pt"}) as out:
            for tensor, _, _ in shard:
                out.write(tensor, pieces(tensor))
                weight_map[tensor] = name
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(map(_bytes, specs))}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (directory / f"{stem}.safetensors.index.json").write_text(
            text, encoding="utf-8", newline="\n"
        )


def _bytes(spec: TensorSpec) -> int:
    _, dtype, shape = spec
    return prod(shape) * DTYPE_BITS[dtype] // 8
