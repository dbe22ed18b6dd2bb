"""Writes the base model with an adapter merged into its weights, as a directory any `transformers` program loads.

The arithmetic is PEFT's own `merge`, on one adapted module at a time; every other tensor is copied piece by piece. The
whole model is never in memory, and the directory appears under its name only when it is complete.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor
from transformers import PreTrainedModel

from lema.adapter import load_weights, read_settings
from lema.hub import own_weights, resolve_model
from lema.hubformat import appearing, free_directory, shards_of, write_shards
from lema.lora import configured_lora, inject_lora_params
from lema.merged import MergedTensors, check_mergeable, untied
from lema.names import checkpoint_dtype, match_names, target_dtypes
from lema.prepare import visit_order
from lema.quantized.records import Stored
from lema.rewrite import copy_companions, stored_name, write_config
from lema.skeleton import find_layers, meta_model, read_config
from lema.tensorfile import TensorSpec
from lema.weights import GlobalBinaryIndex

__all__ = ["merge_adapter"]


def merge_adapter(
    adapter_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    max_shard_size: int = 5_000_000_000,
    *,
    trust_remote_code: bool = False,
) -> Path:
    """Write the model an adapter belongs to, with the adapter merged into its weights, in the hub's format.

    The weights have the dtype the adapter was trained with: the one its config names, else the checkpoint's. Tensors
    have the names `transformers` uses in memory. Of a quantised base the weights are expanded, and stay so.

    Args:
        adapter_dir: a saved adapter; it names its base model.
        out_dir: a new or empty directory.
        max_shard_size: bytes of the tensors of one file, at most; a larger tensor has a file to itself.
        trust_remote_code: run code that comes with the base model.

    Raises:
        ConfigError: `out_dir` is not empty, or `max_shard_size` is not positive.
        AdapterError: there is no adapter, or it does not fit the model.
        WeightsError: the base model is damaged, does not fit its config, or must be prepared first.
        DiskError: a file could not be written; nothing is left behind.
    """
    out, adapter = free_directory(out_dir, max_shard_size), Path(adapter_dir)
    base, lora = _open_base(adapter, trust_remote_code)
    specs, (layers_name, _) = base.specs(), find_layers(base.skeleton)
    model = inject_lora_params(base.skeleton, lora, torch.device("cpu"), seed=None)
    load_weights(model, adapter, layers_name)
    check_mergeable(base.skeleton)
    changes: dict[str, Any] = {"dtype": base.dtype} if base.dtype_was_chosen else {}
    changes["quantization_config"] = None  # what was quantised is merged into expanded
    if untied(base.skeleton):
        changes["tie_word_embeddings"] = False
    else:
        specs = [spec for spec in specs if spec[0] not in base.skeleton.all_tied_weights_keys]
    tensors = MergedTensors(base.skeleton, base.records, base.dtypes)
    with appearing(out) as partial:
        write_shards(partial, shards_of(specs, max_shard_size), tensors)
        copy_companions(base.directory, partial, code=trust_remote_code)
        write_config(base.directory / "config.json", partial, changes)
    return out


@dataclass(frozen=True)
class _Base:
    """The base model as it lies on disk: its skeleton, and where each tensor is."""

    directory: Path
    skeleton: PreTrainedModel
    records: Mapping[str, Stored]
    dtypes: Mapping[str, torch.dtype]
    dtype: torch.dtype
    dtype_was_chosen: bool

    def specs(self) -> list[TensorSpec]:
        """Every tensor of the model, in the order of a forward pass, tied ones by each of their names."""
        state: dict[str, Tensor] = self.skeleton.state_dict()
        return [
            (name, stored_name(name, self.dtypes[name]), tuple(state[name].shape))
            for name in visit_order(self.skeleton)
            if name in self.records
        ]


def _open_base(adapter: Path, trust: bool) -> tuple[_Base, LoraConfig]:
    settings, saved = read_settings(adapter)
    directory = resolve_model(settings.model_name_or_path, revision=settings.revision, trust_remote_code=trust)
    config = read_config(directory, trust_remote_code=trust)
    index = GlobalBinaryIndex(settings.gbi_path or own_weights(settings.model_name_or_path, directory))
    dtype = getattr(torch, settings.dtype) if settings.dtype else checkpoint_dtype(config, index)
    skeleton = meta_model(config, dtype, trust_remote_code=trust)
    records, dtypes = match_names(skeleton, index), target_dtypes(skeleton)
    lora = saved or configured_lora(skeleton, settings)
    return _Base(directory, skeleton, records, dtypes, dtype, settings.dtype is not None), lora
