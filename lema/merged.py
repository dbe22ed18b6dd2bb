"""The tensors of a model with its adapter merged into them, one adapted module in memory at a time.

The arithmetic is PEFT's own: a module is lent its stored weights, PEFT merges into them, and they are taken away again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from peft.tuners.lora import LoraLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from lema.errors import AdapterError
from lema.quantized.records import Stored
from lema.rewrite import bytes_of, cast_pieces, read_tensor

__all__ = ["MergedTensors", "check_mergeable", "untied"]

ADAPTER = "default"  # PEFT's name for the only adapter
WRAPPED = re.compile(r"\.(base_layer|original_module|token_adapter)\b")  # where PEFT keeps what it wraps


class MergedTensors:
    """The tensors of the merged model, asked for in turn; it holds those of one adapted module.

    Args:
        model: the model on `meta`, with an adapter whose values are loaded.
        records: where the model's tensors are, by the names they have without adapters.
        dtypes: what to write each of them as.
    """

    def __init__(
        self, model: PreTrainedModel, records: Mapping[str, Stored], dtypes: Mapping[str, torch.dtype]
    ) -> None:
        self._records, self._dtypes = records, dtypes
        self._wrapped = dict(_wrapped(model))
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
            if name in self._wrapped:
                return name
        return None

    def _merge(self, name: str) -> dict[str, Tensor]:
        """Lend a module its weights, let PEFT merge them, and take them away again."""
        module: Any = self._wrapped[name]
        absent = []
        for inner, part in module.named_modules(prefix=name):
            for leaf, parameter in part._parameters.items():
                if parameter is not None and parameter.is_meta and not isinstance(module, ModulesToSaveWrapper):
                    absent.append((part, leaf, parameter, WRAPPED.sub("", f"{inner}.{leaf}")))
        for part, leaf, _, stored in absent:
            tensor = read_tensor(self._records[stored], self._dtypes[stored])
            part._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
        with torch.no_grad():
            if hasattr(module, "unload_and_optionally_merge_module"):
                merged = module.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
            else:
                module.merge()
                merged = module.get_base_layer()
        tensors = {f"{name}.{leaf}": tensor for leaf, tensor in merged.state_dict().items()}
        for part, leaf, parameter, _ in absent:
            part._parameters[leaf] = parameter
        return tensors


def check_mergeable(model: nn.Module) -> None:
    """Make sure that every adapted module can take its adapter up.

    Raises:
        AdapterError: one has no bias to take up that of B.
    """
    for name, module in _wrapped(model):
        if getattr(module, "lora_bias", {}).get(ADAPTER) and cast(Any, module).get_base_layer().bias is None:
            raise AdapterError(
                "the adapter's B has a bias, and the module it adapts has none to take it up",
                where=name,
                how="keep the adapter beside the model, or train one without lora_lora_bias",
            )


def untied(model: PreTrainedModel) -> bool:
    """Whether tensors that are one in the model are no longer, once the adapter is merged."""
    wrapped = dict(_wrapped(model))
    for one, other in model.all_tied_weights_keys.items():
        first, second = (wrapped.get(name.rpartition(".")[0]) for name in (one, other))
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


def _wrapped(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield PEFT's outermost modules, by the names of what they wrap."""
    last = ""
    for name, module in model.named_modules():
        if last and name.startswith(f"{last}."):
            continue
        if isinstance(module, LoraLayer | AuxiliaryTrainingWrapper):
            last = name
            yield name, cast(nn.Module, module)
