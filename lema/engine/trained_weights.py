"""Weights of layers that train: the leaves that stand for them in a layer's graph.

A leased weight is a view of memory that soon holds another layer. In a graph a leaf stands for it:
the same bytes, and it requires grad. The gradients of a layer are complete when its one backward is
over, for all micro-batches, added up one by one as gradient accumulation on the whole model adds
them.

Leaves stand for adapters too, where somebody else waits for their gradients, who must be given each
of them once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lema.errors import ModelError
from lema.stream import Lease

__all__ = [
    "AskedGradients",
    "Leaves",
    "OuterGradients",
    "TrainedWeights",
    "adapter_leaves",
    "differentiated_again",
]

Leaves = dict[str, Tensor]


class TrainedWeights:
    """The weights of decoder layers that train themselves, and the function that takes their
    gradients. `names` are, for each layer that trains, those of the parameters that do, as a lease
    has them. `done` is called with a layer's number and the gradients of its weights by name, on
    the device, once they are complete for the pass; a weight without a gradient is left out. The
    callee owns them from then on. Given `adapters`, theirs have leaves too."""

    def __init__(
        self,
        names: Mapping[int, Collection[str]],
        done: Callable[[int, Leaves], None],
        adapters: nn.ModuleList | None = None,
    ) -> None:
        self._names = {
            layer: frozenset(layer_names) for layer, layer_names in names.items() if layer_names
        }
        self._done = done
        self._adapters = adapters

    def trains(self, layer: int) -> bool:
        """Whether anything of a layer's own trains."""
        return layer in self._names

    def leaves(self, layer: int, lease: Lease) -> Leaves:
        """Return a leaf for each weight of a layer that trains: the same bytes, and it requires
        grad. `ModelError`: one is not in the lease, or is of a type that has no gradient."""
        layer_leaves: Leaves = {}
        for name in sorted(self._names.get(layer, ())):
            weight = lease.weights.get(name)
            if weight is None or not weight.is_floating_point():
                what = (
                    "is not streamed"
                    if weight is None
                    else f"is of {weight.dtype}, which cannot train"
                )
                raise ModelError(
                    f"{name} of layer {layer} {what}", how="train another selection of weights"
                )
            layer_leaves[name] = weight.detach().requires_grad_()
        adapter_parameters = (
            () if self._adapters is None else self._adapters[layer].named_parameters()
        )
        return layer_leaves | {
            name: parameter.detach().requires_grad_()
            for name, parameter in adapter_parameters
            if parameter.requires_grad
        }

    def follow(self, layer: int, lease: Lease, leaves: Leaves) -> None:
        """Have leaves of an earlier lease of a layer be the weights of this one, because the slot
        of that holds another layer now."""
        for name, weight in self.leaves(layer, lease).items():
            leaves[name].data = weight.detach()

    def end(self, layer: int, leaves: Leaves) -> None:
        """Hand the gradients of a layer over, because nothing adds to them any more in this
        pass.
        """
        if leaves:
            self._done(
                layer, {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
            )
        for leaf in leaves.values():
            leaf.grad = None


def adapter_leaves(
    layers: nn.ModuleList, gradient_sums: dict[nn.Parameter, Tensor]
) -> TrainedWeights:
    """Return a context with leaves instead of the adapters of decoder layers; `gradient_sums` sums
    their gradients.

    `DistributedDataParallel` sends a parameter's gradient off when it first arrives, and looks for
    parameters in the graph of what the model returns. But a pass differentiates graphs of its own,
    once for each micro-batch. So gradients are added up in leaves there, and the parameters are
    inputs of the pass (`OuterGradients`).
    """

    def done(layer: int, gradients: Leaves) -> None:
        parameters = dict(layers[layer].named_parameters())
        for name, gradient in gradients.items():
            add_up(gradient_sums, parameters[name], gradient)

    return TrainedWeights({}, done, adapters=layers)


def add_up(sums: dict[nn.Parameter, Tensor], parameter: nn.Parameter, gradient: Tensor) -> None:
    """Add a parameter's gradient to the sum of those before it; the first is kept as it is."""
    before = sums.get(parameter)
    sums[parameter] = gradient if before is None else before + gradient


class AskedGradients:
    """The gradients of one forward's parameters, for a caller who asks for them
    (`torch.autograd.grad`) instead of having them added to `.grad`. A pass adds to `.grad` by
    itself, which autograd does not see. So where it was asked, what it adds is collected here, and
    handed over at its end (`OuterGradients`).

    Args:
        anchor: a leaf that is in the graph. Only a plain backward comes to it, because nobody asks
            for its gradient.
        parameters: those that train in the layers, or before them.
    """

    def __init__(self, anchor: Tensor, parameters: Sequence[nn.Parameter]) -> None:
        # Hooks of a parameter would also be called by the graph outside, where a plain backward has
        # no gradient for it.
        self.parameters = [
            parameter
            for parameter in parameters
            if not parameter._backward_hooks and not parameter._post_accumulate_grad_hooks
        ]
        self.hooked = len(self.parameters) < len(parameters)
        self.gradients: dict[nn.Parameter, Tensor] = {}
        self._anchor = get_gradient_edge(anchor).node

    def of(self, parameters: Iterable[nn.Parameter]) -> OuterGradients:
        """Return those of some of the parameters, for a function in the caller's graph."""
        ids = {id(parameter) for parameter in self.parameters}
        chosen = [parameter for parameter in parameters if id(parameter) in ids]
        return OuterGradients(chosen, self.gradients, self)

    def asked(self) -> bool:
        """Whether the backward that runs was asked for gradients; called within it."""
        return not torch._C._will_engine_execute_node(self._anchor)

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Collect what is added to `.grad` in a `with` block, if gradients were asked for;
        `.grad` stays as it was.
        """
        if not self.asked():
            yield
            return
        before = [(parameter, parameter.grad) for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = self.gradients.pop(parameter, None)
        try:
            yield
        finally:
            for parameter, grad in before:
                if parameter.grad is not None:
                    self.gradients[parameter] = parameter.grad
                parameter.grad = grad


def differentiated_again() -> bool:
    """Whether the graph that is being differentiated is kept, because another backward may come."""
    retained: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return retained


@dataclass(frozen=True, eq=False)
class OuterGradients:
    """Parameters whose gradients autograd gets from a function in the caller's graph.

    Args:
        parameters: the parameters, which are inputs of that function.
        gradients: has their gradients once the function's backward has formed them.
        asked: collects there what is added to `.grad` where a caller asks for gradients; None:
            somebody else adds to `gradients`.
    """

    parameters: Sequence[nn.Parameter]
    gradients: dict[nn.Parameter, Tensor]
    asked: AskedGradients | None = None

    def among(self, ids: Collection[int]) -> OuterGradients:
        """Return those of the parameters with these `id`s."""
        return replace(self, parameters=[value for value in self.parameters if id(value) in ids])

    def collected(self) -> AbstractContextManager[None]:
        """Return the context in which the gradients are formed."""
        return nullcontext() if self.asked is None else self.asked.collected()

    def differentiate(
        self, roots: Sequence[Tensor], gradients: Sequence[Tensor], *, again: bool
    ) -> None:
        """Form the gradients of a graph inside from those of its `roots`. `again`: it is kept for
        another backward.
        """
        if self.asked is not None:
            torch.autograd.backward(roots, gradients, retain_graph=again)
            return
        # Not by `backward`, at whose end a wrapper would send the parameters' gradients off.
        formed = torch.autograd.grad(
            roots, self.parameters, gradients, retain_graph=again, allow_unused=True
        )
        for parameter, gradient in zip(self.parameters, formed, strict=True):
            if gradient is not None:
                add_up(self.gradients, parameter, gradient)

    def handed_over(self) -> list[Tensor | None]:
        """Return the gradients of the parameters; None: there is none, or it is in `.grad`."""
        return [self.gradients.pop(parameter, None) for parameter in self.parameters]
