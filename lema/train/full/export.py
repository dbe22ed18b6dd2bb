"""Writes a model whose own weights were trained, as a directory that any `transformers` program loads."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from lema.convert.delta import DELTA_NAME, FORMAT, STEM, DeltaFile
from lema.convert.hubformat import rewritten_config, tensor_specs, write_model, write_shards
from lema.convert.tensors import bytes_of, cast_pieces
from lema.storage.atomic import appearing, free_directory, replace_file
from lema.storage.verify import base_fingerprint
from lema.train.full.training import FullTraining
from lema.train.model import LemaModel

__all__ = ["save_delta", "save_trained"]


def _pieces(model: LemaModel, training: FullTraining, name: str) -> Iterable[memoryview]:
    """Return the bytes of a weight: of one that trains from its master, of another from where it lies."""
    dtype, master = model.dtypes[name], training.masters.get(name)
    return cast_pieces(model.records[name], dtype) if master is None else [bytes_of(master.detach().to("cpu", dtype))]


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
    pieces, changes = partial(_pieces, model, training), rewritten_config(model.config.dtype)
    return write_model(out, specs, max_shard_size, pieces, model.directory, changes, code=model.trusted)


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
    base = config.model_name_or_path, config.revision, config.gbi_path, base_fingerprint(model.gbi)
    about = DeltaFile(FORMAT, *base, config.dtype, [name for name, _, _ in specs])

    with appearing(out) as part, torch.no_grad():
        write_shards(part, specs, max_shard_size, partial(_pieces, model, training), STEM)
        replace_file(part / DELTA_NAME, (json.dumps(asdict(about), indent=2) + "\n").encode())
    return out
