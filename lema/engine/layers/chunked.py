"""A layer through which rows go in chunks of their sequence: the layer outer, the chunks inner.

So the layer's weights are leased twice in a step whatever the length, and only one chunk's
activations and one layer's keys and values are there at once. The forward keeps the layer's input,
as that of a whole layer does. The backward first makes the keys and values again, stopping the
layer as soon as they are there; then it takes the chunks in reverse. Each is recomputed alone, and
differentiated before the next. The gradients of its keys and values from the chunks behind it have
been summed by then (`lema.model.sequence.cache`).

A micro-batch that is no longer than a chunk goes through the layer at once, and where all of a
step's are, the layer is an ordinary one (`lema.engine.layers.whole`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from lema.activations.chunks.cuts import ChunkInputs
from lema.activations.chunks.hostpool import HostPool
from lema.activations.hoststates import HostState
from lema.activations.stepstore import BoundaryChunks, StepBoundaries
from lema.engine.engine import Engine
from lema.engine.layers.chunk_check import ChunkChecks
from lema.engine.layers.chunk_visit import ChunkVisit, GradientSums, KeepChunk, Weights
from lema.engine.layers.layer import LossAndGrad, TopGradients
from lema.engine.layers.rows import Rows
from lema.engine.layers.saving import Saving
from lema.engine.layers.whole import LayerGraphs, WholeLayer
from lema.engine.trained_weights import Leaves
from lema.errors import ConfigError
from lema.model.flow import LayerCall
from lema.stream import Lease

__all__ = ["ChunkedLayer", "check_cuts", "check_plain"]


def check_cuts(engine: Engine) -> None:
    """Refuse to cut sequences in layers where that has not been tested. `ConfigError`: it is so."""
    check_plain(engine, "sequences do not go through layers in chunks", "sequence_chunk")


def check_plain(engine: Engine, what: str, setting: str) -> None:
    """Refuse what has been tested with layers alone that are run as they are, by one process.

    Args:
        engine: the objects that every layer works with.
        what: the sentence to which it is added where that is not so.
        setting: what asks for it.

    Raises:
        ConfigError: it is not so.
    """
    split = engine.split
    untested = {
        "the device compiles what is run on it": split.lazy,
        "several processes hold each layer together": split.parallel.size > 1,
        "layers are compiled": split.compiled is not None,
    }
    for why, conflicts in untested.items():
        if conflicts:
            raise ConfigError(f"{what} where {why}", where=setting, how="leave it out")


@dataclass(eq=False)
class _SavedRows:
    """What the layer keeps of a step: its inputs, in boundaries, and what the generator drew."""

    calls: Sequence[LayerCall]
    leaves: Leaves  # for the weights that train
    boundaries: StepBoundaries
    needs_grad: Sequence[bool]
    pool: HostPool | None  # for the hidden states
    # the generator's, of each micro-batch before each chunk
    drawn: list[list[Tensor]] = field(default_factory=list)


class ChunkedLayer:
    """A layer through which rows go in chunks of their sequence.

    Args:
        engine: the objects that every layer works with.
        number: which layer it is.
    """

    def __init__(self, engine: Engine, number: int) -> None:
        self.number = number
        self._engine = engine
        self._module = engine.split.layers[number]
        self._at_once = WholeLayer(engine, number)
        self._location = f"in the forward of layer {number}"
        self._checks = ChunkChecks(engine, number)

    def _cuts(self, lease: Lease, rows: Rows) -> bool:
        """Whether one of the micro-batches is longer than a chunk."""
        run_layer = self._engine.split.run_layer
        return self._checks.cuts(
            rows, partial(run_layer, self.number, lease.weights, compiled=False)
        )

    @torch.no_grad()
    def run(self, lease: Lease, rows: Rows) -> None:
        """Take rows that have no gradient through the layer."""
        if not self._cuts(lease, rows):
            self._at_once.run(lease, rows)
            return
        engine = self._engine
        calls = rows.calls[self.number]

        def run(index: int) -> Tensor | HostState:
            visit = ChunkVisit(engine, self.number, lease.weights, calls[index])
            output = visit.forward(rows.state(index).detach(), rows.pool)
            visit.note_routers(output, differentiable=False)
            return rows.stored(index, output)

        with rows.computing([self._module]):
            for index in range(len(rows.states)):
                engine.stop.poll()
                drawn = engine.generator_state()
                output = engine.retry.run_forward(self._location, partial(run, index), drawn)
                _let_go(rows, index)
                rows.states[index] = output

    def output(self, lease: Lease, leaves: Leaves, call: LayerCall, state: Tensor) -> Tensor:
        """Return what the layer makes of one micro-batch, without a graph."""
        weights = {**lease.weights, **leaves}
        return ChunkVisit(self._engine, self.number, weights, call).forward(state)

    def forward(
        self, lease: Lease, rows: Rows, needs_grad: Sequence[bool], saving: Saving
    ) -> LayerGraphs | _SavedRows:
        """Take a step's rows through the layer; see `lema.engine.layers.layer.Layer`."""
        if not self._cuts(lease, rows):
            return self._at_once.forward(lease, rows, needs_grad, saving)
        engine = self._engine
        number = self.number
        calls = rows.calls[number]
        boundaries = saving.boundaries_of(number)
        assert boundaries is not None, "a layer in chunks keeps its graph"
        leaves = engine.trained.leaves(number, lease)
        saved = _SavedRows(calls, leaves, boundaries, needs_grad, rows.pool)
        weights = {**lease.weights, **leaves}
        outputs = list[Tensor]()
        for index, call in enumerate(calls):
            engine.stop.poll()
            layer_input = rows.states[index]
            keep = None
            if rows.pool is None:
                layer_input = boundaries.keep(number, index, layer_input)
            else:
                keep = partial(boundaries.keeping, number, index)
            drawn = engine.generator_state()

            def run(
                call: LayerCall = call,
                layer_input: Tensor = layer_input,
                keep: KeepChunk | None = keep,
            ) -> tuple[Tensor, list[Tensor]]:
                visit = ChunkVisit(engine, number, weights, call)
                output = visit.forward(layer_input, rows.pool, keep)
                visit.note_routers(output)
                return output, visit.drawn

            output, states = engine.retry.run_forward(self._location, run, drawn)
            if keep is not None:
                boundaries.end_chunks()
            outputs.append(output)
            saved.drawn.append(states)
            _let_go(rows, index)
        rows.put(outputs)
        return saved

    def backward(
        self,
        lease: Lease,
        saved: LayerGraphs | _SavedRows,
        gradients: Sequence[Sequence[Tensor]],
        *,
        again: bool,
    ) -> list[Tensor | None]:
        """Turn the gradients of the outputs into those of the inputs; see
        `lema.engine.layers.layer.Layer`.
        """
        if isinstance(saved, LayerGraphs):
            return self._at_once.backward(lease, saved, gradients, again=again)
        engine = self._engine
        number = self.number
        engine.trained.follow(number, lease, saved.leaves)
        weights = {**lease.weights, **saved.leaves}
        input_gradients = list[Tensor | None]()
        for index, call in enumerate(saved.calls):
            engine.stop.poll()
            visit = ChunkVisit(engine, number, weights, call, saved.drawn[index])
            output_gradient, *of_routers = gradients[index]
            needs = saved.needs_grad[index]
            pool = saved.pool
            inplace = pool is not None and not again
            with self._inputs_of(visit, saved, index, again=again) as inputs:
                visit.make_states(inputs)
                input_gradients.append(
                    visit.backward(
                        inputs, output_gradient, of_routers, needs=needs, pool=pool, inplace=inplace
                    )
                )
            if pool is not None and inplace and not needs:
                pool.give(output_gradient)
        return input_gradients

    @contextmanager
    def _inputs_of(
        self, visit: ChunkVisit, saved: _SavedRows, index: int, *, again: bool
    ) -> Iterator[ChunkInputs]:
        """Yield the chunks of a micro-batch that the forward has kept."""
        boundaries = saved.boundaries
        if saved.pool is not None:
            yield BoundaryChunks(boundaries, self.number, index, again=again)
            return
        with (
            boundaries.fetch(self.number, index, again=again) as boundary,
            visit.inputs(boundary, None, ()) as inputs,
        ):
            yield inputs

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
        if not self._cuts(lease, rows):
            return self._at_once.differentiate(
                lease, leaves, rows, needs_grad, loss_and_grad, sums=sums, states=states
            )
        engine = self._engine
        formed = TopGradients(torch.zeros((), dtype=torch.float32, device=engine.backend.device))
        weights = {**lease.weights, **leaves}
        for index, call in enumerate(rows.calls[self.number]):
            engine.stop.poll()
            # because what dropout drew when the loss was formed is drawn again
            if states is not None:
                engine.backend.set_rng_state(states[index])
            run = partial(
                self._differentiate_one,
                weights,
                leaves,
                call,
                loss_and_grad,
                index,
                rows.states[index],
                needs=needs_grad[index],
                pool=rows.pool,
            )
            drawn = engine.generator_state()
            formed.add(engine.retry.run_forward(self._location, run, drawn, sums))
            _let_go(rows, index)
        return formed

    def _differentiate_one(
        self,
        weights: Weights,
        leaves: Leaves,
        call: LayerCall,
        loss_and_grad: LossAndGrad,
        index: int,
        state: Tensor,
        *,
        needs: bool,
        pool: HostPool | None,
    ) -> TopGradients:
        """Run one micro-batch through the top layer, the head and the loss, and back."""
        engine = self._engine
        top = self.number
        trace = engine.stream.trace
        visit = ChunkVisit(engine, top, weights, call)
        with torch.no_grad(), trace.span("forward", f"layer {top}"):
            output = visit.forward(state.detach(), pool)
            visit.note_routers(output)
        if pool is not None:
            pool.synchronize(output)  # because the head reads it, and writes there, as it likes
        with engine.retry.at("in the head and the loss"), trace.span("forward", "head and loss"):
            value, gradient = loss_and_grad(index, output)
        del output
        engine.observe(top + 1, [gradient])
        routed = dict[Tensor, Tensor | None]()
        of_routers = list[Tensor]()
        if engine.routers is not None:
            share, routed = engine.routers.loss_and_grad(index)
            value = value + share
            of_top = [routed.pop(logits) for logits in call.routers or ()]
            of_routers = [by for by in of_top if by is not None]
        # put back below, because recomputing draws what the forward drew
        after = engine.backend.rng_state()
        location = f"in the backward of layer {top}"
        with engine.retry.at(location), trace.span("backward", f"layer {top}"):
            trained = [*engine.adapters_of(top), *leaves.values()]
            sums = GradientSums([(weight, None) for weight in trained])
            order = reversed(range(len(visit.spans(state.shape[1]))))
            with visit.inputs(state.detach(), pool, order) as inputs:
                input_gradient = visit.backward(
                    inputs,
                    gradient,
                    of_routers,
                    needs=needs,
                    sums=sums,
                    pool=pool,
                    inplace=pool is not None,
                )
        if pool is not None:
            # what sees gradients sees them in host memory
            pool.synchronize(gradient)
            if not needs:
                pool.give(gradient)
        engine.backend.set_rng_state(after)
        engine.observe(top, [input_gradient] * needs)
        num_adapters = len(trained) - len(leaves)
        _add_gradients(sums.pairs[num_adapters:])
        return TopGradients(value, [input_gradient], [routed], [sums.pairs[:num_adapters]])


def _add_gradients(pairs: Sequence[tuple[Tensor, Tensor | None]]) -> None:
    """Add the gradients of weights to what they have."""
    for weight, by in pairs:
        if by is not None:
            weight.grad = by if weight.grad is None else weight.grad.add_(by)


def _let_go(rows: Rows, index: int) -> None:
    """Give back the room of a hidden state that no layer reads any more."""
    if rows.pool is not None:
        rows.pool.give(rows.states[index])
        rows.states[index] = rows.states[index].new_empty(0)
