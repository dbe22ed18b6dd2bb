"""Experts whose adapted weights multiply as their parts do: the sum `W + B A` of all experts is never formed.

PEFT adapts the stacked weights of experts, `[experts, out, in]` or transposed, by putting `W + scaling B A` of every
expert in their place, whichever of them tokens reach, and the graph keeps that sum. The model's own code does nothing
but multiply by these weights. So while a layer runs, an object stands for the sum: a product with it is
`x W + scaling (x A) B`, each by the very function and for the groups of tokens that the model asks for. Beside the
frozen product it takes memory in proportion to tokens times rank, and to the adapter itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.integrations import moe

__all__ = ["adapted_experts", "form_no_frozen_gradients", "multiplied_apart", "stacked_weights"]

# By name, because torch has different objects for a function and for the method that does the same.
PRODUCTS = frozenset(["matmul", "__matmul__", "mm", "bmm", "_grouped_mm", "grouped_mm_fallback"])
SAID_OF_THE_WEIGHT = frozenset(["dtype", "device", "shape", "ndim", "dim", "size", "data_ptr", "requires_grad"])


def stacked_weights(module: nn.Module) -> list[str]:
    """Return the names of the weights in which a module holds several experts; none where it is no such module, as
    `transformers` marks those whose computation can be replaced (`ExpertsInterface`)."""
    marked = hasattr(module, "has_gate")
    return [name for name, one in module.named_parameters(recurse=False) if marked and one.ndim == 3]


def adapted_experts(layer: nn.Module) -> list[ParamWrapper]:
    """Return PEFT's wrappers around stacked weights of experts; others adapt their parameter as PEFT does."""
    wrappers = (part for part in layer.modules() if isinstance(part, ParamWrapper))
    return [part for part in wrappers if part.parameter_name in stacked_weights(part.get_base_layer())]


@contextmanager
def multiplied_apart(wrappers: Collection[ParamWrapper]) -> Iterator[None]:
    """Have the weights of adapted experts multiply apart from their adapters, in a `with` block."""
    for wrapper in wrappers:
        vars(wrapper)["_activate_lora"] = partial(_lent, wrapper)
    try:
        yield
    finally:
        for wrapper in wrappers:
            del vars(wrapper)["_activate_lora"]


@contextmanager
def _lent(wrapper: ParamWrapper, active: Collection[str]) -> Iterator[None]:
    """Put the sum of a weight and its active adapters in the weight's place, where PEFT would put a tensor."""
    base, name, found = wrapper.get_base_layer(), wrapper.parameter_name, wrapper.get_param()
    for adapter in active:
        if adapter in wrapper.lora_A:
            *factors, scaling = wrapper.get_delta_factors(adapter)
            found = LowRankSum(found, *_laid_out(*factors), scaling)
    vars(base)[name] = found  # an attribute, which is found before the parameter of that name
    try:
        yield
    finally:
        del vars(base)[name]


def _laid_out(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return two factors as grouped products take them: rows or columns lie together, and each begins at a multiple of
    16 bytes. Zeros beyond the rank change nothing."""
    if missing := -left.shape[-1] % (16 // left.element_size()):
        left, right = pad(left, (0, missing)), pad(right, (0, 0, 0, missing))
    return tuple(one if 1 in one.stride()[-2:] else one.contiguous() for one in (left, right))  # type: ignore[return-value]


@dataclass(frozen=True)
class LowRankSum:
    """The sum `weight + scaling left @ right`, `[..., rows, columns]`, in the place of a tensor. What is neither a
    product with it nor a part of it is computed with the sum itself."""

    weight: Any  # a tensor, or the sum with another adapter
    left: Tensor  # [..., rows, rank]
    right: Tensor  # [..., rank, columns]
    scaling: float

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.__name__.partition(".")[0], kwargs or {}
        one, other, rest = args[0], args[1] if len(args) > 1 else None, args[2:]
        if name == "linear" and isinstance(other, cls):
            small = func(one, other.right) * other.scaling
            return func(one, other.weight, *rest, **kwargs) + func(small, other.left)
        if name in PRODUCTS and isinstance(other, cls):
            small = func(one, other.left, *rest, **kwargs) * other.scaling
            return func(one, other.weight, *rest, **kwargs) + func(small, other.right, *rest, **kwargs)
        if name in PRODUCTS and isinstance(one, cls):
            return func(one.weight, other) + func(one.left, func(one.right, other) * one.scaling)
        formed = [given.formed() if isinstance(given, cls) else given for given in args]
        return func(*formed, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.weight if name in SAID_OF_THE_WEIGHT else self.formed(), name)

    def __getitem__(self, index: Any) -> LowRankSum:
        return LowRankSum(self.weight[index], self.left[index], self.right[index], self.scaling)

    def transpose(self, first: int, second: int) -> LowRankSum | Tensor:
        """Return the sum with two dimensions exchanged; of the last two, `(W + L R)' = W' + R' L'`."""
        if {first % self.ndim, second % self.ndim} != {self.ndim - 2, self.ndim - 1}:
            return self.formed().transpose(first, second)
        left, right = self.right.transpose(-2, -1), self.left.transpose(-2, -1)
        return LowRankSum(self.weight.transpose(-2, -1), left, right, self.scaling)

    @property
    def T(self) -> LowRankSum | Tensor:  # noqa: N802 - torch's name
        return self.transpose(-2, -1)

    mT = T  # noqa: N815 - torch's name

    def formed(self) -> Tensor:
        """Return the sum as a tensor, as PEFT forms it."""
        weight = self.weight.formed() if isinstance(self.weight, LowRankSum) else self.weight
        return weight + self.scaling * (self.left @ self.right)


@cache
def form_no_frozen_gradients() -> None:
    """Have `transformers`' fallback for grouped products form no gradient of a weight that is frozen. It forms that of
    all experts, wherever torch has no grouped product of its own: on older devices, and on the CPU before torch 2.9."""
    if not hasattr(torch.ops.transformers, "grouped_mm_fallback"):
        return

    def keep(ctx: Any, inputs: Any, output: Tensor) -> None:  # noqa: ARG001 - torch's signature
        moe._grouped_mm_fallback_setup_context(ctx, inputs, output)
        if not ctx.needs_input_grad[1]:
            ctx.save_for_backward(inputs[1])  # in place of both, because the input is for the weight's gradient

    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.needs_input_grad[1]:
            return moe._grouped_mm_fallback_backward(ctx, gradient)
        (weight,) = ctx.saved_tensors
        return torch.ops.transformers.grouped_mm_fallback(gradient, weight.transpose(-2, -1), ctx.offs), None, None

    torch.library.register_autograd("transformers::grouped_mm_fallback", backward, setup_context=keep)
