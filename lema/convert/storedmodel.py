"""A model as it lies on disk: its skeleton on `meta`, where each of its tensors is, and the type each is written as."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lema.convert.tensors import stored_name
from lema.convert.weightsfile import visit_order
from lema.model import meta_model, read_config
from lema.model.weight_names import checkpoint_dtype, match_names, target_dtypes
from lema.storage import GlobalBinaryIndex, resolve_model
from lema.storage.hub import own_weights
from lema.storage.quantized.records import Stored
from lema.storage.tensorfile import TensorSpec

__all__ = ["StoredModel", "open_stored", "rewritten_config", "tensor_specs"]


@dataclass(frozen=True)
class StoredModel:
    """A model as it lies on disk."""

    directory: Path  # with its `config.json`
    index: GlobalBinaryIndex  # its files
    skeleton: PreTrainedModel  # itself, on `meta`, without adapters
    records: Mapping[str, Stored]  # where each of its tensors is, by the names they have in memory
    dtypes: Mapping[str, torch.dtype]  # what `transformers` makes of each of them, for the dtype asked for
    config_changes: Mapping[str, Any]  # what the `config.json` of a copy in these dtypes must say otherwise


def open_stored(
    name_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    weights: str | os.PathLike[str] | None = None,
    dtype: str | None = None,
    trust_remote_code: bool = False,
) -> StoredModel:
    """Open a model's config and headers, of a directory, one of its files, or a hub id.

    Args:
        name_or_path: of the model.
        revision: of a hub id.
        weights: the weights, where they lie elsewhere.
        dtype: to write the model in; None: the checkpoint's.
        trust_remote_code: run code that comes with it.

    Raises:
        WeightsError: the model is missing or damaged, does not fit its config, or must be prepared first.
    """
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

    Tied tensors are listed by each of their names.
    """
    state: dict[str, Tensor] = model.state_dict()
    return [
        (name, stored_name(name, dtypes[name]), tuple(state[name].shape))
        for name in visit_order(model)
        if name in records
    ]
