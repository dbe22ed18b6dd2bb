"""The tensors of a model with its adapter merged into them, one adapted module in memory at a time.

The arithmetic is that of `lema.loramerge`: a module is lent its stored weights in fp32, PEFT merges into them, and the
sum is rounded once to the type that is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from lema.errors import AdapterError
from lema.loramerge import ADAPTER, merge_module, rounded_all, wrapped
from lema.quantized.records import Stored
from lema.rewrite import bytes_of, cast_pieces, read_tensor
from lema.rounding import Rounding

__all__ = ["MergedTensors", "check_mergeable", "untied"]


class MergedTensors:
    """The tensors of the merged model, asked for in turn; it holds those of one adapted module.

    Args:
        model: the model on `meta`, with an adapter whose values are loaded.
        records: where the model's tensors are, by the names they have without adapters.
        dtypes: what to write each of them as.
        rounding: of a sum in fp32 to these types.
        seed: of stochastic rounding.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        records: Mapping[str, Stored],
        dtypes: Mapping[str, torch.dtype],
        rounding: Rounding = "nearest",
        seed: int = 0,
    ) -> None:
        self._records, self._dtypes = records, dtypes
        self._rounding, self._seed = rounding, seed
        self._adapted = dict(wrapped(model))
        self._trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._module = ""
        self._merged: dict[str, Tensor] = {}

    def pieces(self, name: str) -> Iterable[memoryview]:
        """Return the bytes of one tensor."""
        if (module := self._owner(name)) is None:
            if name not in self._trained:
                return cast_pieces(self._records[name], self._dtypes[name])
            merged = self._trained[name].detach()
        else:
            if module != self._module:
                self._merged = {}  # the last module goes before the next one comes
                self._module, self._merged = module, self._merge(module)
            merged = self._merged[name]
        return [bytes_of(merged.to(self._dtypes[name]))]

    def _owner(self, name: str) -> str | None:
        """Return the adapted module that a tensor belongs to."""
        while name:
            name = name.rpartition(".")[0]
            if name in self._adapted:
                return name
        return None

    def _merge(self, name: str) -> dict[str, Tensor]:
        """Merge one module's adapter into its stored weights."""
        merged = merge_module(name, self._adapted[name], self._weight)
        return rounded_all(merged, self._dtypes, self._rounding, self._seed)

    def _weight(self, stored: str, parameter: nn.Parameter) -> Tensor:
        if parameter.is_meta:
            return read_tensor(self._records[stored], self._dtypes[stored])
        return parameter.detach().clone()  # a bias that was trained, or what PEFT saved beside the adapter


def check_mergeable(model: nn.Module) -> None:
    """Make sure that every adapted module can take its adapter up.

    Raises:
        AdapterError: one has no bias to take up that of B.
    """
    for name, module in wrapped(model):
        if getattr(module, "lora_bias", {}).get(ADAPTER) and cast(Any, module).get_base_layer().bias is None:
            raise AdapterError(
                "the adapter's B has a bias, and the module it adapts has none to take it up",
                where=name,
                how="keep the adapter beside the model, or train one without lora_lora_bias",
            )


def untied(model: PreTrainedModel) -> bool:
    """Whether tensors that are one in the model are no longer, once the adapter is merged."""
    adapted = dict(wrapped(model))
    for one, other in model.all_tied_weights_keys.items():
        first, second = (adapted.get(name.rpartition(".")[0]) for name in (one, other))
        if first is None and second is None:
            continue
        both = (first, second)
        tokens = all(isinstance(module, TrainableTokensWrapper) for module in both)
        if not tokens and not (_saved(first) is not None and _saved(first) is _saved(second)):
            return True
    return False


def _saved(module: nn.Module | None) -> Any:
    """The weight of a module that trains whole."""
    return module.modules_to_save[ADAPTER].weight if isinstance(module, ModulesToSaveWrapper) else None
