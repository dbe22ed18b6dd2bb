"""Visits: one layer, forward and backward, over all micro-batches of a step, as one autograd
function.

The forward of a visit keeps only each micro-batch's input to the layer (its boundary activation).
The backward leases the layer again and recomputes (Chen et al. 2016,
https://arxiv.org/abs/1604.06174), one micro-batch at a time. The top layer, the head and the loss
are one visit: the graph is formed, used and freed while the layer is on lease.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lema.activations.hoststates import HostState, HostStates, on_device
from lema.activations.stepstore import StepBoundaries, StepGraphs
from lema.engine.engine import Engine, LossAndGrad
from lema.engine.head.gradients import EmbedHead, detached, graph_input
from lema.engine.head.rows import RowLoss
from lema.engine.layers.experts import GroupedVisit, through_groups, top_in_groups
from lema.engine.recompute import Graph
from lema.engine.reference_rows import ReferenceRows, top_row_loss
from lema.engine.skip_matmuls import AdaptedLinears
from lema.engine.trained_weights import Leaves, differentiated_again
from lema.model.capture import tensors_in
from lema.model.flow import LayerCall
from lema.stream import Lease

__all__ = ["visit", "visit_frozen", "visit_top"]


def visit(
    engine: Engine,
    layer: int,
    calls: Sequence[LayerCall],
    hidden: Sequence[Tensor],
    boundaries: StepBoundaries | None,
    graphs: StepGraphs | None = None,
    reference_rows: ReferenceRows | None = None,
    budget: int = 0,
    products: bool = False,
) -> tuple[Tensor, ...]:
    """Run every micro-batch through a layer, to be differentiated: `[batch, sequence, hidden]`
    each, in and out. `calls` are the layer's other arguments, for each micro-batch. The inputs wait
    for the backward in `boundaries`, and the layer is recomputed there, but for the first
    micro-batches, whose activations fill `budget` bytes; None: all are kept, in `graphs` or,
    without them, on the device. The `reference_rows` go through in the same
    lease. `products`: of a layer that is recomputed, the products by frozen weights are kept on the
    device.
    """
    # Apart, because the graph inside has weights that are on lease only during the two visits.
    visit: _LayerVisit | GroupedVisit
    if layer in engine.stream.groups:
        assert boundaries is not None and reference_rows is None, (
            "a layer in parts keeps its graph, or has rows beside"
        )
        visit = GroupedVisit(engine, layer, calls, boundaries)
    else:
        away = graphs if boundaries is None else None
        visit = _LayerVisit(
            engine, layer, calls, boundaries, away, reference_rows, budget, products
        )
    outputs = detached(visit.forward, visit.backward, engine.outer, hidden)
    num_outputs = len(outputs) // len(calls)
    for index, call in enumerate(calls):
        more = iter(outputs[index * num_outputs + 1 :])
        if call.routers:  # is differentiated by way of this visit, as the hidden states are
            call.routers[:] = [
                next(more) if logits.requires_grad else logits for logits in call.routers
            ]
    return outputs[::num_outputs]


@torch.no_grad()
def visit_frozen(
    engine: Engine,
    layer: int,
    calls: Sequence[LayerCall],
    hidden: Sequence[Any],
    reference_rows: ReferenceRows | None = None,
    away: HostStates | None = None,
) -> tuple[Any, ...]:
    """Run every micro-batch through a layer that no gradient reaches; arguments as `visit`'s.
    Hidden states come from host memory, and go `away` there; None: they are on the device."""
    outputs = list[Any]()
    location = f"in the forward of layer {layer}"
    with engine.leased(layer, "forward") as lease:

        def run(index: int) -> Tensor | HostState:
            output = engine.split.run_layer(
                layer, lease.weights, calls[index], on_device(hidden, index)
            )
            return output if away is None else away.keep(index, output)

        if layer in engine.stream.groups:
            group_outputs = through_groups(
                engine, lease, calls, (on_device(hidden, index) for index in range(len(hidden)))
            )
            return (
                tuple(group_outputs)
                if away is None
                else tuple(
                    away.keep(*indexed_output) for indexed_output in enumerate(group_outputs)
                )
            )
        for index in range(len(calls)):
            engine.stop.poll()
            outputs.append(
                engine.retry.run_forward(location, partial(run, index), engine.generator_state())
            )
        if reference_rows is not None:
            reference_rows.through(layer, lease, hidden)
    return tuple(outputs)


def visit_top(
    engine: Engine,
    calls: Sequence[LayerCall],
    hidden: Sequence[Tensor],
    embed_head: EmbedHead,
    reference_rows: ReferenceRows | None = None,
) -> Tensor:
    """Run the top layer, the head and the loss; return the loss of all micro-batches, an fp32
    scalar.
    """
    visit = _TopVisit(engine, calls, embed_head, reference_rows)
    below = [
        [] if engine.routers is None else engine.routers.outputs(index)
        for index in range(len(calls))
    ]
    inputs = [
        tensor
        for state, router_logits in zip(hidden, below, strict=True)
        for tensor in (state, *router_logits)
    ]
    return detached(visit.forward, visit.backward, engine.anchor, inputs)


@dataclass(eq=False)
class _LayerVisit:
    """One layer, forward and backward, over all micro-batches of a step."""

    _engine: Engine
    _layer: int
    _calls: Sequence[LayerCall]
    _boundaries: StepBoundaries | None
    _away: StepGraphs | None
    _reference_rows: ReferenceRows | None
    _budget: int
    _products: bool
    _graphs: list[tuple[Graph, list[GradientEdge]]] = field(default_factory=list)
    _boundary: list[Tensor] = field(default_factory=list)  # of the micro-batch whose backward runs
    _input_gradients: dict[int, Tensor] = field(default_factory=dict)  # gradients of the inputs
    _leaves: Leaves = field(default_factory=dict)  # for the weights that train

    def __post_init__(self) -> None:
        # No product is skipped where weights are cast for it, because it saves what they were cast
        # to; nor is anything kept, because that would keep the cast weights.
        cast = any(call.autocast not in (None, self._engine.split.dtype) for call in self._calls)
        layer = self._engine.split.layers[self._layer]
        self._linears = None if self._boundaries is None or cast else AdaptedLinears(layer)
        self._budget = 0 if cast or self._engine.split.lazy else self._budget
        self._asked = self._engine.gradients

    def forward(self, hidden: Sequence[Tensor], needs_grad: Sequence[bool]) -> tuple[Tensor, ...]:
        """Run every micro-batch through the layer: `[batch, sequence, hidden]` each, in and out.
        After each comes what its routers made, where somebody asks and it has a graph."""
        engine = self._engine
        layer = self._layer
        outputs = list[Tensor]()
        with engine.leased(layer, "forward") as lease:
            self._leaves = engine.trained.leaves(layer, lease)
            for index, (state, needs) in enumerate(zip(hidden, needs_grad, strict=True)):
                engine.stop.poll()
                layer_input = (
                    state.detach()
                    if self._boundaries is None
                    else self._boundaries.keep(layer, index, state)
                )
                drawn = engine.generator_state()
                run = partial(self._run, lease, index, layer_input, needs=needs, state=drawn)
                outputs += engine.retry.run_forward(f"in the forward of layer {layer}", run, drawn)
            if self._reference_rows is not None:
                self._reference_rows.through(layer, lease, hidden)
        self._reference_rows = None
        return tuple(outputs)

    def _run(
        self, lease: Lease, index: int, layer_input: Tensor, *, needs: bool, state: Tensor
    ) -> list[Tensor]:
        """Run one micro-batch through the layer, and keep its graph; `state` is the generator's."""
        engine = self._engine
        call = self._calls[index]
        compiled = self._engine.split.compiles(self._layer)
        again = None
        if self._boundaries is not None and not self._budget:
            again = self._runner(index, state, needs=needs, compiled=compiled)
        keep = (
            None
            if self._away is None
            else self._away.keep(self._layer, index, tensors_in(call.captured_values))
        )
        # Whole where tensors have no address, because no tensor is known for a weight there.
        # And where modules have hooks, which would see values that were not formed.
        recompute_all = compiled or not lease.has_address or call.hooks is not None
        graph = Graph(
            again, self._linears, products=self._products, recompute_all=recompute_all, keep=keep
        )
        with graph.built(lease):
            if again is not None:
                layer_input = layer_input.detach().requires_grad_(needs)
            elif needs:
                layer_input = graph_input(engine.anchor, layer_input, self._input_gradients, index)
            weights = {**lease.weights, **self._leaves}
            outputs = _run_layer(engine, self._layer, weights, call, layer_input, compiled=compiled)
        # Edges and not outputs, because these are the next layer's inputs, and kept as such.
        self._graphs.append((graph, [] if again else list(map(get_gradient_edge, outputs))))
        self._budget = max(0, self._budget - sum(graph.storage_bytes.values()))
        return [output.detach() for output in outputs]

    def backward(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Turn the gradients of the outputs into those of the inputs; adapters' gradients are
        added to `.grad`.
        """
        engine = self._engine
        again = differentiated_again()
        # put back below, because recomputing draws what the forward drew
        after = engine.backend.rng_state()
        num_outputs = len(gradients) // len(self._graphs)
        collected = nullcontext() if self._asked is None else self._asked.collected()
        with engine.leased(self._layer, "backward") as lease, collected:
            for name, weight in engine.trained.leaves(self._layer, lease).items():
                # the slot of the forward holds another layer now
                self._leaves[name].data = weight.detach()
            for index, (graph, edges) in enumerate(self._graphs):
                engine.stop.poll()
                if self._away is not None:
                    self._away.expect_after(self._layer, index)
                with ExitStack() as stack:
                    if self._boundaries is not None:
                        self._boundary.append(
                            stack.enter_context(
                                self._boundaries.fetch(self._layer, index, again=again)
                            )
                        )
                        stack.callback(self._boundary.clear)
                    graph.backward(
                        lease,
                        edges,
                        gradients[index * num_outputs : (index + 1) * num_outputs],
                        again=again,
                    )
                if not again:
                    self._graphs[index] = None  # type: ignore[call-overload] # this micro-batch's graph is done with
        engine.backend.set_rng_state(after)
        input_gradients = [self._input_gradients.get(index) for index in range(len(self._graphs))]
        engine.observe(self._layer, input_gradients)
        engine.trained.end(self._layer, self._leaves)
        self._input_gradients.clear()
        if not again:
            self._leaves = {}
            self._graphs = []
            self._boundaries = None
            self._away = None
        return input_gradients

    def _runner(
        self, index: int, state: Tensor, *, needs: bool, compiled: bool
    ) -> Callable[[Lease], Sequence[Tensor]]:
        """Return the function that runs a micro-batch through the layer again, from the generator's
        first `state`. It does not refer to the visit, because the visit's graph holds it, and a
        circle would keep tensors too long."""
        engine = self._engine
        layer = self._layer
        boundary = self._boundary
        leaves = self._leaves
        call = self._calls[index]
        input_gradients = self._input_gradients
        asked = self._calls[index].routers is not None

        def run(lease: Lease) -> Sequence[Tensor]:
            engine.backend.set_rng_state(state)
            layer_input = boundary[0].detach()
            if needs or not lease.has_address:
                # On a device that compiles graphs also for an input whose gradient is not needed,
                # so that the lowest layer's backward is the graph of the others'.
                layer_input = graph_input(engine.anchor, layer_input, input_gradients, index)
            # what the first run has noted is looked at no more
            rerun_call = replace(call, routers=[] if asked else None)
            return _run_layer(
                engine,
                layer,
                {**lease.weights, **leaves},
                rerun_call,
                layer_input,
                compiled=compiled,
            )

        return run


def _run_layer(
    engine: Engine,
    layer: int,
    weights: Mapping[str, Tensor],
    call: LayerCall,
    layer_input: Tensor,
    *,
    compiled: bool,
) -> list[Tensor]:
    """Run a layer; return its output, and what its routers made, where somebody asks and it has
    a graph.
    """
    output = engine.split.run_layer(layer, weights, call, layer_input, compiled=compiled)
    return [output, *(logits for logits in call.routers or () if logits.requires_grad)]


@dataclass(eq=False)
class _TopVisit:
    """The top layer, the head and the loss: gradients are formed in the forward, handed on in
    the backward.
    """

    _engine: Engine
    _calls: Sequence[LayerCall]
    _embed_head: EmbedHead
    _reference_rows: ReferenceRows | None
    _inputs: list[Tensor | None] = field(default_factory=list)  # gradients of the inputs
    # what else has one, with that
    _weight_gradients: list[list[tuple[Tensor, Tensor | None]]] = field(default_factory=list)
    _leaves: Leaves = field(default_factory=dict)  # for the weights that train

    def forward(self, hidden: Sequence[Tensor], needs_grad: Sequence[bool]) -> Tensor:
        engine = self._engine
        embed_head = self._embed_head
        top = engine.split.num_layers - 1
        retry = engine.retry
        location = f"in the forward of layer {top}"
        num_inputs = len(hidden) // len(self._calls)
        hidden = hidden[::num_inputs]
        needs_grad = needs_grad[::num_inputs]  # the others are only there to have gradients
        with retry.at(location), engine.stream.lease(top) as lease:
            total = torch.zeros((), dtype=torch.float32, device=engine.backend.device)
            self._leaves = engine.trained.leaves(top, lease)
            loss_and_grad: LossAndGrad = embed_head.loss_and_grad
            if top in engine.stream.groups:
                assert self._reference_rows is None, "a layer in parts has rows beside"
                total, self._inputs, self._weight_gradients = top_in_groups(
                    engine, lease, self._calls, loss_and_grad, hidden, needs_grad
                )
                self._calls = ()
                return total
            states = None
            after = None
            if self._reference_rows is not None:
                total, logp_gradients, states = top_row_loss(
                    engine,
                    lease,
                    self._leaves,
                    self._calls,
                    hidden,
                    embed_head,
                    self._reference_rows,
                )
                loss_and_grad = _scaled_loss_and_grad(embed_head, logp_gradients)
                after = engine.backend.rng_state()
            for index, (call, state) in enumerate(zip(self._calls, hidden, strict=True)):
                engine.stop.poll()
                # because what dropout drew when the loss was formed is drawn again
                if states is not None:
                    engine.backend.set_rng_state(states[index])
                needs = needs_grad[index]
                run = partial(
                    _top_layer,
                    engine,
                    lease,
                    self._leaves,
                    call,
                    loss_and_grad,
                    index,
                    state,
                    needs=needs,
                )
                value, input_gradients, weight_gradients = retry.run_forward(
                    location, run, engine.generator_state(), embed_head.sums
                )
                total = total + value
                self._inputs += input_gradients
                self._weight_gradients.append(weight_gradients)
            if after is not None:
                engine.backend.set_rng_state(after)
        self._calls = ()
        self._reference_rows = None
        return total

    def backward(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Turn the gradient of the loss into those of the inputs; those of all else are added to
        `.grad`.
        """
        factor = gradients[0] / self._embed_head.loss.scale
        self._embed_head.head_backward(factor)
        for weight_gradients in self._weight_gradients:
            pairs = [
                (leaf, gradient * factor)
                for leaf, gradient in weight_gradients
                if gradient is not None
            ]
            if pairs:
                # adds to .grad, in order
                torch.autograd.backward([p for p, _ in pairs], [g for _, g in pairs])
        for leaf in self._leaves.values():
            if leaf.grad is not None:
                leaf.grad *= factor  # 1, but where the loss was changed after it was formed
        self._engine.trained.end(self._engine.split.num_layers - 1, self._leaves)
        scaled = [
            None if state is None else state * factor.to(state.dtype) for state in self._inputs
        ]
        self._inputs = []
        self._weight_gradients = []
        self._leaves = {}
        del self._embed_head
        return scaled


def _top_layer(
    engine: Engine,
    lease: Lease,
    leaves: Leaves,
    call: LayerCall,
    loss_and_grad: LossAndGrad,
    index: int,
    state: Tensor,
    *,
    needs: bool,
) -> tuple[Tensor, list[Tensor | None], list[tuple[Tensor, Tensor | None]]]:
    """Run one micro-batch through the top layer, the head and the loss, and back; return the loss,
    the gradients of `state`, if it is needed, and of what routers below have made, and what else
    has a gradient, with that."""
    top = engine.split.num_layers - 1
    retry = engine.retry
    trace = engine.stream.trace
    leaf = state.detach().requires_grad_(needs)
    with torch.enable_grad(), trace.span("forward", f"layer {top}"):
        output = engine.split.run_layer(top, {**lease.weights, **leaves}, call, leaf)
    with retry.at("in the head and the loss"), trace.span("forward", "head and loss"):
        value, gradient = loss_and_grad(index, output.detach())
    engine.observe(top + 1, [gradient])
    roots = {output: gradient}
    below = dict[Tensor, Tensor | None]()
    if engine.routers is not None:
        share, below = engine.routers.loss_and_grad(index)
        value = value + share
        roots |= {
            logits: by for logits in call.routers or () if (by := below.pop(logits)) is not None
        }
    # The gradients are returned and not added, because the one that arrives in the backward may
    # still scale them.
    call_tensors = [tensor for tensor in tensors_in(call.captured_values) if tensor.requires_grad]
    grad_inputs: list[Tensor] = [
        *[leaf] * needs,
        *engine.adapters_of(top),
        *call_tensors,
        *leaves.values(),
    ]
    with retry.at(f"in the backward of layer {top}"), trace.span("backward", f"layer {top}"):
        gradients = (
            torch.autograd.grad([*roots], grad_inputs, [*roots.values()], allow_unused=True)
            if grad_inputs
            else ()
        )
    pairs: Iterator[tuple[Tensor, Tensor | None]] = zip(grad_inputs, gradients, strict=True)
    weight_gradients = list(pairs)[needs:]
    for weight, formed in weight_gradients[len(weight_gradients) - len(leaves) :]:
        if formed is not None:  # added as autograd does: the first one is taken as it is
            weight.grad = formed if weight.grad is None else weight.grad.add_(formed)
    engine.observe(top, gradients[:needs])
    return (
        value,
        [gradients[0] if needs else None, *below.values()],
        weight_gradients[: len(weight_gradients) - len(leaves)],
    )


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
