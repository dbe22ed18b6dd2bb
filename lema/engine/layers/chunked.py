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

from collections.abc import Mapping, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from lema.activations.hoststates import HostState
from lema.activations.stepstore import StepBoundaries
from lema.engine.engine import Engine
from lema.engine.layers.chunk_check import check_in_chunks
from lema.engine.layers.layer import LossAndGrad, TopGradients
from lema.engine.layers.rows import Rows
from lema.engine.layers.saving import Saving
from lema.engine.layers.whole import LayerGraphs, WholeLayer
from lema.engine.trained_weights import Leaves
from lema.errors import ConfigError
from lema.model.flow import LayerCall
from lema.model.sequence.cache import StatesComplete
from lema.model.sequence.chunks import ChunkedCall
from lema.model.sequence.states import ChunkStates, Span
from lema.stream import Lease

__all__ = ["ChunkedLayer", "check_cuts"]

Weights: TypeAlias = Mapping[str, Tensor]


def check_cuts(engine: Engine) -> None:
    """Refuse to cut sequences in layers where that has not been tested. `ConfigError`: it is so."""
    split = engine.split
    untested = {
        "the device compiles what is run on it": split.lazy,
        "several processes hold each layer together": split.parallel.size > 1,
        "layers are compiled": split.compiled is not None,
        "experts are leased in groups": bool(engine.stream.groups),
    }
    for why, conflicts in untested.items():
        if conflicts:
            how = "leave it out, or set experts_per_slot: null" if engine.stream.groups else ""
            raise ConfigError(
                f"sequences do not go through layers in chunks where {why}",
                where="sequence_chunk",
                how=how or "leave it out",
            )


@dataclass(eq=False)
class _SavedRows:
    """What the layer keeps of a step: its inputs, in boundaries, and what the generator drew."""

    calls: Sequence[LayerCall]
    leaves: Leaves  # for the weights that train
    boundaries: StepBoundaries
    needs_grad: Sequence[bool]
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
        # with which masks it has been seen to make the same in chunks as at once
        self._checked = set[bool]()

    def _cuts(self, lease: Lease, rows: Rows) -> bool:
        """Whether one of the micro-batches is longer than a chunk; the first time, see that the
        layer may be cut."""
        calls = rows.calls[self.number]
        in_chunks = next((call for call in calls if isinstance(call, ChunkedCall)), None)
        if in_chunks is not None and in_chunks.rows.masked not in self._checked:
            check_in_chunks(self._engine, lease, in_chunks)
            self._checked.add(in_chunks.rows.masked)
        return in_chunks is not None

    @torch.no_grad()
    def run(self, lease: Lease, rows: Rows) -> None:
        """Take rows that have no gradient through the layer."""
        if not self._cuts(lease, rows):
            self._at_once.run(lease, rows)
            return
        engine = self._engine
        calls = rows.calls[self.number]

        def run(index: int) -> Tensor | HostState:
            visit = _Visit(engine, self.number, lease.weights, calls[index])
            output = visit.forward(rows.state(index).detach())
            visit.note_routers(output, differentiable=False)
            return rows.stored(index, output)

        with rows.computing([self._module]):
            for index in range(len(rows.states)):
                engine.stop.poll()
                drawn = engine.generator_state()
                rows.states[index] = engine.retry.run_forward(
                    self._location, partial(run, index), drawn
                )

    def output(self, lease: Lease, leaves: Leaves, call: LayerCall, state: Tensor) -> Tensor:
        """Return what the layer makes of one micro-batch, without a graph."""
        weights = {**lease.weights, **leaves}
        return _Visit(self._engine, self.number, weights, call).forward(state)

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
        saved = _SavedRows(calls, leaves, boundaries, needs_grad)
        weights = {**lease.weights, **leaves}
        outputs = list[Tensor]()
        for index, call in enumerate(calls):
            engine.stop.poll()
            layer_input = boundaries.keep(number, index, rows.states[index])
            drawn = engine.generator_state()

            def run(
                call: LayerCall = call, layer_input: Tensor = layer_input
            ) -> tuple[Tensor, list[Tensor]]:
                visit = _Visit(engine, number, weights, call)
                output = visit.forward(layer_input)
                visit.note_routers(output)
                return output, visit.drawn

            output, states = engine.retry.run_forward(self._location, run, drawn)
            outputs.append(output)
            saved.drawn.append(states)
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
            visit = _Visit(engine, number, weights, call, saved.drawn[index])
            with saved.boundaries.fetch(number, index, again=again) as boundary:
                visit.make_states(boundary)
                output_gradient, *of_routers = gradients[index]
                needs = saved.needs_grad[index]
                input_gradients.append(
                    visit.backward(boundary, output_gradient, of_routers, needs=needs)
                )
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
            )
            drawn = engine.generator_state()
            formed.add(engine.retry.run_forward(self._location, run, drawn, sums))
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
    ) -> TopGradients:
        """Run one micro-batch through the top layer, the head and the loss, and back."""
        engine = self._engine
        top = self.number
        trace = engine.stream.trace
        visit = _Visit(engine, top, weights, call)
        with torch.no_grad(), trace.span("forward", f"layer {top}"):
            output = visit.forward(state.detach())
            visit.note_routers(output)
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
            sums = _Sums([(weight, None) for weight in trained])
            input_gradient = visit.backward(
                state.detach(), gradient, of_routers, needs=needs, sums=sums
            )
        engine.backend.set_rng_state(after)
        engine.observe(top, [input_gradient] * needs)
        num_adapters = len(trained) - len(leaves)
        for weight, by in sums.pairs[num_adapters:]:
            if by is not None:
                weight.grad = by if weight.grad is None else weight.grad.add_(by)
        return TopGradients(value, [input_gradient], [routed], [sums.pairs[:num_adapters]])


@dataclass(eq=False)
class _Sums:
    """Tensors, each with the sum of its gradients over chunks; None: it has none."""

    pairs: list[tuple[Tensor, Tensor | None]]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors."""
        return [tensor for tensor, _ in self.pairs]

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add those of a chunk."""
        for number, gradient in enumerate(gradients):
            tensor, total = self.pairs[number]
            if gradient is not None:
                # not in place, because autograd may hand one tensor out twice
                self.pairs[number] = tensor, gradient if total is None else total + gradient


class _Visit:
    """One micro-batch in one layer, chunk after chunk.

    Args:
        engine: the objects that every layer works with.
        number: which layer it is.
        weights: the layer's, by name.
        call: of the layer on the micro-batch; if it is not in chunks, the micro-batch is one.
        drawn: the generator's state before each chunk; None: the forward notes it.

    Attributes:
        drawn: the generator's state before each chunk.
    """

    def __init__(
        self,
        engine: Engine,
        number: int,
        weights: Weights,
        call: LayerCall,
        drawn: list[Tensor] | None = None,
    ) -> None:
        self._engine = engine
        self._number = number
        self._weights = weights
        self._call = call
        self.drawn = drawn or []
        self._states: ChunkStates | None = None
        # whether somebody asks what routers make, and what they have made of each chunk
        self._asks = call.routers is not None
        self._routed = list[list[Tensor]]()

    def _spans(self, length: int) -> Sequence[Span]:
        return self._call.spans if isinstance(self._call, ChunkedCall) else [Span(0, length)]

    def forward(self, layer_input: Tensor) -> Tensor:
        """Return what the layer makes of `[rows, sequence, hidden]`, without a graph; what
        chunks keep for later ones stays."""
        outputs = None
        self._routed.clear()
        for chunk, span in enumerate(self._spans(layer_input.shape[1])):
            self.drawn.append(self._engine.generator_state())
            with torch.no_grad():
                output = self._run(chunk, layer_input[:, span.slice])
            if outputs is None:
                shape = (*layer_input.shape[:2], *output.shape[2:])
                # zeros, because padding may be in no chunk
                outputs = output.new_zeros(shape)
            outputs[:, span.slice] = output
        assert outputs is not None, "a micro-batch has no tokens"
        return outputs

    def note_routers(self, output: Tensor, *, differentiable: bool = True) -> None:
        """Note in the call what the layer's routers have made of all chunks, if somebody asks.

        Args:
            output: what the layer has made.
            differentiable: whether gradients of it may come.
        """
        if self._call.routers is None:
            return
        num_rows, length = output.shape[:2]
        spans = self._spans(length)
        of_sequence = list[Tensor]()
        for parts in zip(*self._routed, strict=True):
            # zeros, because padding may be in no chunk
            logits = parts[0].new_zeros(num_rows, length, parts[0].shape[-1])
            for span, part in zip(spans, parts, strict=True):
                logits[:, span.slice] = part.reshape(num_rows, -1, part.shape[-1])
            logits = logits.flatten(0, 1) if parts[0].dim() == 2 else logits
            of_sequence.append(logits.requires_grad_(differentiable))
        self._routed.clear()
        self._call.routers[:] = of_sequence

    def make_states(self, layer_input: Tensor) -> None:
        """Make what all chunks but the last keep for later ones; the last comes first in the
        backward."""
        if not (isinstance(self._call, ChunkedCall) and self._call.keeps):
            return
        for chunk, span in enumerate(self._call.spans[:-1]):
            self._engine.backend.set_rng_state(self.drawn[chunk])
            with torch.no_grad(), suppress(StatesComplete):
                self._run(chunk, layer_input[:, span.slice], stops=True)

    def backward(
        self,
        layer_input: Tensor,
        gradient: Tensor,
        of_routers: Sequence[Tensor],
        *,
        needs: bool,
        sums: _Sums | None = None,
    ) -> Tensor | None:
        """Recompute and differentiate the chunks in reverse.

        Args:
            layer_input: `[rows, sequence, hidden]`.
            gradient: of what the layer made of it.
            of_routers: the gradients of what its routers made of it, if somebody asks.
            needs: whether the input's is asked for.
            sums: what else has a gradient; None: it is added to `.grad` of what trains.

        Returns:
            The input's gradient, `[rows, sequence, hidden]`; None: it is not asked for.
        """
        # zeros, because padding may be in no chunk
        input_gradient = torch.zeros_like(layer_input) if needs else None
        spans = self._spans(layer_input.shape[1])
        num_rows, length = layer_input.shape[:2]
        self._asks = bool(of_routers)
        for chunk in reversed(range(len(spans))):
            part = spans[chunk].slice
            self._engine.backend.set_rng_state(self.drawn[chunk])
            leaf = layer_input[:, part].detach().requires_grad_(needs)
            with torch.enable_grad():
                output = self._run(chunk, leaf, again=True)
            roots = [(output, gradient[:, part])]
            if of_routers:
                roots += [
                    (logits, by.view(num_rows, length, -1)[:, part].reshape(logits.shape))
                    for logits, by in zip(self._routed.pop(), of_routers, strict=True)
                    if logits.requires_grad
                ]
            formed = self._differentiate(roots, leaf, sums)
            del roots
            if input_gradient is not None:
                assert formed is not None, "a layer's input does not reach its output"
                input_gradient[:, part] = formed
            del output, leaf, formed
        return input_gradient

    def _differentiate(
        self, made: Sequence[tuple[Tensor, Tensor]], leaf: Tensor, sums: _Sums | None
    ) -> Tensor | None:
        """Differentiate a chunk; return the gradient of its input, if that is asked for. `made`:
        what the layer has made of it, with gradients."""
        states = self._states
        handed_on = [] if states is None else states.roots()
        entered = [] if states is None else states.leaves()
        roots = [root for root, _ in (*made, *handed_on)]
        root_gradients = [by for _, by in (*made, *handed_on)]
        if sums is None:
            torch.autograd.backward(roots, root_gradients)
            of_states: Sequence[Tensor | None] = [state.grad for state in entered]
            formed = leaf.grad
        else:
            needs = leaf.requires_grad
            inputs = [*[leaf] * needs, *entered, *sums.tensors]
            gradients: Sequence[Tensor | None] = torch.autograd.grad(
                roots, inputs, root_gradients, allow_unused=True
            )
            formed = gradients[0] if needs else None
            of_states = gradients[needs : needs + len(entered)]
            sums.add(gradients[needs + len(entered) :])
        if states is not None:
            states.end(of_states)
        return formed

    def _run(
        self, chunk: int, layer_input: Tensor, *, stops: bool = False, again: bool = False
    ) -> Tensor:
        """Run the layer on one chunk.

        Args:
            chunk: its number.
            layer_input: of the chunk.
            stops: stop as soon as the chunk has left what later ones need.
            again: this is a recomputation, and what the call has noted stays.
        """
        call = self._call
        in_chunks = isinstance(call, ChunkedCall)
        one = call.chunk(chunk) if isinstance(call, ChunkedCall) else call
        if again and not in_chunks:
            one = replace(one)
        one.ask_routers(self._asks and not stops)
        with self._holding(chunk, stops=stops):
            output = self._engine.split.run_layer(
                self._number, self._weights, one, layer_input, compiled=False
            )
        if one.routers is not None:
            self._routed.append([*one.routers])
        if in_chunks:
            one.drop_routers()
        return output

    def _holding(self, chunk: int, *, stops: bool) -> AbstractContextManager[None]:
        """Return the context in which a chunk leaves what it keeps here."""
        call = self._call
        if not isinstance(call, ChunkedCall):
            return nullcontext()
        if self._states is None:
            self._states = ChunkStates(call.spans[-1].stop)
        return call.cache.holding(self._number, call.spans[chunk], self._states, stops=stops)
