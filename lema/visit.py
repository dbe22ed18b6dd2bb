"""Visits: one layer, forward and backward, over all micro-batches of a step, as one autograd function.

The forward of a visit keeps only each micro-batch's input to the layer (its boundary activation); the backward leases
the layer again and recomputes (Chen et al. 2016, https://arxiv.org/abs/1604.06174), one micro-batch at a time. The top
layer, the head and the loss are one visit: the graph is formed, used and freed while the layer is on lease.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lema.activations import StepBoundaries, graph_input
from lema.backend import Backend
from lema.ends import Ends
from lema.flow import tensors_in
from lema.layercall import LayerCall
from lema.recompute import Graph
from lema.split import Split
from lema.stream.lease import LayerStream, Lease

__all__ = ["Engine", "turn", "visit"]


class Engine:
    """What every visit works with: the model in its parts, the stream of weights, the device.

    Attributes:
        anchor: requires grad, so that a visit is differentiated even when the lowest hidden state does not.
    """

    def __init__(self, split: Split, stream: LayerStream, backend: Backend) -> None:
        self.split, self.stream, self.backend = split, stream, backend
        self.anchor = torch.zeros((), device=backend.device, requires_grad=True)
        self._state: Tensor | None = None

    def generator_state(self) -> Tensor:
        """Return the generator's state; where nothing was drawn since it was last asked for, the tensor of that time.

        Without dropout every layer and micro-batch has the same, and it takes kilobytes.
        """
        state = self.backend.rng_state()
        if self._state is None or not torch.equal(state, self._state):
            self._state = state
        return self._state

    def adapters_of(self, layer: int) -> list[nn.Parameter]:
        """Return the trainable parameters of one layer."""
        return [p for p in self.split.layers[layer].parameters() if p.requires_grad]


def visit(
    engine: Engine,
    layer: int,
    calls: Sequence[LayerCall],
    hidden: Sequence[Tensor],
    boundaries: StepBoundaries | None,
) -> tuple[Tensor, ...]:
    """Run every micro-batch through a layer, to be differentiated: `[batch, sequence, hidden]` each, in and out.

    Args:
        engine: what to work with.
        layer: its number.
        calls: the layer's arguments, of each micro-batch.
        hidden: its inputs.
        boundaries: where they wait for the backward, which computes the layer again; None: its activations are kept.
    """
    visited: tuple[Tensor, ...] = _Visit.apply(  # type: ignore[no-untyped-call] # torch's is
        _LayerVisit(engine, layer, calls, boundaries), engine.anchor, *hidden
    )
    return visited


def turn(engine: Engine, calls: Sequence[LayerCall], hidden: Sequence[Tensor], ends: Ends) -> Tensor:
    """Run the top layer, the head and the loss; return the loss of all micro-batches, an fp32 scalar."""
    loss: Tensor = _Turn.apply(engine, calls, ends, engine.anchor, *hidden)  # type: ignore[no-untyped-call] # torch's is
    return loss


class _LayerVisit:
    """One layer, forward and backward, over all micro-batches of a step."""

    def __init__(
        self, engine: Engine, layer: int, calls: Sequence[LayerCall], boundaries: StepBoundaries | None
    ) -> None:
        self._engine, self._layer, self._calls, self._boundaries = engine, layer, calls, boundaries
        self._graphs: list[tuple[Graph, GradientEdge]] = []
        self._boundary: list[Tensor] = []  # of the micro-batch whose backward runs
        self._found: dict[int, Tensor] = {}  # gradients of the inputs

    def forward(self, hidden: Sequence[Tensor], needs_grad: Sequence[bool]) -> tuple[Tensor, ...]:
        """Run every micro-batch through the layer: `[batch, sequence, hidden]` each, in and out."""
        engine, outputs = self._engine, []
        with engine.stream.lease(self._layer) as lease, engine.stream.trace.span("forward", f"layer {self._layer}"):
            for index, (call, state, needs) in enumerate(zip(self._calls, hidden, needs_grad, strict=True)):
                given = state.detach() if self._boundaries is None else self._boundaries.keep(self._layer, index, state)
                again = None if self._boundaries is None else self._runner(call, needs)
                graph = Graph(again, engine.split.needless[self._layer])
                with graph.built(lease):
                    if needs:
                        given = graph_input(engine.anchor, given, self._found, index)
                    output = engine.split.run_layer(self._layer, lease.weights, call, given)
                # The edge, not the output: that is the next layer's input, and kept as such.
                self._graphs.append((graph, get_gradient_edge(output)))
                outputs.append(output.detach())
        return tuple(outputs)

    def backward(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Turn the gradients of the outputs into those of the inputs; adapters' gradients are added to `.grad`."""
        engine = self._engine
        after = engine.backend.rng_state()
        with engine.stream.lease(self._layer) as lease, engine.stream.trace.span("backward", f"layer {self._layer}"):
            for index, gradient in enumerate(gradients):
                graph, edge = self._graphs[index]
                with graph.differentiated(lease), self._fetched(index):
                    torch.autograd.backward(edge, gradient)
                self._graphs[index] = None  # type: ignore[call-overload] # this micro-batch's graph is done with
        engine.backend.set_rng_state(after)
        found = [self._found.get(index) for index in range(len(gradients))]
        self._found, self._graphs, self._boundaries = {}, [], None
        return found

    @contextmanager
    def _fetched(self, index: int) -> Iterator[None]:
        """Have micro-batch `index`'s boundary on the device for the length of a `with` block."""
        if self._boundaries is None:
            yield
            return
        with self._boundaries.kept(self._layer, index) as boundary:
            self._boundary.append(boundary)
            try:
                yield
            finally:
                self._boundary.clear()

    def _runner(self, call: LayerCall, needs: bool) -> Callable[[Lease], Tensor]:
        """Return what runs a micro-batch through the layer again, from the generator state there is now.

        It does not hold the visit: the visit holds the graph that holds it, and what nobody wants any more would stay.
        """
        engine, layer, boundary, state = self._engine, self._layer, self._boundary, self._engine.generator_state()

        def run(lease: Lease) -> Tensor:
            engine.backend.set_rng_state(state)
            given = boundary[0].detach().requires_grad_(needs)
            return engine.split.run_layer(layer, lease.weights, call, given)

        return run


class _Visit(torch.autograd.Function):
    """`_LayerVisit` as autograd sees it. `anchor` requires grad, so that the visit is differentiated even when the
    lowest hidden state does not."""

    @staticmethod
    def forward(ctx: Any, visit: _LayerVisit, anchor: Tensor, *hidden: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004 - autograd does
        ctx.visit = visit
        return visit.forward(hidden, ctx.needs_input_grad[2:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.visit.backward(gradients)


class _Turn(torch.autograd.Function):
    """The top layer, the head and the loss: gradients are formed in the forward, handed on in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        engine: Engine,
        calls: Sequence[LayerCall],
        ends: Ends,
        anchor: Tensor,  # noqa: ARG004 - autograd looks at it
        *hidden: Tensor,
    ) -> Tensor:
        top = engine.split.num_layers - 1
        adapters, trace = engine.adapters_of(top), engine.stream.trace
        ctx.ends, ctx.inputs, ctx.gradients = ends, [], []
        total = torch.zeros((), dtype=torch.float32, device=engine.backend.device)
        with engine.stream.lease(top) as lease:
            for index, (call, state) in enumerate(zip(calls, hidden, strict=True)):
                needs = ctx.needs_input_grad[4 + index]
                leaf = state.detach().requires_grad_(needs)
                with torch.enable_grad(), trace.span("forward", f"layer {top}"):
                    output = engine.split.run_layer(top, lease.weights, call, leaf)
                with trace.span("forward", "head and loss"):
                    value, gradient = ends.turn(index, output.detach())
                total = total + value
                given = [tensor for tensor in tensors_in((call.args, call.kwargs)) if tensor.requires_grad]
                wanted = [leaf] * needs + adapters + given
                with trace.span("backward", f"layer {top}"):
                    found = torch.autograd.grad(output, wanted, gradient, allow_unused=True) if wanted else ()
                ctx.inputs.append(found[0] if needs else None)
                ctx.gradients.append(list(zip(wanted[needs:], found[needs:], strict=True)))
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        factor = gradients[0] / ctx.ends.loss.scale
        ctx.ends.head_backward(factor)
        for found in ctx.gradients:
            pairs = [(leaf, gradient * factor) for leaf, gradient in found if gradient is not None]
            if pairs:
                torch.autograd.backward([p for p, _ in pairs], [g for _, g in pairs])  # adds to .grad, in order
        scaled = [None if state is None else state * factor.to(state.dtype) for state in ctx.inputs]
        ctx.gradients = ctx.inputs = ctx.ends = None
        return None, None, None, None, *scaled
