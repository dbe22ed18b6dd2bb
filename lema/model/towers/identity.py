"""Where the outputs of towers are kept, and what tells those of one model from another's."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Collection, Iterator
from hashlib import sha256
from importlib.metadata import version
from typing import cast

from transformers import PreTrainedModel

from lema.config import LemaConfig
from lema.config.units import memory_bytes
from lema.model.outer_weights import StoredTensors
from lema.model.skeleton import is_in
from lema.model.towers.store import TowerStore
from lema.storage.diskspace import make_private, user_cache
from lema.storage.header import TensorRecord
from lema.storage.modelfiles import parts_of
from lema.storage.quantized.records import QuantizedRecord, Stored
from lema.storage.regular import expanded
from lema.storage.slices import AssembledRecord
from lema.storage.verify import base_fingerprint

__all__ = ["open_store", "towers_identity"]

VERSION = 1  # of the files and of their keys
PROGRAMS = ("torch", "transformers")
UNSAID = ("_name_or_path", "transformers_version")  # of a config: of no number


def open_store(config: LemaConfig) -> TowerStore:
    """Return the store that the settings name. `DiskError`: it cannot be used."""
    if config.tower_cache is True:
        folder = user_cache("towers")
        make_private(folder)
    else:
        folder = expanded(cast(str, config.tower_cache)).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    most = memory_bytes(config.tower_cache_size, shutil.disk_usage(existing).total)
    return TowerStore(folder, most, lambda sentence: warnings.warn(sentence, stacklevel=2))


def towers_identity(
    model: PreTrainedModel, towers: Collection[str], stored: StoredTensors, config: LemaConfig
) -> str:
    """Return a digest of what decides the numbers that towers make of an image: the fingerprint of
    their weights, the model's config, types, the device's kind and the libraries.

    Args:
        model: the model, on `meta`.
        towers: names of their modules in it.
        stored: where its weights are.
        config: the settings.
    """
    names = [name for name in stored.records if is_in(name, towers)]
    leaves = {
        f"{name} {number}": leaf
        for name in names
        for number, leaf in enumerate(_leaves(stored.records[name]))
    }
    settings = {name: value for name, value in model.config.to_dict().items() if name not in UNSAID}
    about = {
        "version": VERSION,
        "programs": {name: version(name) for name in PROGRAMS},
        "class": type(model).__name__,
        "config": settings,
        "attention": [
            str(getattr(part, "_attn_implementation", None)) for part in parts_of(model.config)
        ],
        "weights": base_fingerprint(leaves),
        "types": {name: str(stored.dtypes[name]) for name in names},
        "device": stored.backend.device.type,
        "computing": [config.compute_dtype, config.arithmetic, config.tf32],
    }
    return sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()


def _leaves(record: Stored) -> Iterator[TensorRecord]:
    """Yield the stored tensors that a tensor is made of."""
    if isinstance(record, QuantizedRecord):
        for part in record.parts.values():
            yield from _leaves(part)
    elif isinstance(record, AssembledRecord):
        yield from (piece.record for piece in record.pieces)
    else:
        yield record
