"""A layer whose experts are leased in groups, and through which rows go in chunks of their
sequence.

Groups are the outer loop of the experts' part and chunks the inner one, so each group is leased
once on the way up and once on the way down, however many chunks there are. Every chunk goes through
the layer as far as its experts, in order, and waits there with its hidden states; then each group
works on all chunks, one after the other.

The other order, all groups for one chunk before the next, would lease each group once for each
chunk. What waits here is of the size of the layer's input: what the experts are given, what they
return, and what the layer adds to that.

In the backward no graph waits. The chunks go once more as far as their experts, then the groups
come in reverse, and then the chunks in reverse, each with a graph of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from lema.activations.stepstore import StepBoundaries
from lema.engine.engine import Engine
from lema.engine.layers.chunk_check import ChunkChecks
from lema.engine.layers.chunk_visit import ChunkVisit, GradientSums
from lema.engine.layers.experts import ExpertGroups, ExpertLayer, SavedInputs, Sums, resumed
from lema.engine.layers.layer import LossAndGrad, TopGradients
from lema.engine.layers.rows import Rows
from lema.engine.layers.saving import Saving
from lema.engine.trained_weights import Leaves
from lema.model.experts import ExpertInputs
from lema.model.flow import LayerCall, Suspended
from lema.model.sequence.states import Span
from lema.stream import Lease

__all__ = ["ChunkedExpertLayer"]


@dataclass(eq=False)
class _SavedChunks:
    """What the layer keeps of a step."""

    calls: Sequence[LayerCall]
    boundaries: StepBoundaries
    needs_grad: Sequence[bool]
    drawn: list[list[Tensor]]  # the generator's state, of each micro-batch before each chunk
    leaves: Leaves = field(default_factory=dict)


@dataclass(eq=False)
class _Chunk:
    """One chunk of a micro-batch, which waits for the layer's experts."""

    number: int
    span: Span
    inputs: ExpertInputs  # of the experts
    half: Suspended | None  # None: what is behind the experts is done with
    result: Tensor | None = None  # of the experts; None: nobody looks at its values
    result_gradient: Tensor | None = None

    def resumed(self, engine: Engine, result: Tensor) -> Tensor:
        """Return what the layer makes of the chunk, given the experts' result."""
        assert self.half is not None
        autocast, _ = self.inputs
        # A copy, because models add to their experts' result in place.
        return resumed(engine, autocast, self.half, result.clone())

    def run_again(self, engine: Engine, half: Suspended) -> Tensor:
        """Return what the layer makes of the chunk, which has been run again as far as its
        experts."""
        self.half = half
        hidden, *_ = half.expert_inputs
        result = torch.zeros_like(hidden) if self.result is None else self.result
        return self.resumed(engine, result.detach())

    def let_go(self) -> None:
        """Let go of what is behind the experts."""
        self.half = None
        self.result = None

    def keep(self, result: Tensor) -> None:
        """Keep the experts' result."""
        self.result = result

    def begin(self, engine: Engine, gradient: Tensor) -> None:
        """Form the gradient of the experts' result, given that of what the layer makes of the
        chunk, unless the values of the result are looked at, and it is not there."""
        assert self.half is not None
        _, (hidden, *_) = self.inputs
        result = torch.zeros_like(hidden) if self.result is None else self.result
        leaf = result.detach().requires_grad_()
        with torch.enable_grad(), self.half.looking() as looked_at:
            output = self.resumed(engine, leaf)
        if looked_at and self.result is None:
            return
        (self.result_gradient,) = torch.autograd.grad(output, [leaf], gradient)
        self.half = None
        if not looked_at:
            self.result = None


@dataclass(eq=False)
class _Row:
    """One micro-batch in the layer: its input, and its chunks as far as they have come."""

    visit: ChunkVisit
    call: LayerCall
    layer_input: Tensor
    chunks: list[_Chunk] = field(default_factory=list)

    def run(self, engine: Engine, *, again: bool) -> None:
        """Run the chunks as far as their experts, in order, without a graph.

        Args:
            engine: the objects that every layer works with.
            again: not for the first time.
        """
        asks = self.call.routers is not None and not again
        for number, span in enumerate(self.visit.spans(self.layer_input.shape[1])):
            if again:
                engine.backend.set_rng_state(self.visit.drawn[number])
            else:
                self.visit.note_drawn()
            part = self.layer_input[self.visit.rows_of(number), span.slice].detach()
            with torch.no_grad():
                half = self.visit.half(number, part, asks=asks, again=again)
            inputs = (self.call.autocast, half.expert_inputs)
            self.chunks.append(_Chunk(number, span, inputs, half))

    def output(self, engine: Engine, results: Sequence[Tensor]) -> Tensor:
        """Return what the layer makes of the micro-batch, given what its experts have made of each
        chunk."""
        outputs = None
        for chunk, result in zip(self.chunks, results, strict=True):
            with torch.no_grad():
                output = chunk.resumed(engine, result)
            if outputs is None:
                shape = (*self.layer_input.shape[:2], *output.shape[2:])
                # zeros, because padding may be in no chunk
                outputs = output.new_zeros(shape)
            outputs[:, chunk.span.slice] = output
        assert outputs is not None, "a micro-batch has no tokens"
        return outputs

    def end(
        self,
        engine: Engine,
        gradients: Sequence[Tensor],
        of_experts: Sequence[tuple[Tensor, Tensor]],
        *,
        needs: bool,
        sums: GradientSums | None = None,
    ) -> Tensor | None:
        """Run the chunks in reverse once more, and differentiate them.

        Args:
            engine: the objects that every layer works with.
            gradients: of what the layer made of the micro-batch, and of what its routers made.
            of_experts: of each chunk, the gradients of what the experts were given.
            needs: whether the input's is asked for.
            sums: what else has a gradient; None: it is added to `.grad` of what trains.

        Returns:
            The input's gradient; None: it is not asked for.
        """
        output_gradient, *of_routers = gradients
        input_gradient = torch.zeros_like(self.layer_input) if needs else None
        for chunk, by_inputs in zip(reversed(self.chunks), reversed(of_experts), strict=True):
            part = chunk.span.slice
            engine.backend.set_rng_state(self.visit.drawn[chunk.number])
            rows = self.visit.rows_of(chunk.number)
            leaf = self.layer_input[rows, part].detach().requires_grad_(needs)
            with torch.enable_grad():
                half = self.visit.half(chunk.number, leaf, asks=bool(of_routers), again=True)
                hidden, _, factors = half.expert_inputs
                output = chunk.run_again(engine, half)
            routed = self.visit.take_routed() if of_routers else []
            roots = [
                *zip((hidden, factors), by_inputs, strict=True),
                (output, self.visit.gradient_of(chunk.number, output_gradient[:, part])),
                *(
                    (logits, self._of_routed(chunk, by).reshape(logits.shape))
                    for logits, by in zip(routed, of_routers, strict=True)
                ),
            ]
            roots = [(root, by) for root, by in roots if root.requires_grad]
            formed = self.visit.differentiate(roots, leaf, sums)
            if input_gradient is not None:
                assert formed is not None, "a layer's input does not reach its output"
                input_gradient[rows, part] = formed
            chunk.let_go()
            del half, roots, hidden, factors, output, leaf, formed
        return input_gradient

    def _of_routed(self, chunk: _Chunk, gradient: Tensor) -> Tensor:
        """Return the gradient of what a router made of a chunk, of that of all tokens."""
        by_token = gradient.view(*self.layer_input.shape[:2], -1)[:, chunk.span.slice]
        return self.visit.gradient_of(chunk.number, by_token)


class ChunkedExpertLayer:
    """A layer whose experts are leased in groups while rows go through it in chunks.

    Args:
        engine: the objects that every layer works with.
        number: which layer it is.
    """

    def __init__(self, engine: Engine, number: int) -> None:
        self.number = number
        self._engine = engine
        self._at_once = ExpertLayer(engine, number)
        self._checks = ChunkChecks(engine, number)

    def _groups(self, lease: Lease) -> ExpertGroups:
        engine = self._engine
        return ExpertGroups(engine.split, engine.stream, lease, engine.retry.at)

    def _cuts(self, lease: Lease, rows: Rows) -> bool:
        """Whether one of the micro-batches is longer than a chunk."""
        split = self._engine.split

        def run(call: LayerCall, hidden: Tensor) -> Tensor:
            # without experts, which work on each token alone
            run_layer = partial(
                split.run_layer, self.number, lease.weights, call, hidden, compiled=False
            )
            half = split.suspended(self.number, run_layer)
            output: Tensor = half.resume(torch.zeros_like(half.expert_inputs[0]))
            return output

        return self._checks.cuts(rows, run)

    @torch.no_grad()
    def run(self, lease: Lease, rows: Rows) -> None:
        """Take rows that have no gradient through the layer."""
        if not self._cuts(lease, rows):
            self._at_once.run(lease, rows)
            return
        states = (rows.state(index) for index in range(len(rows.states)))
        in_layer, outputs = self._through_groups(lease, rows.calls[self.number], states)
        for row, output in zip(in_layer, outputs, strict=True):
            row.visit.note_routers(output, differentiable=False)
        rows.put([rows.stored(index, output) for index, output in enumerate(outputs)])

    def output(self, lease: Lease, leaves: Leaves, call: LayerCall, state: Tensor) -> Tensor:
        """Return what the layer makes of one micro-batch, without a graph."""
        return self._at_once.output(lease, leaves, call, state)

    def forward(
        self, lease: Lease, rows: Rows, needs_grad: Sequence[bool], saving: Saving
    ) -> SavedInputs | _SavedChunks:
        """Take a step's rows through the layer; see `lema.engine.layers.layer.Layer`."""
        if not self._cuts(lease, rows):
            return self._at_once.forward(lease, rows, needs_grad, saving)
        number = self.number
        calls = rows.calls[number]
        boundaries = saving.boundaries_of(number)
        assert boundaries is not None, "a layer in chunks keeps its graph"
        states = (boundaries.keep(number, index, state) for index, state in enumerate(rows.states))
        in_layer, outputs = self._through_groups(lease, calls, states)
        for row, output in zip(in_layer, outputs, strict=True):
            row.visit.note_routers(output)
        rows.put(outputs)
        return _SavedChunks(calls, boundaries, needs_grad, [row.visit.drawn for row in in_layer])

    def _through_groups(
        self, lease: Lease, calls: Sequence[LayerCall], hidden: Iterable[Tensor]
    ) -> tuple[list[_Row], list[Tensor]]:
        """Run every micro-batch through the layer, without a graph; return them and what it makes
        of them, once their chunks wait no more."""
        in_layer = self._rows(lease, calls, hidden)
        results = self._results(lease, in_layer)
        after = self._engine.backend.rng_state()
        outputs = list[Tensor]()
        for row in in_layer:
            outputs.append(row.output(self._engine, results.pop(0)))
            row.chunks.clear()
        self._engine.backend.set_rng_state(after)
        return in_layer, outputs

    def _rows(
        self,
        lease: Lease,
        calls: Sequence[LayerCall],
        hidden: Iterable[Tensor],
        drawn: Sequence[list[Tensor]] | None = None,
    ) -> list[_Row]:
        """Run every micro-batch as far as its experts; `drawn` is what the generator's states were
        before the chunks of each, if it is not the first time."""
        engine = self._engine
        in_layer = list[_Row]()
        for index, (call, state) in enumerate(zip(calls, hidden, strict=True)):
            engine.stop.poll()
            before = None if drawn is None else drawn[index]
            visit = ChunkVisit(engine, self.number, lease.weights, call, before)
            in_layer.append(_Row(visit, call, state))
            in_layer[-1].run(engine, again=drawn is not None)
        return in_layer

    def _results(self, lease: Lease, in_layer: Sequence[_Row]) -> list[list[Tensor]]:
        """Return what the experts make of each chunk of each micro-batch."""
        inputs = [chunk.inputs for row in in_layer for chunk in row.chunks]
        results = iter(self._groups(lease).results(inputs))
        return [[next(results) for _ in row.chunks] for row in in_layer]

    def backward(
        self,
        lease: Lease,
        saved: SavedInputs | _SavedChunks,
        gradients: Sequence[Sequence[Tensor]],
        *,
        again: bool,
    ) -> list[Tensor | None]:
        """Turn the gradients of the outputs into those of the inputs; see
        `lema.engine.layers.layer.Layer`.
        """
        if isinstance(saved, SavedInputs):
            return self._at_once.backward(lease, saved, gradients, again=again)

        def layer_inputs() -> Iterable[Tensor]:
            for index in range(len(saved.calls)):
                with saved.boundaries.fetch(self.number, index, again=again) as boundary:
                    # A copy, because the layer waits for its experts longer than a boundary is
                    # kept here.
                    copied = boundary.detach().clone()
                yield copied

        in_layer = self._rows(lease, saved.calls, layer_inputs(), saved.drawn)
        adapters: Sums = {}
        of_experts = self._through_experts(lease, in_layer, gradients, adapters)
        input_gradients = list[Tensor | None]()
        for index, needs in enumerate(saved.needs_grad):
            row = in_layer.pop(0)
            by_experts = of_experts.pop(0)
            input_gradients.append(row.end(self._engine, gradients[index], by_experts, needs=needs))
            del row, by_experts
        for parameter in [*adapters]:  # one by one, because each is copied
            torch.autograd.backward([parameter], [adapters.pop(parameter)])  # adds to .grad
        return input_gradients

    def _through_experts(
        self,
        lease: Lease,
        in_layer: Sequence[_Row],
        gradients: Sequence[Sequence[Tensor]],
        adapters: Sums,
    ) -> list[list[tuple[Tensor, Tensor]]]:
        """Return of each chunk of each micro-batch the gradients of what its experts were given.

        Args:
            lease: the layer's weights.
            in_layer: the micro-batches, whose chunks wait for their experts.
            gradients: of each, that of what the layer made of it, and others.
            adapters: the experts' adapters, to whose gradients these are added.
        """
        engine = self._engine
        groups = self._groups(lease)
        pairs = [
            (chunk, row.visit.gradient_of(chunk.number, by_row[0][:, chunk.span.slice]))
            for row, by_row in zip(in_layer, gradients, strict=True)
            for chunk in row.chunks
        ]
        for chunk, gradient in pairs:
            chunk.begin(engine, gradient)
        late = [pair for pair in pairs if pair[0].result_gradient is None]
        if late:
            results = groups.results([chunk.inputs for chunk, _ in late], "backward")
            for (chunk, gradient), result in zip(late, results, strict=True):
                chunk.keep(result)
                chunk.begin(engine, gradient)
            del results
        result_gradients = [
            chunk.result_gradient for chunk, _ in pairs if chunk.result_gradient is not None
        ]
        inputs = [chunk.inputs for chunk, _ in pairs]
        formed = iter(groups.differentiated(inputs, result_gradients, adapters))
        return [[next(formed) for _ in row.chunks] for row in in_layer]

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
        assert states is None, "a layer in groups goes through the layers with rows of a reference"
        engine = self._engine
        calls = rows.calls[self.number]
        hidden = [state.detach() for state in rows.states]
        in_layer = self._rows(lease, calls, hidden)
        results = self._results(lease, in_layer)
        after = engine.backend.rng_state()
        formed = TopGradients(torch.zeros((), dtype=torch.float32, device=engine.backend.device))
        gradients = list[list[Tensor]]()
        for index, row in enumerate(in_layer):
            engine.stop.poll()
            of_row = results.pop(0)
            output = row.output(engine, of_row)
            for chunk, result in zip(row.chunks, of_row, strict=True):
                chunk.keep(result)
            row.visit.note_routers(output)
            engine.backend.set_rng_state(after)
            with engine.retry.at("in the head and the loss"):
                value, gradient = loss_and_grad(index, output)
            after = engine.backend.rng_state()
            engine.observe(self.number + 1, [gradient])
            formed.add_value(value)
            gradients.append([gradient, *self._of_routers(index, row.call, formed)])
            del output, of_row
        adapters: Sums = {}
        of_experts = self._through_experts(lease, in_layer, gradients, adapters)
        trained = [(weight, None) for weight in engine.adapters_of(self.number)]
        for index, needs in enumerate(needs_grad):
            row_sums = GradientSums([*trained])
            input_gradient = in_layer[index].end(
                engine, gradients[index], of_experts[index], needs=needs, sums=row_sums
            )
            engine.observe(self.number, [input_gradient] * needs)
            formed.inputs.append(input_gradient)
            formed.weights.append(row_sums.pairs)
            of_experts[index] = []
        engine.backend.set_rng_state(after)
        formed.weights.append([*adapters.items()])
        return formed

    def _of_routers(self, index: int, call: LayerCall, formed: TopGradients) -> list[Tensor]:
        """Add the loss of a micro-batch's routers, if somebody asks, and the gradients of what
        those of lower layers have made; return those of this layer's."""
        routers = self._engine.routers
        if routers is None:
            formed.routers.append({})
            return []
        share, by_output = routers.loss_and_grad(index)
        formed.add_value(share)
        of_top = [by_output.pop(logits) for logits in call.routers or ()]
        formed.routers.append(by_output)
        return [by for by in of_top if by is not None]
