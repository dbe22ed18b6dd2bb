"""Weights of layers that train: the leaves that stand for them in a layer's graph.

A leased weight is a view of memory that soon holds another layer. In a graph a leaf stands for it: the same bytes, and
it requires grad. The gradients of a layer are complete when its one backward is over, for all micro-batches, added up
one by one as gradient accumulation on the whole model adds them.

Leaves stand for adapters, too, where somebody else waits for their gradients, who must be given each of them once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lema.errors import ModelError
from lema.stream import Lease

__all__ = ["AdapterLeaves", "Leaves", "TrainedWeights"]

Leaves = dict[str, Tensor]


class TrainedWeights:
    """The weights of decoder layers that train themselves, and the function that takes their gradients.

    Args:
        names: for each layer that trains, the names of the parameters that do, as a lease has them.
        done: called with a layer's number and the gradients of its weights by name, on the device, once they are
            complete for the pass; a weight without a gradient is left out. The callee owns the gradients from then on.
        begun: returns the gradient that a weight has from the passes before, to which this pass adds; None: none.
    """

    def __init__(
        self,
        names: Mapping[int, Collection[str]],
        done: Callable[[int, Leaves], None],
        begun: Callable[[int, str], Tensor | None] = lambda *_: None,
    ) -> None:
        self._names = {layer: frozenset(own) for layer, own in names.items() if own}
        self._done, self._begun = done, begun

    def trains(self, layer: int) -> bool:
        """Whether anything of a layer's own trains."""
        return layer in self._names

    def leaves(self, layer: int, lease: Lease) -> Leaves:
        """Return a leaf for each weight of a layer that trains: the same bytes, and it requires grad.

        Raises:
            ModelError: one is not in the lease, or is of a type that has no gradient.
        """
        found: Leaves = {}
        for name in sorted(self._names.get(layer, ())):
            weight = lease.weights.get(name)
            if weight is None or not weight.is_floating_point():
                what = "is not streamed" if weight is None else f"is of {weight.dtype}, which cannot train"
                raise ModelError(f"{name} of layer {layer} {what}", how="train another selection of weights")
            found[name] = weight.detach().requires_grad_()
        return found

    def begin(self, layer: int, leaves: Leaves) -> None:
        """Give the leaves the gradients of the passes before, so that those of this pass are added to them."""
        for name, leaf in leaves.items():
            leaf.grad = self._begun(layer, name)

    def end(self, layer: int, leaves: Leaves) -> None:
        """Hand the gradients of a layer over, because nothing adds to them any more in this pass."""
        if leaves:
            self._done(layer, {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None})
        for leaf in leaves.values():
            leaf.grad = None


class AdapterLeaves:
    """Leaves for the adapters of decoder layers, whose gradients autograd is given at the end of each backward.

    `DistributedDataParallel` sends a parameter's gradient off when it first arrives, and looks for parameters in the
    graph of what the model returns. But the visits differentiate graphs of their own, once for each micro-batch. So
    gradients are added up in leaves there, and the parameters are in the outer graph, below all visits.
    """

    def __init__(self, layers: nn.ModuleList) -> None:
        self._layers = layers
        self._leaves: dict[nn.Parameter, Tensor] = {}

    def trains(self, layer: int) -> bool:
        """Whether anything of a layer trains."""
        return any(one.requires_grad for one in self._layers[layer].parameters())

    def leaves(self, layer: int, _: Lease) -> Leaves:
        """Return the leaf of each adapter of a layer that trains: the same values, and it requires grad."""
        named = self._layers[layer].named_parameters()
        return {name: self._leaf(one) for name, one in named if one.requires_grad}

    def _leaf(self, parameter: nn.Parameter) -> Tensor:
        leaf = self._leaves.get(parameter)
        if leaf is None or leaf.data_ptr() != parameter.data_ptr():  # a trainer may have put other values there
            leaf = self._leaves[parameter] = parameter.detach().requires_grad_()
        return leaf

    def begin(self, layer: int, leaves: Leaves) -> None:
        """Nothing was added before."""

    def end(self, layer: int, leaves: Leaves) -> None:
        """The gradients stay in the leaves until the backward has been through all layers."""

    def anchor(self, anchor: Tensor) -> Tensor:
        """Return what stands for `anchor` in the visits of one forward: the adapters of all layers are below it."""
        trained = [one for one in self._layers.parameters() if one.requires_grad]
        below: Tensor = _Below.apply(anchor, self, *trained)  # type: ignore[no-untyped-call] # torch's is
        return below

    def taken(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient that a parameter's leaf has, and forget it there."""
        leaf = self._leaf(parameter)
        found, leaf.grad = leaf.grad, None
        return found


class _Below(torch.autograd.Function):
    """Autograd calls its backward when all visits that were given the anchor have had theirs."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, leaves: AdapterLeaves, *trained: nn.Parameter) -> Tensor:
        ctx.leaves, ctx.trained = leaves, trained
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(ctx.leaves.taken(one) for one in ctx.trained)
