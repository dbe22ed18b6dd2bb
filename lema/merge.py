"""Writes the base model with an adapter merged into its weights, as a directory any `transformers` program loads.

The arithmetic is PEFT's own `merge`, on one adapted module at a time; every other tensor is copied piece by piece. The
whole model is never in memory, and the directory appears under its name only when it is complete.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from lema.adapter import load_weights, read_settings
from lema.errors import ConfigError
from lema.header import DTYPE_BITS
from lema.hub import own_weights, resolve_model
from lema.lora import configured_lora, inject_lora_params
from lema.names import checkpoint_dtype, match_names, target_dtypes
from lema.prepare import visit_order
from lema.rewrite import METADATA, bytes_of, cast_pieces, copy_companions, read_tensor, stored_name, write_config
from lema.skeleton import find_layers, meta_model, read_config
from lema.tensorfile import TensorFile, TensorSpec, disk_error
from lema.weights import INDEX_NAME, SINGLE_NAME, GlobalBinaryIndex, TensorRecord

__all__ = ["merge_adapter"]

SHARD_NAME = "model-{:05}-of-{:05}.safetensors"  # the hub's


def merge_adapter(
    adapter_dir: str | os.PathLike[str], out_dir: str | os.PathLike[str], max_shard_size: int = 5_000_000_000
) -> Path:
    """Write the model an adapter belongs to, with the adapter merged into its weights, in the hub's format.

    The weights have the dtype the adapter was trained with: the one its config names, else the checkpoint's. Tensors
    have the names `transformers` uses in memory.

    Args:
        adapter_dir: a saved adapter; it names its base model.
        out_dir: a new or empty directory.
        max_shard_size: bytes of the tensors of one file, at most; a larger tensor has a file to itself.

    Raises:
        ConfigError: `out_dir` is not empty, or `max_shard_size` is not positive.
        AdapterError: there is no adapter, or it does not fit the model.
        WeightsError: the base model is damaged, does not fit its config, or must be prepared first.
        DiskError: a file could not be written; nothing is left behind.
    """
    if max_shard_size < 1:
        raise ConfigError(
            f"a file cannot hold {max_shard_size} bytes", where="max_shard_size", how="give a size such as 5GB"
        )
    out, adapter = Path(out_dir).resolve(), Path(adapter_dir)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(
            "the place for the merged model is taken", where=str(out), how="name a new or an empty directory"
        )
    base, lora = _open_base(adapter)
    specs = base.specs()
    layers_name, _ = find_layers(base.skeleton)
    model = inject_lora_params(base.skeleton, lora, torch.device("cpu"), seed=None)
    load_weights(model, adapter, layers_name)
    tensors = _MergedTensors(base)
    with _appearing(out) as partial:
        _write_shards(partial, _shards(specs, max_shard_size), tensors)
        copy_companions(base.directory, partial)
        write_config(base.directory / "config.json", partial, {"dtype": base.dtype} if base.dtype_was_chosen else {})
    return out


@dataclass(frozen=True)
class _Base:
    """The base model as it lies on disk: its skeleton, and where each tensor is."""

    directory: Path
    skeleton: PreTrainedModel
    records: Mapping[str, TensorRecord]
    dtypes: Mapping[str, torch.dtype]
    dtype: torch.dtype
    dtype_was_chosen: bool

    def specs(self) -> list[TensorSpec]:
        """Every tensor to write, in the order of a forward pass; of tied names, the one that `transformers` stores."""
        state: dict[str, Tensor] = self.skeleton.state_dict()
        return [
            (name, stored_name(name, self.dtypes[name]), tuple(state[name].shape))
            for name in visit_order(self.skeleton)
            if name in self.records and name not in self.skeleton.all_tied_weights_keys
        ]


def _open_base(adapter: Path) -> tuple[_Base, LoraConfig]:
    settings, saved = read_settings(adapter)
    directory = resolve_model(settings.model_name_or_path)
    config = read_config(directory)
    index = GlobalBinaryIndex(settings.gbi_path or own_weights(settings.model_name_or_path, directory))
    dtype = getattr(torch, settings.dtype) if settings.dtype else checkpoint_dtype(config, index)
    skeleton = meta_model(config, dtype)
    records, dtypes = match_names(skeleton, index), target_dtypes(skeleton)
    lora = saved or configured_lora(skeleton, settings)
    return _Base(directory, skeleton, records, dtypes, dtype, settings.dtype is not None), lora


class _MergedTensors:
    """The tensors of the merged model, asked for in turn; it holds those of one adapted module."""

    def __init__(self, base: _Base) -> None:
        self._base = base
        self._adapted = {
            name: module for name, module in base.skeleton.named_modules() if isinstance(module, LoraLayer)
        }
        self._module = ""
        self._merged: dict[str, Tensor] = {}

    def pieces(self, name: str) -> Iterable[memoryview]:
        """Return the bytes of one tensor."""
        module, _, leaf = name.rpartition(".")
        if module not in self._adapted:
            return cast_pieces(self._base.records[name], self._base.dtypes[name])
        if module != self._module:
            self._merged = {}  # the last module goes before the next one comes
            self._module, self._merged = module, self._merge(module)
        return [bytes_of(self._merged[leaf])]

    def _merge(self, name: str) -> dict[str, Tensor]:
        """Give a module its weights, let PEFT merge them, and take them away again."""
        module = self._adapted[name]
        layer = module.get_base_layer()
        absent = dict(layer._parameters)
        for leaf in absent:
            if (record := self._base.records.get(f"{name}.{leaf}")) is not None:
                tensor = read_tensor(record, self._base.dtypes[f"{name}.{leaf}"])
                layer._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
        with torch.no_grad():
            module.merge()
        merged = {leaf: parameter.detach() for leaf, parameter in layer._parameters.items() if parameter is not None}
        layer._parameters.update(absent)
        return merged


def _shards(specs: Iterable[TensorSpec], max_bytes: int) -> list[list[TensorSpec]]:
    """Cut the tensors, in their order, into files of at most `max_bytes`."""
    shards: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        nbytes = _bytes(spec)
        if shards[-1] and size + nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += nbytes
    return shards


def _bytes(spec: TensorSpec) -> int:
    _, dtype, shape = spec
    return prod(shape) * DTYPE_BITS[dtype] // 8


def _write_shards(directory: Path, shards: list[list[TensorSpec]], tensors: _MergedTensors) -> None:
    single = len(shards) == 1
    weight_map: dict[str, str] = {}
    for number, specs in enumerate(shards, start=1):
        file = directory / (SINGLE_NAME if single else SHARD_NAME.format(number, len(shards)))
        with TensorFile(file, specs, METADATA) as out:
            for name, _, _ in specs:
                out.write(name, tensors.pieces(name))
                weight_map[name] = file.name
    if not single:
        size = sum(_bytes(spec) for specs in shards for spec in specs)
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (directory / INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextmanager
def _appearing(directory: Path) -> Iterator[Path]:
    """Give a sibling to write into, which takes the name of `directory` at the end; on failure it goes."""
    partial = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}.partial")
    try:
        partial.mkdir(parents=True)
        yield partial
        _flush(*partial.iterdir(), partial)  # what has its name is on disk
        partial.replace(directory)
        _flush(directory.parent)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            raise disk_error(error, directory) from error
        raise


def _flush(*paths: Path) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
