"""The matrix product that the recomputation of a layer skips: the frozen one of the adapted linear
called last.

A LoRA linear returns `base(x) + B(A(dropout(x))) * scaling`, and PEFT computes `base(x)` first. The
backward needs tensors that the adapter's path saves, and never the values of `base(x)`, because
those are only added. If the last tensor that the layer's forward saved was saved in that path, the
recomputation ends there, and the product before it would be computed to be thrown away. NaN stands
for it, so that a value that was read after all could not pass unseen. A dropout of what that linear
returned changes none of this, because what it saves is its mask. The forward of each micro-batch
notes which linear that is, because layers with experts go different ways.

The graph of the recomputation is differentiated, so the product has its place in it: what is
skipped is skipped below autograd (`Skipped`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
from peft.tuners.lora.layer import Linear
from peft.tuners.lora.variants import DoraLinearVariant
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lema.model.capture import replaced
from lema.model.shared_inputs import PRODUCTS, Product, is_unwatched

__all__ = ["AdaptedLinears", "LastLinear", "SavedProducts", "Skipped"]


class Skipped(TorchDispatchMode):
    """Computes no product of matrices in a `with` block: each is the `value`, or NaN. Autograd,
    above it, records them all the same."""

    def __init__(self, value: Tensor | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's is
        self._value = value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (
            torch.ops.aten.mm.default,
            torch.ops.aten.addmm.default,
            torch.ops.aten.bmm.default,
        ):
            return func(*args, **(kwargs or {}))
        left, right = args[-2:]
        if self._value is not None:
            return self._value.view(*left.shape[:-1], right.shape[-1])
        # Whole, because the layer may write into what it has made.
        return left.new_full((*left.shape[:-1], right.shape[-1]), torch.nan)


@dataclass(eq=False)
class LastLinear:
    """The adapted linear that one forward of a layer called last."""

    linear: Linear | None = None  # None: none was called
    begun: int = 0  # how many tensors had been saved when it was called
    # how many had been saved when it returned, or when a dropout of what it returned did
    ended: int = 0
    # What it or the dropout returned, `[..., features]`, while somebody else holds that.
    output: Callable[[], Tensor | None] = lambda: None

    def begin(self, linear: Linear, begun: int) -> None:
        """Note that a linear was called when so many tensors had been saved."""
        self.linear = linear
        self.begun = begun

    def end(self, ended: int, output: Tensor) -> None:
        """Note that it, or a dropout of its output, has returned, with so many tensors saved."""
        self.ended = ended
        # A weak reference, because the layer may need the output no longer than the next line of
        # its forward.
        self.output = ref(output)

    def skipped(self, total: int, saved: Callable[[], int]) -> AbstractContextManager[None]:
        """Skip its frozen product in the `with` block, if a recomputation can do without: of the
        `total` tensors that the forward saved, `saved` returns how many the recomputation has come
        to."""
        # the layer saved more, and the product may be part of that
        if self.linear is None or self.ended != total:
            return nullcontext()
        return replaced({self.linear: partial(self._call, self.linear.forward, saved)})

    def _call(
        self, forward: Callable[..., Tensor], saved: Callable[[], int], *args: Any, **kwargs: Any
    ) -> Tensor:
        assert self.linear is not None
        # a layer may call one linear more than once, and this is not the last call
        if saved() != self.begun:
            return forward(*args, **kwargs)
        base = self.linear.base_layer
        with replaced({base: Product(base.forward, lambda _: Skipped())}):
            return forward(*args, **kwargs)


class SavedProducts:
    """The products by frozen weights that one forward of a layer formed, which its recomputation
    takes from here.
    """

    def __init__(self, modules: Sequence[nn.Module], hold: Callable[[Tensor], Tensor]) -> None:
        self._outputs: dict[Any, list[_Product]] = {
            module: [] for module in modules if _is_left_alone(module)
        }
        self._hold = hold

    def watched(self, saved: Callable[[], int]) -> dict[nn.Module, Product]:
        """Return what keeps products in a forward that has saved `saved()` tensors so far, for
        each module.
        """

        def keep(outputs: list[_Product], output: Tensor) -> None:
            outputs.append(_Product(self._hold(output), output._version, saved()))

        return {
            module: Product(module.forward, lambda _: None, partial(keep, outputs))
            for module, outputs in self._outputs.items()
        }

    def drop(self, last: LastLinear, total: int) -> None:
        """Let go of the products that the recomputation of a forward with `total` saved tensors
        skips anyway.
        """
        for outputs in self._outputs.values():
            outputs[:] = [product for product in outputs if product.saved < total]
        if (
            last.linear is not None
            and last.ended == total
            and (outputs := self._outputs.get(last.linear.base_layer, []))
        ):
            outputs.pop()

    @property
    def nbytes(self) -> int:
        """The bytes of the products."""
        return sum(
            product.output.nbytes for outputs in self._outputs.values() for product in outputs
        )

    @property
    def flops(self) -> int:
        """The floating-point operations of the products."""
        return sum(
            2 * product.output.numel() * module.weight.numel() // product.output.shape[-1]
            for module, outputs in self._outputs.items()
            for product in outputs
        )

    def taken(self) -> AbstractContextManager[None]:
        """Have the modules return in the `with` block what they returned in the forward, in the
        same order.
        """

        def take(module: Any, outputs: list[_Product], inputs: Tensor) -> Skipped | None:
            product = outputs.pop(0) if outputs else None
            # Else torch may add the bias after the product, and an output has it already.
            fused = module.bias is None or (inputs.dim() <= 3 and inputs.is_contiguous())
            # A layer may have written into an output since.
            return (
                Skipped(product.output)
                if product is not None and fused and product.output._version == product.version
                else None
            )

        return replaced(
            {
                module: Product(module.forward, partial(take, module, outputs))
                for module, outputs in self._outputs.items()
            }
        )


@dataclass(frozen=True)
class _Product:
    """An output of a module."""

    output: Tensor
    version: int  # of the output, when it was made
    saved: int  # how many tensors the layer had saved by then


class AdaptedLinears:
    """The modules of one layer that LoRA adapts, of those that multiply their input by a matrix."""

    def __init__(self, layer: nn.Module) -> None:
        parts = list(layer.modules())
        self._linears = [part for part in parts if isinstance(part, Linear)]
        self._dropouts = (
            [part for part in parts if type(part) is nn.Dropout] if self._linears else []
        )
        products = [
            part
            for part in parts
            if type(part).forward in PRODUCTS and not part.weight.requires_grad
        ]
        self._frozen = products

    def products(self, hold: Callable[[Tensor], Tensor] = Tensor.detach) -> SavedProducts:
        """Return a place for the products by frozen weights of one forward. `hold` returns what is
        kept of an output: not the output itself, because that has a graph, but what shares its
        memory and its version."""
        return SavedProducts(self._frozen, hold)

    @contextmanager
    def watched(
        self, saved: Callable[[], int], products: SavedProducts | None = None
    ) -> Iterator[LastLinear]:
        """Note which linear is called last in the `with` block, a forward that has saved `saved()`
        tensors so far, and keep the `products`."""
        last = LastLinear()
        watched = dict[nn.Module, Callable[..., Any] | None]()
        watched.update({} if products is None else products.watched(saved))
        for linear in filter(_only_adds, self._linears):
            watched[linear] = partial(_linear, last, saved, linear, linear.forward)
        for dropout in filter(_is_left_alone, self._dropouts):
            watched[dropout] = partial(_dropout, last, saved, dropout.forward)
        # In place of `forward`, not as hooks, because the compiled layers refuse a module with
        # hooks.
        with replaced(watched):
            yield last


def _linear(
    last: LastLinear,
    saved: Callable[[], int],
    linear: Linear,
    forward: Callable[..., Tensor],
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Call a linear, and note that it was the last one."""
    if is_unwatched():
        return forward(*args, **kwargs)
    begun = saved()
    out = forward(*args, **kwargs)
    last.begin(linear, begun)
    last.end(saved(), out)
    return out


def _dropout(
    last: LastLinear, saved: Callable[[], int], forward: Callable[[Tensor], Tensor], inputs: Tensor
) -> Tensor:
    """Call a dropout; what it saves counts as the last linear's if it is given what that
    returned.
    """
    if is_unwatched():
        return forward(inputs)
    follows = inputs is last.output() and saved() == last.ended
    out = forward(inputs)
    if follows:
        last.end(saved(), out)
    return out


def _only_adds(linear: Linear) -> bool:
    """Whether a linear uses the product of its frozen matrix for nothing but a sum, and nobody
    else looks at it.
    """
    base = linear.base_layer
    # else the product itself saves its input
    if type(base).forward not in PRODUCTS or base.weight.requires_grad:
        return False
    for name, variant in linear.lora_variant.items():
        dropped_out = linear.training and not isinstance(linear.lora_dropout[name], nn.Identity)
        # without dropout it multiplies the product
        if not (type(variant) is DoraLinearVariant and dropped_out):
            return False
    return _is_left_alone(linear) and _is_left_alone(base)


def _is_left_alone(module: nn.Module) -> bool:
    return (
        "forward" not in vars(module)
        and not module._forward_hooks
        and not module._forward_pre_hooks
    )
