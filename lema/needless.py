"""What a recomputation of one layer leaves out: matrix products whose values reach no tensor that was dropped.

An adapter saves its inputs after the module it wraps has been called, so the last product of a layer would be computed
again only to be added to what is thrown away. Which products those are is found out at a layer's first recomputation
(`lema.reach`), and tried once: left out, they give NaN, and no NaN may come back. They give NaN ever after, so that a
product left out in error cannot pass unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lema.reach import Product

__all__ = ["Kinds", "Needless"]


class Kinds:
    """The kinds of the tensors that one run of a layer saves, in order: dtype and number of dimensions, a byte each.

    They tell whether two runs, of micro-batches of any shapes, went the same way.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[torch.dtype, int], int] = {}

    def of(self, tensor: Tensor) -> int:
        """Return the number of a tensor's kind."""
        return self._numbers.setdefault((tensor.dtype, tensor.dim()), len(self._numbers))


@dataclass(frozen=True)
class _LeftOut:
    """A product to leave out of the runs that end as the one did in which it was found needless."""

    product: Product
    ending: bytes  # kinds of what is saved after it


class Needless:
    """The products that recomputations of one layer leave out.

    Args:
        layer: the layer, in whose modules' place something else is called while it is recomputed.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.kinds = Kinds()
        self._learnt: dict[bool, tuple[_LeftOut, ...]] = {}

    @property
    def learnt(self) -> bool:
        """Whether it is known, for the mode the layer is in, training or not, what to leave out."""
        return self.layer.training in self._learnt

    def learn(self, products: tuple[Product, ...], kinds: bytes | bytearray) -> None:
        """Leave out `products`, seen in a run that saved tensors of `kinds`."""
        self._learnt[self.layer.training] = tuple(_LeftOut(one, bytes(kinds[one.saved :])) for one in products)

    def forget(self) -> None:
        """Know nothing again of the mode the layer is in."""
        self._learnt.pop(self.layer.training, None)

    @contextmanager
    def left_out(self, kinds: bytes | bytearray, to_come: Callable[[], int]) -> Iterator[bool]:
        """Leave products out in the `with` block, a run that saves tensors of `kinds`; yield whether there are any.

        What is data-dependent, as which experts are called, may go another way than in the run that was followed. A
        product is left out only where as much is saved after it as there was, of the same kinds; and only where nobody
        else has put something in the module's place, or a hook on it.

        Args:
            kinds: what the forward saved.
            to_come: how much of that is still to come.
        """
        found = [one for one in self._learnt[self.layer.training] if kinds.endswith(one.ending)]
        stubs: dict[nn.Module, list[_LeftOut]] = {}
        for one in found:
            stubs.setdefault(one.product.module, []).append(one)
        replaced = [module for module in stubs if _is_left_alone(module)]
        for module in replaced:
            module.forward = partial(_product, module, module.forward, stubs[module], to_come)
        try:
            yield bool(replaced)
        finally:
            for module in replaced:
                del module.forward


def _is_left_alone(module: nn.Module) -> bool:
    return "forward" not in vars(module) and not module._forward_hooks and not module._forward_pre_hooks


def _product(
    module: nn.Module,
    forward: Callable[[Tensor], Tensor],
    stubs: list[_LeftOut],
    to_come: Callable[[], int],
    given: Tensor,
) -> Tensor:
    """Stand for a module: return NaN where its product is needless, else the product."""
    for stub in stubs:
        product = stub.product
        if to_come() == len(stub.ending) and given.dtype == product.given:
            trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
            made: Tensor = _NotComputed.apply(product, given, *trained)  # type: ignore[no-untyped-call] # torch's is
            return made
    return forward(given)


class _NotComputed(torch.autograd.Function):
    """A tensor that requires grad where the product would, and is like it but for its values."""

    @staticmethod
    def forward(ctx: Any, product: Product, given: Tensor, *trained: Tensor) -> Tensor:  # noqa: ARG004 - autograd looks at them
        return given.new_full((*given.shape[:-1], product.features), torch.nan, dtype=product.made)

    @staticmethod
    def backward(*_: Any) -> Any:
        raise AssertionError("a recomputation is not differentiated")
