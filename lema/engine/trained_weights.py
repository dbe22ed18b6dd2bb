"""Weights of streamed layers that train themselves: the leaves that stand for them in a layer's graph.

A leased weight is a view of memory that soon holds another layer. In a graph a leaf stands for it: the same bytes, and
it requires grad. The gradients of a layer are complete when its one backward is over, for all micro-batches, added up
one by one as gradient accumulation on the whole model adds them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from torch import Tensor

from lema.errors import ModelError
from lema.stream import Lease

__all__ = ["Leaves", "TrainedWeights"]

Leaves = dict[str, Tensor]


class TrainedWeights:
    """The weights of decoder layers that train themselves, and the function that takes their gradients. `names` are,
    for each layer that trains, those of the parameters that do, as a lease has them. `done` is called with a layer's
    number and the gradients of its weights by name, on the device, once they are complete for the pass; a weight
    without a gradient is left out. The callee owns the gradients from then on."""

    def __init__(self, names: Mapping[int, Collection[str]], done: Callable[[int, Leaves], None]) -> None:
        self._names, self._done = {layer: frozenset(own) for layer, own in names.items() if own}, done

    def trains(self, layer: int) -> bool:
        """Whether anything of a layer's own trains."""
        return layer in self._names

    def leaves(self, layer: int, lease: Lease) -> Leaves:
        """Return a leaf for each weight of a layer that trains: the same bytes, and it requires grad. `ModelError`: one
        is not in the lease, or is of a type that has no gradient."""
        found: Leaves = {}
        for name in sorted(self._names.get(layer, ())):
            weight = lease.weights.get(name)
            if weight is None or not weight.is_floating_point():
                what = "is not streamed" if weight is None else f"is of {weight.dtype}, which cannot train"
                raise ModelError(f"{name} of layer {layer} {what}", how="train another selection of weights")
            found[name] = weight.detach().requires_grad_()
        return found

    def end(self, layer: int, leaves: Leaves) -> None:
        """Hand the gradients of a layer over, because nothing adds to them any more in this pass."""
        if leaves:
            self._done(layer, {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None})
        for leaf in leaves.values():
            leaf.grad = None
