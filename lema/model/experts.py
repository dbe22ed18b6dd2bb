"""Experts whose adapted weights multiply as their parts do: the sum `W + B A` of all experts is never formed.

Where PEFT puts that sum in the place of a stacked weight while a layer runs, an object is put here, whose product is
`x W + scaling (x A) B`, by the function that the model's own code calls. docs/internals/experts.md describes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils._pytree import tree_map
from transformers.integrations import moe

__all__ = [
    "ExpertGroup",
    "LayerExperts",
    "form_no_frozen_gradients",
    "layer_experts",
    "multiply_apart",
    "stacked_weights",
]

# By name, because torch has different objects for a function and for the method that does the same.
PRODUCTS = frozenset(["linear", "matmul", "__matmul__", "mm", "bmm", "_grouped_mm", "grouped_mm_fallback"])
SPAN = "leased_experts"  # the attribute of a module of experts that says which of them it has now
SAID_OF_THE_WEIGHT = frozenset(["dtype", "device", "shape", "ndim", "dim", "size", "data_ptr", "requires_grad"])


def stacked_weights(module: nn.Module) -> list[str]:
    """Return the names of the weights in which a module holds several experts; none where `transformers` does not mark
    it as one whose computation goes through its `ExpertsInterface`."""
    marked = hasattr(module, "has_gate")
    return [name for name, one in module.named_parameters(recurse=False) if marked and one.ndim == 3]


@dataclass(frozen=True)
class ExpertGroup:
    """Experts of one layer that are leased together: their number in the stream, the first, and the one after them."""

    number: int
    first: int
    end: int


@dataclass(frozen=True)
class LayerExperts:
    """The experts of one layer, whose stacked weights may be leased in groups."""

    module: nn.Module  # which has the weights
    outer: nn.Module  # the same with its adapters around it
    weights: tuple[str, ...]  # the names in the layer of those whose first dimension are experts, without adapters
    count: int  # of experts

    @contextmanager
    def narrowed(self, group: ExpertGroup) -> Iterator[None]:
        """Have the module be one of a group of its experts in a `with` block, in which it is given their weights."""
        own = vars(self.module)
        try:
            own |= {"num_experts": group.end - group.first, SPAN: slice(group.first, group.end)}
            yield
        finally:
            own["num_experts"] = self.count
            del own[SPAN]


def layer_experts(layer: nn.Module) -> LayerExperts | None:
    """Return the experts of a layer, adapters attached or not; None: it has none that are stacked, or several times."""
    found = [(name, module) for name, module in layer.named_modules() if stacked_weights(module)]
    if len(found) != 1:
        return None
    (name, module), count = found[0], getattr(found[0][1], "num_experts", 0)
    own = {key: one for key, one in module.named_parameters(recurse=False) if one.ndim > 1}
    if not isinstance(vars(module).get("num_experts"), int) or any(len(one) != count for one in own.values()):
        return None
    plain = name.replace(".base_layer", "")
    return LayerExperts(module, layer.get_submodule(plain), tuple(f"{plain}.{key}" for key in own), count)


def multiply_apart(model: nn.Module) -> None:
    """Have the weights of a model's adapted experts, or a layer's, multiply apart from their adapters from here on."""
    for part in model.modules():
        if type(part) is ParamWrapper and part.parameter_name in stacked_weights(part.get_base_layer()):
            part.__class__ = Apart


class Apart(ParamWrapper):
    """PEFT's wrapper around a weight, whose sum with its active adapters is put in the weight's place unformed."""

    @contextmanager
    def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
        base, name = self.get_base_layer(), self.parameter_name
        found: Any = getattr(base, name)
        for adapter in filter(self.lora_A.__contains__, active_adapters):
            left, right, scaling = self.get_delta_factors(adapter)  # type: ignore[no-untyped-call] # PEFT's
            left, right = (one[vars(base).get(SPAN, slice(None))] for one in (left, right))
            if missing := -left.shape[-1] % (16 // left.element_size()):  # grouped products want rows of 16 bytes
                left, right = pad(left, (0, missing)), pad(right, (0, 0, 0, missing))
            left, right = (one if 1 in one.stride()[-2:] else one.contiguous() for one in (left, right))
            found = LowRankSum(found, left, right, scaling)
        vars(base)[name] = found  # an attribute, which is found before the parameter of that name
        try:
            yield
        finally:
            del vars(base)[name]


Apart.__name__ = ParamWrapper.__name__  # by which PEFT knows it


@dataclass(frozen=True)
class LowRankSum:
    """The sum `weight + scaling left @ right`, `[..., rows, columns]`, in the place of a tensor. What is neither a
    product with it nor a part of it is computed with the sum formed."""

    weight: Any  # a tensor, or the sum with another adapter
    left: Tensor  # [..., rows, rank]
    right: Tensor  # [..., rank, columns]
    scaling: float

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.__name__.partition(".")[0], kwargs or {}
        if not _multiplies(name, args, kwargs):
            formed: Any = tree_map(lambda one: one.formed() if isinstance(one, cls) else one, (args, kwargs))
            return func(*formed[0], **formed[1])
        one, other, *rest = args
        if isinstance(one, cls):
            return func(one.weight, other).add_(func(one.left, func(one.right, other) * one.scaling))
        whole = func(one, other.weight, *rest, **kwargs)  # added to in place, because no backward needs a product
        if name == "linear":  # its matrix is transposed, and its bias is added once
            return whole.add_(func(func(one, other.right) * other.scaling, other.left))
        small = func(one, other.left, *rest, **kwargs) * other.scaling
        return whole.add_(func(small, other.right, *rest, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.weight if name in SAID_OF_THE_WEIGHT else self.formed(), name)

    def __getitem__(self, index: Any) -> LowRankSum:
        return LowRankSum(self.weight[index], self.left[index], self.right[index], self.scaling)

    def transpose(self, dim0: int, dim1: int) -> LowRankSum | Tensor:
        """Return the sum with two dimensions exchanged; of the last two, `(W + L R)' = W' + R' L'`."""
        if {dim0 % self.ndim, dim1 % self.ndim} != {self.ndim - 2, self.ndim - 1}:
            return self.formed().transpose(dim0, dim1)
        return LowRankSum(self.weight.transpose(-2, -1), self.right.mT, self.left.mT, self.scaling)

    def formed(self) -> Tensor:
        """Return the sum as a tensor."""
        return torch.add(self.weight, self.left @ self.right, alpha=self.scaling)


def _multiplies(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call is a product of matrices, of which nothing else is asked than groups or, of a linear, a bias."""
    asked = {key for key, value in kwargs.items() if value is not None} - {"offs"}
    if name not in PRODUCTS or len(args) < 2 or min(one.ndim for one in args[:2]) < 2:
        return False
    return asked <= {"bias"} and not isinstance(args[0], LowRankSum) if name == "linear" else not asked


@cache
def form_no_frozen_gradients() -> None:
    """Have `transformers`' fallback for grouped products, where torch has none (older devices, and the CPU before torch
    2.9), form no gradient of a frozen weight: its own backward forms that of all experts."""

    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.needs_input_grad[1]:
            return moe._grouped_mm_fallback_backward(ctx, gradient)
        return torch.ops.transformers.grouped_mm_fallback(gradient, ctx.saved_tensors[1].mT, ctx.offs), None, None

    torch.library.register_autograd(
        "transformers::grouped_mm_fallback", backward, setup_context=moe._grouped_mm_fallback_setup_context
    )
