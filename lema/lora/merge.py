"""Merges an adapter into the weights it adapts, module by module, without changing the model.

`W + alpha / rank B A` is PEFT's own arithmetic on weights lent in fp32: the sum is formed in fp32
and rounded once, to the type of the weights. Training never does this; there the two paths stay
apart, and no bit of the adapter is lost.

The rounding is to the nearest value, or stochastic. A weight drawn with a spread of 0.02 has
neighbours about 1e-4 apart in bfloat16, so rounding to the nearest nearly always loses a change of
1e-6, and with it what was trained. Stochastic rounding (Gupta et al. 2015,
https://arxiv.org/abs/1502.02551) takes neighbours such that the mean is exact.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, Literal, cast

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor, nn

from lema.errors import ConfigError

__all__ = [
    "ADAPTER",
    "OWN",
    "WRAPPED",
    "Rounding",
    "merge_lora_params",
    "merge_module",
    "rounded",
    "wrapped",
]

Rounding = Literal["nearest", "stochastic"]


def rounded(exact: Tensor, dtype: torch.dtype, rounding: Rounding, seed: int, name: str) -> Tensor:
    """Return `exact`, in fp32 for stochastic rounding, as `dtype`; other than half precision it is
    rounded to the nearest. Stochastic rounding goes up or down such that the mean is exact;
    infinite values and those beyond the largest of the type are rounded to the nearest. Random
    numbers depend on `seed`, `name` and the place in the tensor, and on nothing that was drawn
    before: a model is rounded alike in any order and in any number of files."""
    near = exact.to(dtype)
    if rounding == "nearest" or dtype not in (torch.bfloat16, torch.float16):
        return near
    missed = exact - near.to(exact.dtype)
    bits = near.view(torch.int16)
    # floating point counts in magnitudes from zero
    away = torch.signbit(missed) == torch.signbit(near)
    neighbour = torch.where(away, bits + 1, bits - 1).view(dtype)
    share = missed.abs() / (neighbour.to(exact.dtype) - near.to(exact.dtype)).abs()
    digest = blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    drawn = torch.rand(exact.shape, generator=generator, dtype=torch.float32).to(exact.device)
    taken = (missed != 0) & (drawn < share)  # NaN is less than nothing
    return torch.where(taken, neighbour, near)


ADAPTER = "default"  # PEFT's name for the only adapter
# where PEFT keeps wrapped modules
WRAPPED = re.compile(r"\.(base_layer|original_module|token_adapter)\b")
# where PEFT keeps its own parameters
OWN = re.compile(r"\.(lora_\w+|modules_to_save|trainable_tokens_\w+)\b")
Weight = Callable[[str, nn.Parameter], Tensor]
"""A weight's name in the model without adapters, and what stands for it in the module -> its
value, in its own type.
"""


def merge_lora_params(
    model: nn.Module, *, rounding: Rounding = "nearest", seed: int = 0
) -> dict[str, Tensor]:
    """Return the weights of all adapted modules with the adapter merged; the model is left as it
    is. The tensors have their names in the model without adapters; those of modules that train
    whole are among them. `ConfigError`: the adapter is merged already, or a weight is not in
    memory. `rounding`: of the sum in fp32 to the type of the weights; see `lema.lora.merge`.
    `seed`: of stochastic rounding; the same one gives the same bits."""
    merged: dict[str, Tensor] = {}
    for name, module in wrapped(model.get_base_model() if isinstance(model, PeftModel) else model):
        if any(getattr(part, "merged_adapters", ()) for part in module.modules()):
            raise ConfigError("the adapter is already merged", where=name, how="undo that first")
        dtypes = {stored: parameter.dtype for _, _, stored, parameter in _base_of(name, module)}
        merged |= merge_module(name, module, _cloned_weight, dtypes, rounding, seed)
    return merged


def merge_module(
    name: str,
    module: nn.Module,
    weight: Weight,
    dtypes: Mapping[str, torch.dtype],
    rounding: Rounding,
    seed: int,
) -> dict[str, Tensor]:
    """Lend a module of PEFT's (`wrapped`) its weights in fp32, let PEFT merge into them, and take
    them away again. PEFT changes the tensors that `weight` gives. The merged tensors are returned
    by their names in the model without adapters, rounded to the types in `dtypes`; those without
    one are as they are."""
    lent = list(_base_of(name, module))
    for part, leaf, stored, parameter in lent:
        base_weight = weight(stored, parameter)
        narrow = (
            base_weight.is_floating_point() and base_weight.dtype.itemsize < torch.float32.itemsize
        )
        part._parameters[leaf] = nn.Parameter(
            base_weight.float() if narrow else base_weight, requires_grad=False
        )
    anything: Any = module
    how: dict[str, Any] = {"merge": True, "safe_merge": False, "adapter_names": None}
    rows = (
        anything.base_layer
        if isinstance(getattr(module, "base_layer", None), TrainableTokensWrapper)
        else None
    )
    try:
        with torch.no_grad():
            # PEFT would add LoRA's product to a copy of what such a wrapper has
            if rows is not None:
                anything.base_layer = rows.unload_and_optionally_merge_module(**how)
            if hasattr(module, "unload_and_optionally_merge_module"):
                merged = anything.unload_and_optionally_merge_module(**how)
            else:
                anything.merge()
                merged = anything.get_base_layer()
        exact = {f"{name}.{leaf}": tensor.detach() for leaf, tensor in merged.state_dict().items()}
        return {
            stored: rounded(tensor, dtypes[stored], rounding, seed, stored)
            if stored in dtypes
            else tensor
            for stored, tensor in exact.items()
        }
    finally:
        if rows is not None:
            anything.base_layer = rows
        for part, leaf, _, parameter in lent:
            part._parameters[leaf] = parameter
        # PEFT must not see the module as merged, because the merged weights no longer exist.
        for adapted in module.modules():
            if hasattr(adapted, "merged_adapters"):
                cast(Any, adapted).merged_adapters.clear()
            # DoRA's, for PEFT's own way back
            getattr(adapted, "_caches", {}).pop(f"{ADAPTER}-weight_norm", None)


def wrapped(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield PEFT's outermost modules, by the names of the modules that they wrap."""
    last = ""
    for name, module in model.named_modules():
        if last and name.startswith(f"{last}."):
            continue
        if isinstance(module, LoraLayer | AuxiliaryTrainingWrapper):
            last = name
            yield name, cast(nn.Module, module)


def _base_of(name: str, module: nn.Module) -> list[tuple[nn.Module, str, str, nn.Parameter]]:
    """List the frozen weights that an adapted module has: where each is, its name without
    adapters, and itself.
    """
    if isinstance(module, ModulesToSaveWrapper):
        return []  # its trained values are final
    return [
        (part, leaf, WRAPPED.sub("", f"{inner}.{leaf}"), parameter)
        for inner, part in module.named_modules(prefix=name)
        for leaf, parameter in part._parameters.items()
        if parameter is not None and not OWN.search(f"{inner.removeprefix(name)}.{leaf}")
    ]


def _cloned_weight(stored: str, parameter: nn.Parameter) -> Tensor:
    if parameter.is_meta:
        how = "merge on disk: lema.convert.merge.merge_adapter, or `lema merge`"
        raise ConfigError(
            "the weight is not in memory, so nothing can be merged into it", where=stored, how=how
        )
    return parameter.detach().clone()
