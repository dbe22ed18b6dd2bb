"""Writes the base model with an adapter merged into its weights, as a directory any `transformers` program loads.

The arithmetic is PEFT's own `merge` on weights lent in fp32, one adapted module at a time; every other tensor is copied
piece by piece. The whole model is never in memory, and the directory appears under its name only when it is complete.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import get_args

import torch
from peft import LoraConfig

from lema.adapter import load_weights, read_settings
from lema.adapterbase import check_base
from lema.errors import ConfigError
from lema.hubformat import appearing, free_directory, shards_of, write_shards
from lema.lora import configured_lora, inject_lora_params
from lema.merged import MergedTensors, check_mergeable, untied
from lema.rewrite import copy_companions, write_config
from lema.rounding import Rounding
from lema.skeleton import find_layers
from lema.storedmodel import StoredModel, open_stored, tensor_specs

__all__ = ["merge_adapter"]


def merge_adapter(
    adapter_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    max_shard_size: int = 5_000_000_000,
    *,
    rounding: Rounding = "nearest",
    seed: int = 0,
    trust_remote_code: bool = False,
) -> Path:
    """Write the model an adapter belongs to, with the adapter merged into its weights, in the hub's format.

    The weights have the dtype the adapter was trained with: the one its config names, else the checkpoint's. Tensors
    have the names `transformers` uses in memory. Of a quantised base the weights are expanded, and stay so.

    Args:
        adapter_dir: a saved adapter; it names its base model.
        out_dir: a new or empty directory.
        max_shard_size: bytes of the tensors of one file, at most; a larger tensor has a file to itself.
        rounding: of `W + alpha / rank B A`, which is formed in fp32, to the type of the weights. In half precision a
            change that is small beside a weight is lost by `nearest` (of one of 1e-6 in bfloat16, with weights of about
            0.02, a thirtieth is left); `stochastic` keeps it in the mean, at the cost of noise of one last place.
        seed: of stochastic rounding; the same one gives the same bits, however the files are cut.
        trust_remote_code: run code that comes with the base model.

    Raises:
        ConfigError: `out_dir` is not empty, `max_shard_size` is not positive, or there is no such `rounding`.
        AdapterError: there is no adapter, it does not fit the model, or the model has changed since it was trained.
        WeightsError: the base model is damaged, does not fit its config, or must be prepared first.
        DiskError: a file could not be written; nothing is left behind.
    """
    if rounding not in get_args(Rounding):
        raise ConfigError(
            f"there is no rounding {rounding!r}", where="rounding", how=f"choose {' or '.join(get_args(Rounding))}"
        )
    out, adapter = free_directory(out_dir, max_shard_size), Path(adapter_dir)
    base, lora = _open_base(adapter, trust_remote_code)
    specs = tensor_specs(base.skeleton, base.records, base.dtypes)
    layers_name, _ = find_layers(base.skeleton)
    model = inject_lora_params(base.skeleton, lora, torch.device("cpu"), seed=None)
    load_weights(model, adapter, layers_name)
    check_base(adapter, base.index)
    check_mergeable(base.skeleton)
    changes = dict(base.config_changes)
    if untied(base.skeleton):
        changes["tie_word_embeddings"] = False
    else:
        specs = [spec for spec in specs if spec[0] not in base.skeleton.all_tied_weights_keys]
    tensors = MergedTensors(base.skeleton, base.records, base.dtypes, rounding, seed)
    with appearing(out) as partial:
        write_shards(partial, shards_of(specs, max_shard_size), tensors)
        copy_companions(base.directory, partial, code=trust_remote_code)
        write_config(base.directory / "config.json", partial, changes)
    return out


def _open_base(adapter: Path, trust: bool) -> tuple[StoredModel, LoraConfig]:
    settings, saved = read_settings(adapter)
    base = open_stored(
        settings.model_name_or_path,
        revision=settings.revision,
        weights=settings.gbi_path,
        dtype=settings.dtype,
        trust_remote_code=trust,
    )
    return base, saved or configured_lora(base.skeleton, settings)
