"""The end of a step's way up: the loss, and the gradients with which its way down begins.

The top layer, the head and the loss are computed together, while the top layer is on lease. A head
whose weight is leased in pieces comes after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from lema.engine.engine import Engine
from lema.engine.head.gradients import EmbedHead
from lema.engine.head.loss import LossChunks
from lema.engine.head.pieces import PiecedHead, piece_passes
from lema.engine.head.rows import RowLoss
from lema.engine.layers.layer import Layer, LossAndGrad, TopGradients
from lema.engine.layers.reference_rows import ReferenceRows
from lema.engine.layers.rows import Rows
from lema.engine.trained_weights import Leaves
from lema.stream import Lease

__all__ = ["HeadInPieces", "Top", "TopLayer"]


class Top(Protocol):
    """What forms the loss of a step at the end of its way up."""

    def forward(self, rows: Rows, needs_grad: Sequence[bool]) -> TopGradients:
        """Form the loss of rows, and the gradients of their hidden states. `needs_grad`: of each
        micro-batch, whether its hidden state needs one.
        """

    def backward(self, gradient: Tensor) -> Tensor:
        """Add the gradients of all but the hidden states to `.grad`, given that of the loss; return
        the factor by which those of the hidden states are still to be multiplied.
        """


class TopLayer:
    """The top layer, the head and the loss.

    Args:
        engine: the objects that every layer works with.
        layer: the top layer.
        embed_head: the head and the loss.
        reference_rows: extra rows with which the loss compares; None: there are none.
    """

    def __init__(
        self,
        engine: Engine,
        layer: Layer[Any],
        embed_head: EmbedHead,
        reference_rows: ReferenceRows | None,
    ) -> None:
        self._engine = engine
        self._layer = layer
        self._embed_head = embed_head
        self._reference_rows = reference_rows
        self._leaves: Leaves = {}  # for the weights that train
        self._weights: list[list[tuple[Tensor, Tensor | None]]] = []

    def forward(self, rows: Rows, needs_grad: Sequence[bool]) -> TopGradients:
        """Run the top layer, the head and the loss, and back."""
        engine = self._engine
        layer = self._layer
        embed_head = self._embed_head
        location = f"in the forward of layer {layer.number}"
        with engine.retry.at(location), engine.stream.lease(layer.number) as lease:
            self._leaves = engine.trained.leaves(layer.number, lease)
            differentiate = partial(
                layer.differentiate, lease, self._leaves, rows, needs_grad, sums=embed_head.sums
            )
            if self._reference_rows is None:
                inplace = rows.pool is not None
                formed = differentiate(partial(embed_head.loss_and_grad, inplace=inplace))
            else:
                value, gradients, states = self._row_loss(lease, rows, self._reference_rows)
                after = engine.backend.rng_state()
                formed = differentiate(_scaled_loss_and_grad(embed_head, gradients), states=states)
                formed.add_value(value)
                engine.backend.set_rng_state(after)
        self._reference_rows = None
        self._weights = formed.weights
        return formed

    def backward(self, gradient: Tensor) -> Tensor:
        """Add the gradients of the head, and of what trains in the top layer, to `.grad`."""
        factor = gradient / self._embed_head.loss.scale
        self._embed_head.head_backward(factor)
        for weight_gradients in self._weights:
            pairs = [
                (leaf, formed * factor) for leaf, formed in weight_gradients if formed is not None
            ]
            if pairs:
                # adds to .grad, in order
                torch.autograd.backward([p for p, _ in pairs], [g for _, g in pairs])
        for leaf in self._leaves.values():
            if leaf.grad is not None:
                leaf.grad *= factor  # 1, but where the loss was changed after it was formed
        self._engine.trained.end(self._layer.number, self._leaves)
        self._weights = []
        self._leaves = {}
        return factor

    def _row_loss(
        self, lease: Lease, rows: Rows, reference_rows: ReferenceRows
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Run all rows through the top layer and the head; return the loss of the pass and, for
        each micro-batch, the gradient of its log-probabilities by the top layer's output, and the
        generator's state before the top layer."""
        engine = self._engine
        top = self._layer.number
        embed_head = self._embed_head
        loss = embed_head.loss
        assert isinstance(loss, RowLoss), "the loss is of tokens"
        logps = list[Tensor]()
        gradients = list[Tensor]()
        states = list[Tensor]()

        def score(index: int) -> tuple[Tensor, Tensor]:
            state = rows.states[index].detach()
            call = rows.calls[top][index]
            output = self._layer.output(lease, self._leaves, call, state)
            with engine.retry.at("in the head and the loss"):
                return embed_head.loss_and_grad(index, output.detach())

        with engine.stream.trace.span("forward", f"layer {top}, head and loss"), torch.no_grad():
            reference_rows.begin(top, rows.states)
            for index in range(len(rows.states)):
                engine.stop.poll()
                states.append(engine.generator_state())
                row_logps, gradient = engine.retry.run_forward(
                    f"in the forward of layer {top}", partial(score, index), states[-1]
                )
                logps.append(row_logps)
                gradients.append(gradient)
            reference_rows.run(self._layer, lease)
        return reference_rows.finish(loss, logps), gradients, states


def _scaled_loss_and_grad(embed_head: EmbedHead, gradients: list[Tensor]) -> LossAndGrad:
    """Return what stands for the head where the loss is formed already, and how it changes is
    `gradients` but for a factor. An attempt that fails is made again, so nothing is let go before
    the pass has gone on to the next micro-batch."""
    loss = embed_head.loss
    assert isinstance(loss, RowLoss), "the loss is formed with the head"

    def loss_and_grad(index: int, output: Tensor) -> tuple[Tensor, Tensor]:
        gradients[:index] = [torch.empty(0)] * index
        return torch.zeros((), device=output.device), loss.scaled(index, gradients[index])

    return loss_and_grad


class HeadInPieces:
    """A head in pieces, which are leased after the layers as layers are.

    Args:
        engine: the objects that every layer works with.
        head: the head.
        chunks: the loss.
    """

    def __init__(self, engine: Engine, head: PiecedHead, chunks: LossChunks) -> None:
        self._engine = engine
        self._head = head
        self._chunks = chunks

    def forward(self, rows: Rows, needs_grad: Sequence[bool]) -> TopGradients:  # noqa: ARG002 - the head's passes form all
        """Take the rows through the pieces, and back."""
        engine = self._engine
        with (
            engine.retry.at("in the head and the loss"),
            engine.stream.trace.span("forward", "head and loss"),
        ):
            values, gradients = piece_passes(
                self._head,
                engine.stream.lease,
                self._chunks,
                rows.states,
                differentiate=True,
                poll=engine.stop.poll,
            )
        engine.observe(engine.split.num_layers, gradients)
        formed = TopGradients(torch.stack(values).sum(), [*gradients])
        if engine.routers is not None:
            shares = []
            for index in range(len(rows.states)):
                share, below = engine.routers.loss_and_grad(index)
                shares.append(share)
                formed.routers.append(below)
            formed.add_value(torch.stack(shares).sum())
        return formed

    def backward(self, gradient: Tensor) -> Tensor:
        """Return the factor; a head in pieces does not train."""
        return gradient / self._chunks.scale
