"""Writes a model whose own weights were trained, as a directory any `transformers` program loads."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch

from lema.fulltraining import FullTraining
from lema.hubformat import appearing, free_directory, shards_of, write_shards
from lema.model import LemaModel
from lema.rewrite import bytes_of, cast_pieces, copy_companions, write_config
from lema.storedmodel import rewritten_config, tensor_specs

__all__ = ["save_trained"]


def save_trained(
    model: LemaModel, training: FullTraining, out_dir: str | os.PathLike[str], max_shard_size: int = 5_000_000_000
) -> Path:
    """Write a model with the weights it has been trained to, in the hub's format.

    What trains is written from its masters, rounded to the type of the model's weights; the rest is copied, piece by
    piece, from where it is stored.

    Args:
        model: the model.
        training: what trains it.
        out_dir: a new or empty directory; it appears under its name when it is complete.
        max_shard_size: bytes of the tensors of one file, at most; a larger tensor has a file to itself.

    Raises:
        ConfigError: `out_dir` is not empty, or `max_shard_size` is not positive.
        DiskError: a file could not be written; nothing is left behind.
    """
    out = free_directory(out_dir, max_shard_size)
    skeleton, records, dtypes = model.skeleton, model.records, model.dtypes
    tied = skeleton.all_tied_weights_keys
    specs = [spec for spec in tensor_specs(skeleton, records, dtypes) if spec[0] not in tied]

    class Trained:
        def pieces(self, name: str) -> Iterable[memoryview]:
            master = training.masters.get(name)
            if master is None:
                return cast_pieces(records[name], dtypes[name])
            return [bytes_of(master.detach().to("cpu", dtypes[name]))]

    with appearing(out) as partial, torch.no_grad():
        write_shards(partial, shards_of(specs, max_shard_size), Trained())
        copy_companions(model.directory, partial, code=model.trusted)
        write_config(model.directory / "config.json", partial, rewritten_config(model.config.dtype))
    return out
