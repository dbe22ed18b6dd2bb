"""A decoder layer as a pass sees it, and what it keeps from a step's forward to its backward.

There are two kinds of layer: whole ones (`lema.engine.layers.whole`), and those whose experts are
leased in groups (`lema.engine.layers.experts`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, TypeVar

from torch import Tensor

from lema.engine.layers.rows import Rows
from lema.engine.layers.saving import Saving
from lema.engine.trained_weights import Leaves
from lema.model.flow import LayerCall
from lema.stream import Lease

__all__ = ["Layer", "LossAndGrad", "SavedLayer", "TopGradients"]

LossAndGrad: TypeAlias = Callable[[int, Tensor], tuple[Tensor, Tensor]]
"""Makes of a micro-batch's number and the top layer's output its share of the loss, and the
gradient of the output.
"""


class SavedLayer(Protocol):
    """What a layer keeps of a step from its forward to its backward."""

    leaves: Leaves
    """The leaves that stand for its weights that train, by name."""


Saved = TypeVar("Saved", bound=SavedLayer)


@dataclass(eq=False)
class TopGradients:
    """The loss of a step and its gradients, which were formed with it in the top layer.

    They are not added to `.grad` yet, because the gradient that arrives in the backward may still
    scale them.

    Attributes:
        value: the loss, an fp32 scalar.
        inputs: of each micro-batch, the gradient of the top layer's input; None: it needs none.
        routers: of each micro-batch, the gradients of what routers of the layers below have made.
        weights: all else that has a gradient, with that, in the order in which they are added.
    """

    value: Tensor
    inputs: list[Tensor | None] = field(default_factory=list)
    routers: list[dict[Tensor, Tensor | None]] = field(default_factory=list)
    weights: list[list[tuple[Tensor, Tensor | None]]] = field(default_factory=list)

    def add_value(self, value: Tensor) -> None:
        """Add to the loss."""
        self.value = self.value + value

    def add(self, gradients: TopGradients) -> None:
        """Add those of the next micro-batches."""
        self.add_value(gradients.value)
        self.inputs += gradients.inputs
        self.routers += gradients.routers
        self.weights += gradients.weights


class Layer(Protocol[Saved]):
    """One decoder layer, which is on lease while its methods run."""

    number: int

    def run(self, lease: Lease, rows: Rows) -> None:
        """Take rows that have no gradient through the layer."""

    def output(self, lease: Lease, leaves: Leaves, call: LayerCall, state: Tensor) -> Tensor:
        """Return what the layer makes of one micro-batch `[batch, sequence, hidden]`, without a
        graph.
        """

    def forward(
        self, lease: Lease, rows: Rows, needs_grad: Sequence[bool], saving: Saving
    ) -> Saved:
        """Take a step's rows through the layer; return what the backward wants.

        Args:
            lease: the layer's weights.
            rows: the rows; afterwards they have what the layer made, without a graph. What its
                routers made is in their calls, if somebody asks, and requires grad if it has a
                graph.
            needs_grad: of each micro-batch, whether its hidden state needs a gradient.
            saving: what the step keeps of its layers.
        """

    def backward(
        self, lease: Lease, saved: Saved, gradients: Sequence[Sequence[Tensor]], *, again: bool
    ) -> list[Tensor | None]:
        """Turn the gradients of the outputs into those of the inputs; gradients of what trains are
        added to `.grad`.

        Args:
            lease: the layer's weights.
            saved: what the forward has returned.
            gradients: of each micro-batch, those of the output `[batch, sequence, hidden]` and of
                what the layer's routers made, as far as that requires grad.
            again: whether another backward of the same step may come.
        """

    def differentiate(
        self,
        lease: Lease,
        leaves: Leaves,
        rows: Rows,
        needs_grad: Sequence[bool],
        loss_and_grad: LossAndGrad,
        *,
        sums: Sized = (),
        states: Sequence[Tensor] | None = None,
    ) -> TopGradients:
        """Take a step's rows through the top layer, the head and the loss, and back.

        Args:
            lease: the layer's weights.
            leaves: the leaves that stand for its weights that train; their gradients are added to
                the `.grad` of each.
            rows: the rows, in front of the layer.
            needs_grad: of each micro-batch, whether its hidden state needs a gradient.
            loss_and_grad: makes the loss of what the layer returns.
            sums: the sums of gradients that `loss_and_grad` adds to.
            states: the generator's before each micro-batch; None: as it is.
        """
