"""LoRA linears at the price of their arithmetic, for `arithmetic: fast`: those that read one input
are one operation.

`x W' + s (x A') B'` of all linears that share `x` is one autograd function: one product with their
stacked A, each B added into its frozen product in place, and a backward that is written out, whose
gradient of `x` is one sum formed in place. What shares an input is seen when a layer is first run.
Where an option asks for more, a linear is PEFT's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers.pytorch_utils import Conv1D

from lema.model import capture
from lema.model.state.snapshot import rehearsed

__all__ = [
    "PRODUCTS",
    "Product",
    "SharedInputs",
    "is_unwatched",
    "multiply_together",
    "sharing_now",
    "tried",
    "unwatched",
]

# each multiplies its argument by a matrix, and saves no more than that
PRODUCTS = (nn.Linear.forward, Conv1D.forward)
# What a layer's arguments may be where it is tried on copies of its tensors: nothing that the trial
# could change.
PLAIN = (int, float, str, torch.dtype, torch.device, type(None))

# of the layer that is being run
_running: ContextVar[SharedInputs | None] = ContextVar("_running", default=None)
_unwatched: ContextVar[bool] = ContextVar("_unwatched", default=False)


def multiply_together(model: nn.Module) -> None:
    """Have the LoRA linears of a model, or a layer, take part in the `SharedInputs` of the layer
    that is being run.
    """
    for part in model.modules():
        if type(part) is Linear:
            part.__class__ = Together


def tried() -> bool:
    """Whether the layer that is being run is on trial, on copies of its tensors without values."""
    running = _running.get()
    return running is not None and running._seen is not None


@contextmanager
def unwatched() -> Iterator[None]:
    """Have nothing note or skip products in a `with` block, because they are of a few tokens."""
    token = _unwatched.set(True)
    try:
        yield
    finally:
        _unwatched.reset(token)


def is_unwatched() -> bool:
    """Whether nothing notes or skips products now."""
    return _unwatched.get()


def sharing_now() -> Callable[[], AbstractContextManager[None]]:
    """Return the context in which linears multiply together as they do in the layer that is being
    run."""
    now = _running.get()

    @contextmanager
    def sharing() -> Iterator[None]:
        token = _running.set(now)
        try:
            yield
        finally:
            _running.reset(token)
            if now is not None:
                now.clear()

    return sharing


class Together(Linear):
    """PEFT's LoRA linear, which multiplies together with those that read the same input."""

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Return what PEFT's linear returns of `x`, `[..., in_features]`, but for rounding."""
        running = None if args or kwargs else _running.get()
        output = None if running is None else running.output(self, x)
        return super().forward(x, *args, **kwargs) if output is None else output


Together.__name__ = Linear.__name__  # by which PEFT knows it


@dataclass(frozen=True)
class Product:
    """Replaces the `forward` of a module that multiplies by a frozen matrix, to skip the product
    or to keep it.
    """

    form: Callable[[Tensor], Tensor]  # the module's own forward
    # Given the input, returns the context in which `form` computes nothing and returns the value to
    # use; None: the product is formed.
    skipped: Callable[[Tensor], AbstractContextManager[Any] | None]
    keep: Callable[[Tensor], None] = lambda _: None  # takes note of each output that is formed

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return `[..., out_features]` of an input `[..., in_features]`."""
        if inputs.is_meta or is_unwatched():  # in a trial, or in a tile
            return self.form(inputs)
        if (output := self.unformed(inputs)) is None:
            output = self.form(inputs)
            self.keep(output)
        return output

    def unformed(self, inputs: Tensor) -> Tensor | None:
        """Return the output without computing it; None: it has to be computed."""
        if (skipped := self.skipped(inputs)) is None:
            return None
        with skipped:
            return self.form(inputs)


@dataclass(eq=False)
class SharedInputs:
    """The LoRA linears of one layer that read one input, and, while it runs, results for the
    later ones of them.
    """

    _groups: dict[nn.Module, tuple[Together, ...]] | None = None  # None: the layer has not been run
    # in a trial: the calls so far, with their inputs
    _seen: list[tuple[Together, Tensor]] | None = None
    _last_input: tuple[Tensor, int | None] | None = None  # the last input, and its version then
    # of that, for linears that were not called yet
    _outputs: dict[nn.Module, Tensor] = field(default_factory=dict)

    @contextmanager
    def used(
        self,
        layer: nn.Module,
        tensors: Mapping[str, Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Iterator[None]:
        """Have the linears of a `layer`, which is about to be called with these tensors in the
        place of its own and these arguments, multiply together in the `with` block."""
        token = _running.set(self)
        try:
            if self._groups is None:
                self._learn(layer, tensors, args, kwargs)
            yield
        finally:
            _running.reset(token)
            self.clear()

    def clear(self) -> None:
        """Let go of the last input, and of what was made of it."""
        self._last_input = None
        self._outputs.clear()

    def _learn(self, layer: nn.Module, tensors: Mapping[str, Tensor], *arguments: object) -> None:
        """See what shares an input, in a trial on copies without values, as a graph and its
        recomputation have to be alike from the first on. Arguments that a trial could change, such
        as a cache, put it off."""
        for leaf in tree_leaves(arguments):
            if not (
                capture.has_values(leaf) if isinstance(leaf, Tensor) else isinstance(leaf, PLAIN)
            ):
                return
        layer_tensors = {**dict(layer.named_parameters()), **dict(layer.named_buffers()), **tensors}
        empty, args, kwargs = tree_map_only(
            Tensor, lambda tensor: tensor.detach().to("meta"), (layer_tensors, *arguments)
        )
        self._seen = []
        # What was called before an error has been seen all the same: the attention of a layer that
        # asks for values.
        errors = NotImplementedError, *capture.PASSED_THROUGH_THE_MODEL
        try:
            with (
                rehearsed(layer.modules(), values=False),
                torch.no_grad(),
                capture.routed([]),
                suppress(*errors),
            ):
                torch.func.functional_call(layer, empty, args, kwargs, tie_weights=False)
        finally:
            seen = self._seen
            self._seen = None
        linears = [linear for linear, _ in seen]
        groups: dict[int, tuple[Together, ...]] = {}
        for linear, inputs in seen:
            # a linear that is called twice could use the result for its other call
            if linears.count(linear) == 1:
                groups[id(inputs)] = (*groups.get(id(inputs), ()), linear)
        self._groups = {linear: group for group in groups.values() for linear in group}

    def output(self, linear: Together, inputs: Tensor) -> Tensor | None:
        """Return a linear's result for the input `inputs`; None: PEFT computes it."""
        if self._seen is not None:
            self._seen.append((linear, inputs))
            base_output: Tensor = linear.base_layer(inputs)
            return base_output
        version = None if inputs.is_inference() else inputs._version
        if (
            self._last_input is not None
            and self._last_input[0] is inputs
            and self._last_input[1] == version
            and linear in self._outputs
        ):
            return self._outputs.pop(linear)
        if (linear_factors := _factors(linear, inputs)) is None:
            return None
        group = (self._groups or {}).get(linear, (linear,))
        candidates = {
            member: linear_factors if member is linear else _factors(member, inputs)
            for member in group
        }
        factors = {member: factor for member, factor in candidates.items() if factor is not None}
        tensors = [
            tensor
            for factor in factors.values()
            for tensor in (factor.weight, factor.bias, factor.left, factor.right)
        ]
        values = tuple(factors.values())
        outputs = _Sums.apply(inputs, linear_factors.dtype, values, *tensors)  # type: ignore[no-untyped-call] # torch's is
        self._last_input = (inputs, version)
        self._outputs = dict(zip(factors, outputs, strict=True))
        return self._outputs.pop(linear)


@dataclass(frozen=True)
class _Factors:
    """What a linear multiplies its input by: `weight`, and `scaling right left`."""

    weight: Tensor  # [out, in], of `Conv1D` [in, out]
    bias: Tensor | None  # [out]
    left: Tensor  # A, [rank, in]
    right: Tensor  # B, [out, rank]
    scaling: float
    transposed: bool
    dtype: torch.dtype  # that products are formed in
    product: Product | None  # how the output is skipped or kept; None: it is formed, and not kept

    def matrix(self, weight: Tensor) -> Tensor:
        """Return the weight as `[out, in]`."""
        return weight.t() if self.transposed else weight


def _factors(linear: Together, inputs: Tensor) -> _Factors | None:
    """Return what a linear multiplies by; None: it does something else, or asks for another
    dtype or gradient.
    """
    active = [name for name in linear.active_adapters if name in linear.lora_A]
    if (
        len(active) != 1
        or linear.disable_adapters
        or linear.merged
        or active[0] in linear.lora_variant
    ):
        return None
    name = active[0]
    product = None if is_unwatched() else vars(linear.base_layer).get("forward")
    base: Any = linear.base_layer
    left: Any = linear.lora_A[name]
    right: Any = linear.lora_B[name]
    dropout = linear.lora_dropout[name]
    if type(base).forward not in PRODUCTS or not (product is None or isinstance(product, Product)):
        return None
    if any(
        module.bias is not None or type(module) is not nn.Linear or "forward" in vars(module)
        for module in (left, right)
    ):
        return None
    if any(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
        for module in (base, left, right)
    ):
        return None
    if linear.training and not isinstance(dropout, nn.Identity):
        return None
    weight = base.weight
    bias = base.bias
    device = inputs.device.type
    if inputs.is_meta or weight.requires_grad or (bias is not None and bias.requires_grad):
        return None
    cast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if cast else inputs.dtype
    if (
        weight.dtype != dtype
        or inputs.dtype not in (dtype, torch.float32)
        or not (cast or left.weight.dtype == dtype)
    ):
        return None
    scaling = float(linear.scaling[name])
    transposed = isinstance(base, Conv1D)
    return _Factors(weight, bias, left.weight, right.weight, scaling, transposed, dtype, product)


class _SumsContext(Protocol):
    """What the backward of `_Sums` knows of its forward."""

    about: list[tuple[float, bool]]  # of each linear: its scaling, and whether it is transposed
    dtype: torch.dtype
    shape: torch.Size
    needs_input_grad: tuple[bool, ...]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        """Return what was saved."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Save tensors."""

    def set_materialize_grads(self, value: bool) -> None:
        """Say whether gradients that there are none of are zeros."""


class _Sums(torch.autograd.Function):
    """`x W' + bias + s (x A') B'` for each of several linears, of one `x`: `[..., in]` to `[...,
    out]` each.
    """

    @staticmethod
    def forward(
        ctx: _SumsContext,
        inputs: Tensor,
        dtype: torch.dtype,
        factors: Sequence[_Factors],
        *_: Tensor,
    ) -> tuple[Tensor, ...]:
        x = inputs.to(dtype).reshape(-1, inputs.shape[-1])
        # [tokens, all ranks]
        low = x @ torch.cat([factor.left.to(dtype) for factor in factors]).t()
        outputs = []
        for factor, part in zip(
            factors, low.split([len(factor.left) for factor in factors], dim=1), strict=True
        ):
            matrix = factor.matrix(factor.weight)
            if (
                factor.product is not None
                and (unformed := factor.product.unformed(inputs)) is not None
            ):
                outputs.append(unformed)  # of the whole sum
                continue
            # no view, because the model may write into it
            output = x.new_empty(*inputs.shape[:-1], len(matrix))
            flat = output.view(-1, len(matrix))
            if factor.bias is None:
                torch.mm(x, matrix.t(), out=flat)
            else:
                torch.addmm(factor.bias.to(dtype), x, matrix.t(), out=flat)
            flat.addmm_(part, factor.right.to(dtype).t(), alpha=factor.scaling)
            outputs.append(output)
            if factor.product is not None:
                factor.product.keep(output)
        ctx.about = [(factor.scaling, factor.transposed) for factor in factors]
        ctx.dtype = dtype
        ctx.shape = inputs.shape
        ctx.set_materialize_grads(False)
        # The frozen weights too, because what is saved is packed, a leased weight as a reference to
        # its place.
        saved_input = inputs if inputs.dtype == dtype else x
        ctx.save_for_backward(
            saved_input,
            low,
            *(part for factor in factors for part in (factor.weight, factor.left, factor.right)),
        )
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: _SumsContext, *gradients: Tensor | None) -> tuple[Any, ...]:
        """Form `dx = (s dy B) A + dy W`, in one tensor; `dA = (s dy B)' x`; `dB = s dy' (x A')`."""
        saved_input, low, *saved_weights = ctx.saved_tensors
        weights = saved_weights[::3]
        lefts = saved_weights[1::3]
        rights = saved_weights[2::3]
        needs_grad = ctx.needs_input_grad
        x = saved_input.reshape(-1, saved_input.shape[-1])
        lows = low.split([len(left) for left in lefts], dim=1)
        flat = [
            None if gradient is None else gradient.reshape(-1, gradient.shape[-1])
            for gradient in gradients
        ]
        # Gradients of `x A'` of all linears, side by side: `[tokens, all ranks]`.
        back = [
            torch.zeros_like(part) if dy is None else (dy @ right.to(ctx.dtype)).mul_(scaling)
            for dy, part, right, (scaling, _) in zip(flat, lows, rights, ctx.about, strict=True)
        ]
        together = torch.cat(back, dim=1)
        dx = None
        factor_gradients = list[Any]()
        if needs_grad[0]:
            dx = together @ torch.cat([left.to(ctx.dtype) for left in lefts])
            for dy, weight, (_, transposed) in zip(flat, weights, ctx.about, strict=True):
                if dy is not None:
                    dx.addmm_(dy, weight.t() if transposed else weight)
            dx = dx.view(ctx.shape)
        stacked = together.t() @ x if any(needs_grad[5::4]) else None
        rows = (
            [None] * len(lefts) if stacked is None else stacked.split([len(left) for left in lefts])
        )
        for index, (dy, part, (scaling, _)) in enumerate(zip(flat, lows, ctx.about, strict=True)):
            # Of the small side first, because that product is the faster one.
            right = (
                (part.t() @ dy).t().mul(scaling)
                if dy is not None and needs_grad[6 + 4 * index]
                else None
            )
            left = rows[index] if dy is not None and needs_grad[5 + 4 * index] else None
            factor_gradients += [None, None, left, right]
        return dx, None, None, *factor_gradients
