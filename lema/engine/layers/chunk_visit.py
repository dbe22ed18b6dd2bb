"""One micro-batch in one layer, through which it goes chunk after chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from lema.activations.chunks.copies import ResidentChunks
from lema.activations.chunks.cuts import ChunkInputs, Cut, Cuts
from lema.activations.chunks.hostpool import HostPool
from lema.activations.chunks.results import ChunkResults
from lema.engine.engine import Engine
from lema.model.flow import LayerCall, Suspended
from lema.model.sequence.cache import StatesComplete
from lema.model.sequence.chunks import ChunkedCall
from lema.model.sequence.states import ChunkStates, Span

__all__ = ["ChunkVisit", "GradientSums", "KeepChunk", "Weights", "cuts_of"]

Weights: TypeAlias = Mapping[str, Tensor]
KeepChunk: TypeAlias = Callable[[int, Tensor], AbstractContextManager[Tensor]]
"""Keeps a chunk of a layer's input, by its number, and yields what the layer computes with."""


def spans_of(call: LayerCall, length: int) -> Sequence[Span]:
    """Return the chunks of a micro-batch of so many tokens, as they lie in its hidden state; one,
    if the call is not in chunks."""
    return call.parts if isinstance(call, ChunkedCall) else [Span(0, length)]


def rows_of(call: LayerCall, chunk: int) -> slice:
    """Return the rows for which a chunk is computed; what it makes of them is that of all."""
    return call.rows.rows_of(chunk) if isinstance(call, ChunkedCall) else slice(None)


def cuts_of(call: LayerCall, length: int) -> Cuts:
    """Return the chunks of a layer's input that are read, and the order in which its backward reads
    them: those that leave something to later ones, and then all in reverse.

    Args:
        call: of the layer on a micro-batch.
        length: tokens of the micro-batch.
    """
    spans = spans_of(call, length)
    chunks = tuple(Cut(rows_of(call, number), span.slice) for number, span in enumerate(spans))
    first = range(len(spans) - 1) if isinstance(call, ChunkedCall) and call.keeps else range(0)
    return Cuts(chunks, (*first, *reversed(range(len(spans)))))


@dataclass(eq=False)
class GradientSums:
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


class ChunkVisit:
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

    def spans(self, length: int) -> Sequence[Span]:
        """Return the chunks of a micro-batch of so many tokens, as they lie in its hidden state."""
        return spans_of(self._call, length)

    def inputs(
        self, layer_input: Tensor, pool: HostPool | None, order: Iterable[int]
    ) -> AbstractContextManager[ChunkInputs]:
        """Return a context that yields the chunks of the layer's input.

        Args:
            layer_input: `[rows, sequence, hidden]`.
            pool: where it is; None: on the device.
            order: in which chunks are read.
        """
        return self._chunks_of(layer_input, pool, self.cuts(layer_input.shape[1]).chunks, order)

    def cuts(self, length: int) -> Cuts:
        """Return the chunks of the layer's input, of so many tokens."""
        return cuts_of(self._call, length)

    def _chunks_of(
        self, state: Tensor, pool: HostPool | None, cuts: Sequence[Cut], order: Iterable[int]
    ) -> AbstractContextManager[ChunkInputs]:
        """Return a context that yields chunks of a hidden state or its gradient, on the device."""
        if pool is not None:
            return pool.uploads(state, cuts, order)
        return nullcontext(ResidentChunks(state, cuts, self._engine.backend.device))

    def forward(
        self, layer_input: Tensor, pool: HostPool | None = None, keep: KeepChunk | None = None
    ) -> Tensor:
        """Return what the layer makes of `[rows, sequence, hidden]`, without a graph; what
        chunks keep for later ones stays. `pool`: where the input is, and where that is put; None:
        on the device. `keep`: keeps the chunks of the input."""
        self._routed.clear()
        num_rows, length = layer_input.shape[:2]
        spans = self.spans(length)
        of_chunks = [Cut(slice(None), span.slice) for span in spans]
        result = ChunkResults(pool, num_rows, length, of_chunks)
        with self.inputs(layer_input, pool, range(len(spans))) as inputs, result.filled():
            for chunk, cut in enumerate(of_chunks):
                self.note_drawn()
                with ExitStack() as stack:
                    part = stack.enter_context(inputs.chunk(chunk))
                    if keep is not None:
                        part = stack.enter_context(keep(chunk, part))
                    with torch.no_grad():
                        output = self._run(chunk, part)
                    result.put(cut, output)
                    # before the next one, whose memory would be another
                    del output, part
        return result.state

    def rows_of(self, chunk: int) -> slice:
        """Return the rows for which a chunk is computed; what it makes of them is that of all."""
        return rows_of(self._call, chunk)

    def gradient_of(self, chunk: int, gradient: Tensor) -> Tensor:
        """Return the gradient of what a chunk has made for the rows for which it was computed.

        Args:
            chunk: its number.
            gradient: of what it has made for all rows.
        """
        computed_once = self.rows_of(chunk).stop is not None
        return gradient.sum(dim=0, keepdim=True) if computed_once else gradient

    def note_drawn(self) -> None:
        """Note the generator's state before the next chunk."""
        self.drawn.append(self._engine.generator_state())

    def note_routers(self, output: Tensor, *, differentiable: bool = True) -> None:
        """Note in the call what the layer's routers have made of all chunks, if somebody asks.

        Args:
            output: what the layer has made.
            differentiable: whether gradients of it may come.
        """
        if self._call.routers is None:
            return
        num_rows, length = output.shape[:2]
        spans = self.spans(length)
        of_sequence = list[Tensor]()
        for parts in zip(*self._routed, strict=True):
            # zeros, because padding may be in no chunk
            logits = parts[0].new_zeros(num_rows, length, parts[0].shape[-1])
            for span, part in zip(spans, parts, strict=True):
                logits[:, span.slice] = part.reshape(-1, span.stop - span.start, part.shape[-1])
            logits = logits.flatten(0, 1) if parts[0].dim() == 2 else logits
            of_sequence.append(logits.requires_grad_(differentiable))
        self._routed.clear()
        self._call.routers[:] = of_sequence

    def make_states(self, inputs: ChunkInputs) -> None:
        """Make what all chunks but the last keep for later ones; the last comes first in the
        backward."""
        if not (isinstance(self._call, ChunkedCall) and self._call.keeps):
            return
        for chunk in range(len(self._call.parts) - 1):
            self._engine.backend.set_rng_state(self.drawn[chunk])
            with inputs.chunk(chunk) as part, torch.no_grad(), suppress(StatesComplete):
                self._run(chunk, part, stops=True)

    def backward(
        self,
        inputs: ChunkInputs,
        gradient: Tensor,
        of_routers: Sequence[Tensor],
        *,
        needs: bool,
        sums: GradientSums | None = None,
        pool: HostPool | None = None,
        inplace: bool = False,
    ) -> Tensor | None:
        """Recompute and differentiate the chunks in reverse.

        Args:
            inputs: the chunks of the layer's input.
            gradient: of what the layer made of it, `[rows, sequence, hidden]`.
            of_routers: the gradients of what its routers made of it, if somebody asks.
            needs: whether the input's is asked for.
            sums: what else has a gradient; None: it is added to `.grad` of what trains.
            pool: where gradients are; None: on the device.
            inplace: write the input's gradient where the output's is, chunk for chunk.

        Returns:
            The input's gradient, `[rows, sequence, hidden]`; None: it is not asked for.
        """
        num_rows, length = gradient.shape[:2]
        spans = self.spans(length)
        of_chunks = [Cut(slice(None), span.slice) for span in spans]
        result = ChunkResults(pool, num_rows, length, of_chunks, gradient if inplace else None)
        self._asks = bool(of_routers)
        order = reversed(range(len(spans)))
        with self._chunks_of(gradient, pool, of_chunks, order) as gradients, result.filled():
            for chunk in reversed(range(len(spans))):
                part = spans[chunk].slice
                self._engine.backend.set_rng_state(self.drawn[chunk])
                with inputs.chunk(chunk) as layer_input, gradients.chunk(chunk) as of_output:
                    leaf = layer_input.detach().requires_grad_(needs)
                    with torch.enable_grad():
                        output = self._run(chunk, leaf, again=True)
                    roots = [(output, self.gradient_of(chunk, of_output))]
                    if of_routers:
                        by_token = [by.view(num_rows, length, -1)[:, part] for by in of_routers]
                        roots += [
                            (logits, self.gradient_of(chunk, by).reshape(logits.shape))
                            for logits, by in zip(self.take_routed(), by_token, strict=True)
                            if logits.requires_grad
                        ]
                    formed = self.differentiate(roots, leaf, sums)
                    del roots
                    if needs:
                        assert formed is not None, "a layer's input does not reach its output"
                        result.put(of_chunks[chunk], self._of_all_rows(chunk, formed, num_rows))
                    del output, leaf, formed, layer_input, of_output
        return result.state if needs else None

    def _of_all_rows(self, chunk: int, gradient: Tensor, num_rows: int) -> Tensor:
        """Return the gradient of a chunk's input for all rows: that of rows for which it was not
        computed is zero, as it is in their sum."""
        if self.rows_of(chunk).stop is None:
            return gradient
        return torch.cat([gradient, gradient.new_zeros(num_rows - 1, *gradient.shape[1:])])

    def differentiate(
        self, outputs: Sequence[tuple[Tensor, Tensor]], leaf: Tensor, sums: GradientSums | None
    ) -> Tensor | None:
        """Differentiate a chunk; return the gradient of its input, if that is asked for. `made`:
        what the layer has made of it, with gradients."""
        states = self._states
        handed_on = [] if states is None else states.roots()
        entered = [] if states is None else states.leaves()
        roots = [root for root, _ in (*outputs, *handed_on)]
        root_gradients = [by for _, by in (*outputs, *handed_on)]
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
        chunk_call = self._call_of(chunk, asks=self._asks and not stops, again=again)
        with self._holding(chunk, stops=stops):
            output = self._engine.split.run_layer(
                self._number, self._weights, chunk_call, layer_input, compiled=False
            )
        self._take_routers(chunk_call)
        return output

    def half(self, chunk: int, layer_input: Tensor, *, asks: bool, again: bool) -> Suspended:
        """Run the layer on one chunk without its experts, and what needs their result.

        Args:
            chunk: its number.
            layer_input: of the chunk.
            asks: whether somebody asks what routers make.
            again: as in `_run`.
        """
        chunk_call = self._call_of(chunk, asks=asks, again=again)
        split = self._engine.split
        run = partial(
            split.run_layer, self._number, self._weights, chunk_call, layer_input, compiled=False
        )
        with self._holding(chunk):
            half = split.suspended(self._number, run)
        self._take_routers(chunk_call)
        return half

    def take_routed(self) -> list[Tensor]:
        """Return what routers have made of the chunk that ran last."""
        return self._routed.pop() if self._routed else []

    def _call_of(self, chunk: int, *, asks: bool, again: bool) -> LayerCall:
        """Return the call on one chunk."""
        call = self._call
        if isinstance(call, ChunkedCall):
            call = call.chunk(chunk)
        elif again:
            call = replace(call)
        call.ask_routers(asks)
        return call

    def _take_routers(self, call: LayerCall) -> None:
        """Take what routers have made of a chunk out of its call."""
        if call.routers is not None:
            self._routed.append([*call.routers])
        if call is not self._call:
            call.drop_routers()

    def _holding(self, chunk: int, *, stops: bool = False) -> AbstractContextManager[None]:
        """Return the context in which a chunk leaves what it keeps here."""
        call = self._call
        if not isinstance(call, ChunkedCall):
            return nullcontext()
        if self._states is None:
            self._states = call.rows.states(self._number, self._engine.host_keys)
        return call.cache.holding(self._number, call.spans[chunk], self._states, stops=stops)
