"""A layer that is leased whole: forward and backward, one micro-batch after the other.

The forward of a step keeps only each micro-batch's input to the layer (its boundary activation).
The backward recomputes (Chen et al. 2016, https://arxiv.org/abs/1604.06174), one micro-batch at a
time. In the top layer the graph is formed, used and freed while the layer is on lease.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lema.activations.hoststates import HostState
from lema.activations.stepstore import StepBoundaries, StepGraphs
from lema.engine.engine import Engine
from lema.engine.head.gradients import graph_input
from lema.engine.layers.layer import LossAndGrad, TopGradients
from lema.engine.layers.rows import Rows
from lema.engine.layers.saving import Saving
from lema.engine.recompute import Graph
from lema.engine.skip_matmuls import AdaptedLinears
from lema.engine.trained_weights import Leaves
from lema.model.capture import tensors_in
from lema.model.flow import LayerCall
from lema.stream import Lease

__all__ = ["LayerGraphs", "WholeLayer"]


@dataclass(eq=False)
class LayerGraphs:
    """The graphs of one layer's micro-batches, and what recomputes those that are not kept."""

    calls: Sequence[LayerCall]
    leaves: Leaves  # for the weights that train
    boundaries: StepBoundaries | None  # None: the graphs are kept
    away: StepGraphs | None  # where kept graphs have what they hold; None: on the device
    linears: AdaptedLinears | None
    budget: int  # bytes of activations that the next micro-batches may keep all the same
    products: bool
    graphs: list[tuple[Graph, list[GradientEdge]] | None] = field(default_factory=list)
    boundary: list[Tensor] = field(default_factory=list)  # of the micro-batch whose backward runs
    input_gradients: dict[int, Tensor] = field(default_factory=dict)

    def spend(self, nbytes: int) -> None:
        """Note that a micro-batch keeps so many bytes of activations."""
        self.budget = max(0, self.budget - nbytes)


class WholeLayer:
    """A layer that is leased whole.

    Args:
        engine: the objects that every layer works with.
        number: which layer it is.
    """

    def __init__(self, engine: Engine, number: int) -> None:
        self.number = number
        self._engine = engine
        self._module = engine.split.layers[number]
        self._location = f"in the forward of layer {number}"

    @torch.no_grad()
    def run(self, lease: Lease, rows: Rows) -> None:
        """Take rows that have no gradient through the layer."""
        engine = self._engine
        number = self.number

        def run(index: int) -> Tensor | HostState:
            call = rows.calls[number][index]
            state = rows.state(index).detach()
            output = engine.split.run_layer(
                number, lease.weights, call, state, compiled=rows.compiled
            )
            return rows.stored(index, output)

        with rows.computing([self._module]):
            for index in range(len(rows.states)):
                engine.stop.poll()
                state = engine.generator_state()
                rows.states[index] = engine.retry.run_forward(
                    self._location, partial(run, index), state
                )

    @torch.no_grad()
    def output(self, lease: Lease, leaves: Leaves, call: LayerCall, state: Tensor) -> Tensor:
        """Return what the layer makes of one micro-batch, without a graph."""
        weights = {**lease.weights, **leaves}
        return self._engine.split.run_layer(self.number, weights, call, state)

    def forward(
        self, lease: Lease, rows: Rows, needs_grad: Sequence[bool], saving: Saving
    ) -> LayerGraphs:
        """Take a step's rows through the layer; see `lema.engine.layers.layer.Layer`."""
        engine = self._engine
        saved = self._saved_graphs(lease, rows.calls[self.number], saving)
        outputs = list[Tensor]()
        for index, (state, needs) in enumerate(zip(rows.states, needs_grad, strict=True)):
            engine.stop.poll()
            layer_input = (
                state.detach()
                if saved.boundaries is None
                else saved.boundaries.keep(self.number, index, state)
            )
            drawn = engine.generator_state()
            run = partial(self._run, lease, saved, index, layer_input, needs=needs, state=drawn)
            outputs.append(engine.retry.run_forward(self._location, run, drawn))
        rows.put(outputs)
        return saved

    def _saved_graphs(
        self, lease: Lease, calls: Sequence[LayerCall], saving: Saving
    ) -> LayerGraphs:
        engine = self._engine
        boundaries = saving.boundaries_of(self.number)
        # No product is skipped where weights are cast for it, because it saves what they were cast
        # to; nor is anything kept, because that would keep the cast weights.
        is_top = self.number == engine.split.num_layers - 1
        split = engine.split
        cast = any((call.autocast or split.cast) != split.dtype for call in calls)
        return LayerGraphs(
            calls,
            engine.trained.leaves(self.number, lease),
            boundaries,
            away=saving.graphs if boundaries is None else None,
            linears=None if boundaries is None or cast else AdaptedLinears(self._module),
            budget=saving.budget if is_top and not cast and not engine.split.lazy else 0,
            products=self.number in saving.products,
        )

    def _run(
        self,
        lease: Lease,
        saved: LayerGraphs,
        index: int,
        layer_input: Tensor,
        *,
        needs: bool,
        state: Tensor,
    ) -> Tensor:
        """Run one micro-batch through the layer, and keep its graph; `state` is the generator's."""
        engine = self._engine
        call = saved.calls[index]
        compiled = engine.split.compiles(self.number)
        again = None
        if saved.boundaries is not None and not saved.budget:
            again = self._runner(saved, index, state, needs=needs, compiled=compiled)
        keep = (
            None
            if saved.away is None
            else saved.away.keep(self.number, index, tensors_in(call.captured_values))
        )
        # Whole where tensors have no address, because no tensor is known for a weight there.
        # And where modules have hooks, which would see values that were not formed.
        recompute_all = compiled or not lease.has_address or call.hooks is not None
        graph = Graph(
            again, saved.linears, products=saved.products, recompute_all=recompute_all, keep=keep
        )
        with graph.built(lease):
            if again is not None:
                layer_input = layer_input.detach().requires_grad_(needs)
            elif needs:
                layer_input = graph_input(engine.anchor, layer_input, saved.input_gradients, index)
            weights = {**lease.weights, **saved.leaves}
            outputs = _run_layer(engine, self.number, weights, call, layer_input, compiled=compiled)
        # Edges and not outputs, because these are the next layer's inputs, and kept as such.
        saved.graphs.append((graph, [] if again else list(map(get_gradient_edge, outputs))))
        saved.spend(sum(graph.storage_bytes.values()))
        if call.routers:
            call.routers[:] = [
                logits.detach().requires_grad_(logits.requires_grad) for logits in call.routers
            ]
        return outputs[0].detach()

    def _runner(
        self, saved: LayerGraphs, index: int, state: Tensor, *, needs: bool, compiled: bool
    ) -> Callable[[Lease], Sequence[Tensor]]:
        """Return the function that runs a micro-batch through the layer again, from the generator's
        first `state`. It does not refer to what is saved as a whole, because its graph is there,
        and a circle would keep tensors too long."""
        engine = self._engine
        number = self.number
        boundary = saved.boundary
        leaves = saved.leaves
        call = saved.calls[index]
        input_gradients = saved.input_gradients
        asked = call.routers is not None

        def run(lease: Lease) -> Sequence[Tensor]:
            engine.backend.set_rng_state(state)
            layer_input = boundary[0].detach()
            if needs or not lease.has_address:
                # On a device that compiles graphs also for an input whose gradient is not needed,
                # so that the lowest layer's backward is the graph of the others'.
                layer_input = graph_input(engine.anchor, layer_input, input_gradients, index)
            # what the first run has noted is looked at no more
            rerun_call = replace(call, routers=[] if asked else None)
            weights = {**lease.weights, **leaves}
            return _run_layer(engine, number, weights, rerun_call, layer_input, compiled=compiled)

        return run

    def backward(
        self,
        lease: Lease,
        saved: LayerGraphs,
        gradients: Sequence[Sequence[Tensor]],
        *,
        again: bool,
    ) -> list[Tensor | None]:
        """Turn the gradients of the outputs into those of the inputs; see
        `lema.engine.layers.layer.Layer`.
        """
        engine = self._engine
        number = self.number
        engine.trained.follow(number, lease, saved.leaves)
        for index, saved_graph in enumerate(saved.graphs):
            assert saved_graph is not None, "the graph of a micro-batch is done with"
            graph, edges = saved_graph
            engine.stop.poll()
            if saved.away is not None:
                saved.away.expect_after(number, index)
            with ExitStack() as stack:
                if saved.boundaries is not None:
                    fetched = saved.boundaries.fetch(number, index, again=again)
                    saved.boundary.append(stack.enter_context(fetched))
                    stack.callback(saved.boundary.clear)
                graph.backward(lease, edges, gradients[index], again=again)
            if not again:
                saved.graphs[index] = None  # this micro-batch's graph is done with
            del graph, saved_graph
        input_gradients = [saved.input_gradients.get(index) for index in range(len(saved.graphs))]
        saved.input_gradients.clear()
        return input_gradients

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
        """Take a step's rows through the top layer, the head and the loss, and back; see
        `lema.engine.layers.layer.Layer`.
        """
        engine = self._engine
        formed = TopGradients(torch.zeros((), dtype=torch.float32, device=engine.backend.device))
        for index, (call, needs) in enumerate(
            zip(rows.calls[self.number], needs_grad, strict=True)
        ):
            engine.stop.poll()
            # because what dropout drew when the loss was formed is drawn again
            if states is not None:
                engine.backend.set_rng_state(states[index])
            run = partial(
                self._differentiate_one,
                lease,
                leaves,
                call,
                loss_and_grad,
                index,
                rows.states[index],
                needs=needs,
            )
            state = engine.generator_state()
            formed.add(engine.retry.run_forward(self._location, run, state, sums))
        return formed

    def _differentiate_one(
        self,
        lease: Lease,
        leaves: Leaves,
        call: LayerCall,
        loss_and_grad: LossAndGrad,
        index: int,
        state: Tensor,
        *,
        needs: bool,
    ) -> TopGradients:
        """Run one micro-batch through the top layer, the head and the loss, and back."""
        engine = self._engine
        top = self.number
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
        call_tensors = [
            tensor for tensor in tensors_in(call.captured_values) if tensor.requires_grad
        ]
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
        num_others = len(weight_gradients) - len(leaves)
        for weight, formed in weight_gradients[num_others:]:
            if formed is not None:  # added as autograd does: the first one is taken as it is
                weight.grad = formed if weight.grad is None else weight.grad.add_(formed)
        engine.observe(top, gradients[:needs])
        return TopGradients(
            value, [gradients[0] if needs else None], [below], [weight_gradients[:num_others]]
        )


def _run_layer(
    engine: Engine,
    number: int,
    weights: Mapping[str, Tensor],
    call: LayerCall,
    layer_input: Tensor,
    *,
    compiled: bool,
) -> list[Tensor]:
    """Run a layer; return its output, and what its routers made, where somebody asks and it has
    a graph.
    """
    output = engine.split.run_layer(number, weights, call, layer_input, compiled=compiled)
    return [output, *(logits for logits in call.routers or () if logits.requires_grad)]
