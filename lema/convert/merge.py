"""Writes the base model with an adapter merged into its weights, as a directory that any
`transformers` program loads.

The arithmetic is PEFT's own `merge` on weights lent in fp32, one adapted module at a time
(`lema.lora.merge`); the sum is rounded once, to the type that is written. Every other tensor is
copied piece by piece. The whole model is never in memory, and the directory appears under its name
only when it is complete.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast, get_args

import torch
from peft.tuners.lora import LoraLayer
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from lema.convert.adapted import open_adapter
from lema.convert.hubformat import StoredModel, write_model
from lema.convert.mergemark import adapter_fingerprint, write_merge
from lema.convert.tensors import read_tensor
from lema.errors import AdapterError, ConfigError
from lema.lora.merge import ADAPTER, Rounding, merge_module, wrapped
from lema.storage.atomic import free_directory
from lema.storage.regular import check_separate
from lema.storage.rendering import carry_rendering

__all__ = ["merge_adapter", "untied"]


class MergedTensors:
    """The tensors of the merged model that training changed, asked for in turn; it holds those of
    one adapted module. The skeleton of `base` has an adapter whose values are loaded."""

    def __init__(self, base: StoredModel, rounding: Rounding, seed: int) -> None:
        self._records = base.records
        self._dtypes = base.dtypes
        model = base.skeleton
        self._how = (rounding, seed)
        self._adapted = dict(wrapped(model))
        # Frozen ones that are in memory are of the adapter's file, too.
        self._trained = {
            name: parameter for name, parameter in model.named_parameters() if not parameter.is_meta
        }
        self._module = ""
        self._merged: dict[str, Tensor] = {}

    def changed(self, name: str) -> bool:
        """Whether a tensor has other values than the stored ones."""
        return name in self._trained or self._owner(name) is not None

    def value(self, name: str) -> Tensor:
        """Return a tensor that changed, in the type that is written."""
        if (module := self._owner(name)) is None:
            return self._trained[name].detach().to(self._dtypes[name])
        if module != self._module:
            self._merged = {}  # so that two modules are never in memory at once
            self._merged = merge_module(
                module, self._adapted[module], self._weight, self._dtypes, *self._how
            )
            self._module = module
        return self._merged[name].to(self._dtypes[name])

    def _owner(self, name: str) -> str | None:
        """Return the adapted module that a tensor belongs to."""
        while name:
            name = name.rpartition(".")[0]
            if name in self._adapted:
                return name
        return None

    def _weight(self, stored: str, parameter: nn.Parameter) -> Tensor:
        if parameter.is_meta:
            return read_tensor(self._records[stored], self._dtypes[stored])
        # a trained bias, or a module that PEFT saved with the adapter
        return parameter.detach().clone()


def check_mergeable(model: nn.Module) -> None:
    """Make sure that every adapter can be merged into its module. `AdapterError`: a module has no
    bias into which B's could be merged."""
    for name, module in wrapped(model):
        if (
            getattr(module, "lora_bias", {}).get(ADAPTER)
            and cast(Any, module).get_base_layer().bias is None
        ):
            what = "the adapter's B has a bias, but the adapted module has none to merge it into"
            how = "keep the adapter separate, or train one without lora_lora_bias"
            raise AdapterError(what, where=name, how=how)


def untied(model: PreTrainedModel) -> bool:
    """Whether tensors that are one in the model are no longer, once the adapter is merged."""
    return any(not _alike(model, *pair) for pair in model.all_tied_weights_keys.items())


def _alike(model: nn.Module, *names: str) -> bool:
    """Whether two tensors that are one are still so when the modules that have them are merged,
    if they are adapted.
    """
    first, second = (model.get_submodule(name.rpartition(".")[0]) for name in names)
    if isinstance(first, TrainableTokensWrapper) and isinstance(second, TrainableTokensWrapper):
        # Only rows that PEFT ties are the same ones; those of a map with other rows are two
        # adapters.
        rows = first.token_adapter, second.token_adapter
        return rows[0].tied_adapter is rows[1] or rows[1].tied_adapter is rows[0]
    if any(isinstance(module, LoraLayer | TrainableTokensWrapper) for module in (first, second)):
        return False
    first_tensor, second_tensor = (
        _unadapted_tensor(module, name) for module, name in zip((first, second), names, strict=True)
    )
    if first_tensor.is_meta or second_tensor.is_meta:  # as it is stored
        return first_tensor.is_meta and second_tensor.is_meta
    return torch.equal(first_tensor, second_tensor)


def _unadapted_tensor(module: nn.Module, name: str) -> Tensor:
    """The tensor `name` in the end, of a module that has no matrices or rows of an adapter; on
    `meta`: as stored.
    """
    trained: Any = (
        module.modules_to_save[ADAPTER] if isinstance(module, ModulesToSaveWrapper) else module
    )
    tensor: Tensor = getattr(trained, name.rpartition(".")[2])
    return tensor


def merge_adapter(
    adapter_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    max_shard_size: int = 5_000_000_000,
    *,
    rounding: Rounding = "nearest",
    seed: int = 0,
    base_dir: str | os.PathLike[str] | None = None,
    trust_remote_code: bool = False,
    note: Callable[[str], object] = lambda _: None,
) -> Path:
    """Write the model an adapter belongs to, with the adapter merged into its weights, in the hub's
    format.

    The weights have the dtype the adapter was trained with: the one its config names, else the
    checkpoint's. It is of the class that its config names, with every tensor and the names of the
    base's files. Of a quantised base the weights are expanded, and stay so. `ConfigError`:
    `out_dir` is not empty, or lies in the adapter or the base, `max_shard_size` is not positive, or
    there is no such `rounding`; `AdapterError`: there is no adapter, it does not fit the model, or
    the model has changed since it was trained; `WeightsError`: the base model is damaged, does not
    fit its config, or must be prepared first; `DiskError`: a file could not be written; nothing is
    left behind.

    `adapter_dir`: a saved adapter; it names its base model. `base_dir`: where that is by now, if it
    is elsewhere. `max_shard_size`: bytes of the tensors of one file, at most; a larger tensor has a
    file to itself. `rounding`: of `W + alpha / rank B A`, which is formed in fp32, to the type of
    the weights. In half precision `nearest` loses changes that are small next to a weight (of 1e-6
    on 0.02 in bfloat16 it keeps a thirtieth); `stochastic` keeps them in the mean, at the cost of
    noise of one last place. `seed`: of stochastic rounding; the same one gives the same bits,
    however the files are cut. `note`: takes a sentence on weights that are one in the base and two
    in what is written."""
    if rounding not in get_args(Rounding):
        what = f"there is no rounding {rounding!r}"
        raise ConfigError(what, where="rounding", how=f"choose {' or '.join(get_args(Rounding))}")
    out = free_directory(out_dir, max_shard_size)
    opened = open_adapter(adapter_dir, base_dir, trust_remote_code=trust_remote_code, note=note)
    adapter = opened.directory
    base = opened.base
    check_separate(out, [adapter, base.directory])
    form = base.form()
    opened.attach()
    fingerprint = adapter_fingerprint(adapter)
    check_mergeable(base.skeleton)
    parted = untied(base.skeleton)
    changes = dict(base.config_changes) | ({"tie_word_embeddings": False} if parted else {})
    merged = MergedTensors(base, rounding, seed)
    if parted:
        note(_untied_note(base.skeleton))

    def write_companions(directory: Path) -> None:
        carry_rendering(adapter, directory)
        write_merge(directory, fingerprint)

    def pieces(name: str) -> Iterable[memoryview]:
        return form.pieces(name, merged.changed, merged.value)

    return write_model(
        out,
        form.specs(parted=parted),
        max_shard_size,
        pieces,
        base.directory,
        changes,
        code=trust_remote_code,
        write_extra=write_companions,
    )


def _untied_note(model: PreTrainedModel) -> str:
    names = sorted({name for pair in model.all_tied_weights_keys.items() for name in pair})
    return (
        f"{' and '.join(names)} are no longer one: each is written, and config.json has "
        "tie_word_embeddings: false"
    )
