"""One micro-batch in one layer, through which it goes chunk after chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from lema.activations.hoststates import HostPool
from lema.engine.engine import Engine
from lema.model.flow import LayerCall, Suspended
from lema.model.sequence.cache import StatesComplete
from lema.model.sequence.chunks import ChunkedCall
from lema.model.sequence.states import ChunkStates, Span

__all__ = ["ChunkVisit", "GradientSums", "Weights"]

Weights: TypeAlias = Mapping[str, Tensor]


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
        return self._call.parts if isinstance(self._call, ChunkedCall) else [Span(0, length)]

    def forward(self, layer_input: Tensor, pool: HostPool | None = None) -> Tensor:
        """Return what the layer makes of `[rows, sequence, hidden]`, without a graph; what
        chunks keep for later ones stays. `pool`: where that is put; None: on the device."""
        outputs = None
        self._routed.clear()
        for chunk, span in enumerate(self.spans(layer_input.shape[1])):
            self.note_drawn()
            with torch.no_grad():
                output = self._run(
                    chunk, self._on_device(layer_input[self.rows_of(chunk), span.slice])
                )
            if outputs is None:
                shape = (*layer_input.shape[:2], *output.shape[2:])
                # zeros, because padding may be in no chunk
                if pool is None:
                    outputs = output.new_zeros(shape)
                else:
                    outputs = pool.take(shape, output.dtype)
                    outputs[:, : span.start] = 0
            outputs[:, span.slice] = output
            # before the next one, whose memory would be another
            del output
        assert outputs is not None, "a micro-batch has no tokens"
        if pool is not None:
            outputs[:, span.stop :] = 0
        return outputs

    def rows_of(self, chunk: int) -> slice:
        """Return the rows for which a chunk is computed; what it makes of them is that of all."""
        call = self._call
        return call.rows.rows_of(chunk) if isinstance(call, ChunkedCall) else slice(None)

    def gradient_of(self, chunk: int, gradient: Tensor) -> Tensor:
        """Return the gradient of what a chunk has made for the rows for which it was computed.

        Args:
            chunk: its number.
            gradient: of what it has made for all rows.
        """
        computed_once = self.rows_of(chunk).stop is not None
        return gradient.sum(dim=0, keepdim=True) if computed_once else gradient

    def _on_device(self, part: Tensor) -> Tensor:
        """Return a chunk's part of a hidden state, or of its gradient, on the device."""
        return part.to(self._engine.backend.device, non_blocking=True)

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

    def make_states(self, layer_input: Tensor) -> None:
        """Make what all chunks but the last keep for later ones; the last comes first in the
        backward."""
        if not (isinstance(self._call, ChunkedCall) and self._call.keeps):
            return
        for chunk, span in enumerate(self._call.parts[:-1]):
            self._engine.backend.set_rng_state(self.drawn[chunk])
            with torch.no_grad(), suppress(StatesComplete):
                part = layer_input[self.rows_of(chunk), span.slice]
                self._run(chunk, self._on_device(part), stops=True)

    def backward(
        self,
        layer_input: Tensor,
        gradient: Tensor,
        of_routers: Sequence[Tensor],
        *,
        needs: bool,
        sums: GradientSums | None = None,
        inplace: bool = False,
    ) -> Tensor | None:
        """Recompute and differentiate the chunks in reverse.

        Args:
            layer_input: `[rows, sequence, hidden]`.
            gradient: of what the layer made of it.
            of_routers: the gradients of what its routers made of it, if somebody asks.
            needs: whether the input's is asked for.
            sums: what else has a gradient; None: it is added to `.grad` of what trains.
            inplace: write the input's gradient where the output's is, chunk for chunk.

        Returns:
            The input's gradient, `[rows, sequence, hidden]`; None: it is not asked for.
        """
        input_gradient = None
        if needs:
            # zeros, because padding may be in no chunk
            input_gradient = gradient if inplace else torch.zeros_like(layer_input)
        spans = self.spans(layer_input.shape[1])
        if input_gradient is not None and inplace:
            input_gradient[:, : spans[0].start] = 0
            input_gradient[:, spans[-1].stop :] = 0
        num_rows, length = layer_input.shape[:2]
        self._asks = bool(of_routers)
        for chunk in reversed(range(len(spans))):
            part = spans[chunk].slice
            self._engine.backend.set_rng_state(self.drawn[chunk])
            rows = self.rows_of(chunk)
            leaf = self._on_device(layer_input[rows, part]).detach().requires_grad_(needs)
            with torch.enable_grad():
                output = self._run(chunk, leaf, again=True)
            roots = [(output, self.gradient_of(chunk, self._on_device(gradient[:, part])))]
            if of_routers:
                by_token = [by.view(num_rows, length, -1)[:, part] for by in of_routers]
                roots += [
                    (logits, self.gradient_of(chunk, by).reshape(logits.shape))
                    for logits, by in zip(self.take_routed(), by_token, strict=True)
                    if logits.requires_grad
                ]
            formed = self.differentiate(roots, leaf, sums)
            del roots
            if input_gradient is not None:
                assert formed is not None, "a layer's input does not reach its output"
                # that of rows for which it was not computed is zero, as it is in their sum
                if inplace and rows.stop is not None:
                    input_gradient[:, part] = 0
                input_gradient[rows, part] = formed
            del output, leaf, formed
        return input_gradient

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
