"""Writes a model whose own weights were trained, as a directory that any `transformers` program loads."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import torch

from lema.convert.delta import DELTA_NAME, FORMAT, STEM, DeltaFile
from lema.convert.hubformat import shards_of, write_shards
from lema.convert.storedmodel import rewritten_config, tensor_specs
from lema.convert.tensors import bytes_of, cast_pieces, copy_companions, write_config
from lema.storage.atomic import appearing, free_directory, replace_file
from lema.storage.verify import base_fingerprint
from lema.train.full.training import FullTraining
from lema.train.model import LemaModel

__all__ = ["save_delta", "save_trained"]


class _Trained:
    """Where the bytes of weights come from: of those that train from their masters, of others from where they lie."""

    def __init__(self, model: LemaModel, training: FullTraining) -> None:
        self._records, self._dtypes, self._masters = model.records, model.dtypes, training.masters

    def pieces(self, name: str) -> Iterable[memoryview]:
        dtype, master = self._dtypes[name], self._masters.get(name)
        if master is None:
            return cast_pieces(self._records[name], dtype)
        return [bytes_of(master.detach().to("cpu", dtype))]


def save_trained(
    model: LemaModel, training: FullTraining, out_dir: str | os.PathLike[str], max_shard_size: int = 5_000_000_000
) -> Path:
    """Write a model with the weights it has been trained to into a new or empty directory, in the hub's format.

    What trains is written from its masters, rounded to the type of the model's weights; the rest is copied, piece by
    piece, from where it is stored. Files hold at most `max_shard_size` bytes of tensors; a larger one has a file to
    itself. Raises `ConfigError` for another directory or size, `DiskError` where a file cannot be written; nothing is
    left behind.
    """
    out = free_directory(out_dir, max_shard_size)
    skeleton = model.skeleton
    specs = tensor_specs(skeleton, model.records, model.dtypes)
    specs = [spec for spec in specs if spec[0] not in skeleton.all_tied_weights_keys]

    with appearing(out) as partial, torch.no_grad():
        write_shards(partial, shards_of(specs, max_shard_size), _Trained(model, training).pieces)
        copy_companions(model.directory, partial, code=model.trusted)
        write_config(model.directory / "config.json", partial, rewritten_config(model.config.dtype))
    return out


def save_delta(
    model: LemaModel, training: FullTraining, out_dir: str | os.PathLike[str], max_shard_size: int = 5_000_000_000
) -> Path:
    """Write the weights that were trained, and no others, rounded from their masters to the type of the weights.

    `apply_delta` makes of it and of the base, bit for bit, what `save_trained` writes, which raises the same errors.
    """
    out = free_directory(out_dir, max_shard_size)
    specs = [spec for spec in tensor_specs(model.skeleton, model.records, model.dtypes) if spec[0] in training.masters]
    assert len(specs) == len(training.masters), "what trains is stored under one name"
    config = model.config
    about = DeltaFile(
        FORMAT,
        config.model_name_or_path,
        config.revision,
        config.gbi_path,
        base_fingerprint(model.gbi),
        config.dtype,
        [name for name, _, _ in specs],
    )

    with appearing(out) as partial, torch.no_grad():
        write_shards(partial, shards_of(specs, max_shard_size), _Trained(model, training).pieces, STEM)
        replace_file(partial / DELTA_NAME, (json.dumps(asdict(about), indent=2) + "\n").encode())
    return out
