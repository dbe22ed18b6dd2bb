"""One layer visit as one autograd function, and the layer-major pass built of visits.

Every micro-batch of a step goes through a layer before the next layer is leased, so weights cross the link twice per
optimizer step however many micro-batches it has. The forward of a visit keeps only each micro-batch's input to the
layer (its boundary activation); the backward leases the layer again and recomputes (Chen et al. 2016,
https://arxiv.org/abs/1604.06174), one micro-batch at a time. The top layer, the head and the loss are one visit: the
graph is formed, used and freed while the layer is on lease.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lema.activations import BoundaryArena, StepBoundaries, graph_input
from lema.backend import Backend
from lema.boundaries import TierName
from lema.ends import Ends
from lema.flow import tensors_in
from lema.layercall import LayerCall
from lema.loss import LossChunks, targets_of
from lema.prefix import PrefixCache
from lema.recompute import Graph
from lema.split import Split
from lema.stream.lease import LayerStream, Lease
from lema.stream.schedule import forward_order, training_order

__all__ = ["StreamedModel"]

MODEL_INPUTS = frozenset({"input_ids", "attention_mask", "position_ids", "token_type_ids"})


class _LayerVisit:
    """One layer, forward and backward, over all micro-batches of a step."""

    def __init__(
        self, model: StreamedModel, layer: int, calls: Sequence[LayerCall], boundaries: StepBoundaries | None
    ) -> None:
        self._model, self._layer, self._calls, self._boundaries = model, layer, calls, boundaries
        self._graphs: list[tuple[Graph, GradientEdge]] = []
        self._boundary: list[Tensor] = []  # of the micro-batch whose backward runs
        self._found: dict[int, Tensor] = {}  # gradients of the inputs

    def forward(self, hidden: Sequence[Tensor], needs_grad: Sequence[bool]) -> tuple[Tensor, ...]:
        """Run every micro-batch through the layer: `[batch, sequence, hidden]` each, in and out."""
        model, outputs = self._model, []
        with model.stream.lease(self._layer) as lease, model.stream.trace.span("forward", f"layer {self._layer}"):
            for index, (call, state, needs) in enumerate(zip(self._calls, hidden, needs_grad, strict=True)):
                given = state.detach() if self._boundaries is None else self._boundaries.keep(self._layer, index, state)
                graph = Graph(None if self._boundaries is None else self._runner(call, needs))
                with graph.built(lease):
                    if needs:
                        given = graph_input(model.anchor, given, self._found, index)
                    output = model.split.run_layer(self._layer, lease.weights, call, given)
                # The edge, not the output: that is the next layer's input, and kept as such.
                self._graphs.append((graph, get_gradient_edge(output)))
                outputs.append(output.detach())
        return tuple(outputs)

    def backward(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Turn the gradients of the outputs into those of the inputs; adapters' gradients are added to `.grad`."""
        model = self._model
        after = model.backend.rng_state()
        with model.stream.lease(self._layer) as lease, model.stream.trace.span("backward", f"layer {self._layer}"):
            for index, gradient in enumerate(gradients):
                graph, edge = self._graphs[index]
                with graph.differentiated(lease), self._fetched(index):
                    torch.autograd.backward(edge, gradient)
                self._graphs[index] = None  # type: ignore[call-overload] # this micro-batch's graph is done with
        model.backend.set_rng_state(after)
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
        model, layer, boundary, state = self._model, self._layer, self._boundary, self._model.generator_state()

        def run(lease: Lease) -> Tensor:
            model.backend.set_rng_state(state)
            given = boundary[0].detach().requires_grad_(needs)
            return model.split.run_layer(layer, lease.weights, call, given)

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
        model: StreamedModel,
        calls: Sequence[LayerCall],
        ends: Ends,
        anchor: Tensor,  # noqa: ARG004 - autograd looks at it
        *hidden: Tensor,
    ) -> Tensor:
        top = model.split.num_layers - 1
        adapters, trace = model.adapters_of(top), model.stream.trace
        ctx.ends, ctx.inputs, ctx.gradients = ends, [], []
        total = torch.zeros((), dtype=torch.float32, device=model.backend.device)
        with model.stream.lease(top) as lease:
            for index, (call, state) in enumerate(zip(calls, hidden, strict=True)):
                needs = ctx.needs_input_grad[4 + index]
                leaf = state.detach().requires_grad_(needs)
                with torch.enable_grad(), trace.span("forward", f"layer {top}"):
                    output = model.split.run_layer(top, lease.weights, call, leaf)
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


class StreamedModel:
    """A model whose decoder layers are leased from a stream, one visit after the other.

    Args:
        split: the model in its three parts.
        stream: where the layers' weights come from.
        backend: the device.
        recompute: keep only boundary activations and recompute each layer in the backward; else keep the graph, in
            which weights are references that pin nothing.
        loss_chunk_tokens: logits exist for this many tokens at a time.
        boundaries: where boundary activations wait for the backward: "device", "host" or "disk".
        offload_dir: where the last of these has its file; None: where the system keeps temporary files.

    Attributes:
        prefix: keeps what the layers below the lowest trained one make, while a run that repeats its batches is on.
    """

    def __init__(
        self,
        split: Split,
        stream: LayerStream,
        backend: Backend,
        *,
        recompute: bool = True,
        loss_chunk_tokens: int = 1024,
        boundaries: TierName = "device",
        offload_dir: Path | None = None,
    ) -> None:
        self.split, self.stream, self.backend = split, stream, backend
        self.recompute = recompute
        self._loss_chunk_tokens = loss_chunk_tokens
        self.arena = BoundaryArena(backend, boundaries, offload_dir, stream.trace)
        self.anchor = torch.zeros((), device=backend.device, requires_grad=True)
        self.prefix: PrefixCache | None = None
        self._state: Tensor | None = None  # of the generator
        self._starts_below = False  # whether something before the layers trains; learnt from a step

    def close(self) -> None:
        """Give back where boundary activations wait."""
        self.arena.close()

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

    def trained_outside(self) -> list[nn.Parameter]:
        """Return the trainable parameters outside the decoder layers."""
        inside = f"{self.split.layers_name}."
        named = self.split.model.named_parameters()
        return [p for name, p in named if p.requires_grad and not name.startswith(inside)]

    @property
    def lowest_trained(self) -> int:
        """The lowest layer that gradients reach: nothing below it is visited by the backward."""
        if self._starts_below:
            return 0
        trained = (layer for layer in range(self.split.num_layers) if self.adapters_of(layer))
        return next(trained, self.split.num_layers - 1)

    def announce_step(self, micro_batches: Sequence[Mapping[str, Tensor]] | None = None) -> None:
        """Announce the leases of one training step, so that its first layers are read while others work.

        Args:
            micro_batches: of that step; with `prefix` they say which layers it leaves out.
        """
        order = training_order(self.split.num_layers, self.lowest_trained)
        self.stream.announce(order[0 if micro_batches is None else self._first_layer(micro_batches) :])

    def _first_layer(self, micro_batches: Sequence[Mapping[str, Tensor]]) -> int:
        """Return the lowest layer that a step runs."""
        return self.prefix.layer if self.prefix is not None and self.prefix.holds(micro_batches) else 0

    def loss(
        self,
        micro_batches: Sequence[Mapping[str, Tensor]],
        *,
        num_tokens: int | None = None,
        scale: float = 1.0,
        logits: list[Tensor] | None = None,
    ) -> Tensor:
        """Return the cross-entropy of a step, averaged over all its trained tokens; call `.backward()` on it.

        Args:
            micro_batches: each with `input_ids` and `labels`, int64 `[batch, sequence]`, and `attention_mask` where
                something is padded. Labels are not shifted; -100 is not trained.
            num_tokens: divide the summed loss by this instead (gradient accumulation over several calls).
            scale: gradients are formed of `scale` times the loss (for half-precision gradients); the gradient that
                arrives from above is divided by it.
            logits: a list to which the logits `[batch, sequence, vocabulary]` of every micro-batch are appended.
        """
        chunks = self._chunks(micro_batches, num_tokens=num_tokens, scale=scale, logits=logits)
        if not self.stream.announced:
            self.announce_step(micro_batches)
        top, outside = self.split.num_layers - 1, self.trained_outside()
        start, before = self._first_layer(micro_batches), self.generator_state()
        with nullcontext() if start else self.stream.lease(0) as first:
            hidden, calls = self._prelude(micro_batches, first, differentiate=bool(outside))
            ends = Ends(self.backend, chunks, hidden, calls, outside)
            self._starts_below, hidden = ends.reach_below, ends.start(self.anchor)
            lowest = self.lowest_trained
            boundaries = self.arena.step(hidden, range(lowest, top)) if self.recompute else None
            if start and self.prefix is not None:
                hidden = self.prefix.fetch(micro_batches)
            elif top > 0:
                hidden = self._visit(0, calls[0], hidden, boundaries, differentiate=lowest <= 0)
        for layer in range(max(start, 1), top + 1):
            if self.prefix is not None and layer == self.prefix.layer > start:
                self.prefix.reach(lowest)
                drawn = not torch.equal(before, self.backend.rng_state())
                handed_on = any(call.received is not None for call in calls[layer])
                self.prefix.keep(micro_batches, hidden, drawn=drawn, handed_on=handed_on)
            if layer < top:
                hidden = self._visit(layer, calls[layer], hidden, boundaries, differentiate=lowest <= layer)
        loss: Tensor = _Turn.apply(self, calls[top], ends, self.anchor, *hidden)  # type: ignore[no-untyped-call] # torch's is
        return loss

    @torch.no_grad()
    def evaluate(
        self, micro_batches: Sequence[Mapping[str, Tensor]], logits: list[Tensor] | None = None
    ) -> tuple[Tensor, int]:
        """Return the mean cross-entropy of the trained tokens (fp32 scalar) and how many they are."""
        chunks = self._chunks(micro_batches, logits=logits)
        *_, hidden = self._forward(micro_batches)
        values = [chunks.forward(index, state) for index, state in enumerate(hidden)]
        return torch.stack(values).sum(), chunks.trained_tokens

    @torch.no_grad()
    def first_non_finite(self, micro_batches: Sequence[Mapping[str, Tensor]]) -> str | None:
        """Run forward once more and name the first part whose output is not finite; None: all are."""
        names = ["the embeddings", *(f"{self.split.layers_name}.{i}" for i in range(self.split.num_layers))]
        for name, hidden in zip(names, self._forward(micro_batches), strict=True):
            if not all(bool(state.isfinite().all()) for state in hidden):
                return name
        logits = [self.split.head(state) for state in hidden]
        return None if all(bool(block.isfinite().all()) for block in logits) else "the head"

    def _forward(self, micro_batches: Sequence[Mapping[str, Tensor]]) -> Iterator[tuple[Tensor, ...]]:
        """Yield the hidden states before the first layer and after each."""
        self.stream.cancel()
        self.stream.announce(forward_order(self.split.num_layers))
        with self.stream.lease(0) as first:
            hidden, calls = self._prelude(micro_batches, first)
            yield hidden
            hidden = self._visit(0, calls[0], hidden, differentiate=False)
        yield hidden
        for layer in range(1, self.split.num_layers):
            hidden = self._visit(layer, calls[layer], hidden, differentiate=False)
            yield hidden

    def _chunks(self, micro_batches: Sequence[Mapping[str, Tensor]], **options: Any) -> LossChunks:
        targets = [targets_of(batch["labels"].to(self.backend.device)) for batch in micro_batches]
        return LossChunks(self.split.head, targets, self._loss_chunk_tokens, **options)

    def _prelude(
        self, micro_batches: Sequence[Mapping[str, Tensor]], first: Lease | None, *, differentiate: bool = False
    ) -> tuple[tuple[Tensor, ...], list[list[LayerCall]]]:
        """Return each micro-batch's hidden state before the layers, and per layer the call of each micro-batch."""
        preludes, weights = [], {} if first is None else first.weights  # used once; None: they have been
        for batch in micro_batches:
            inputs = {name: value.to(self.backend.device) for name, value in batch.items() if name in MODEL_INPUTS}
            preludes.append(self.split.prelude(inputs, weights, differentiate=differentiate))
        calls = [[prelude.calls[layer] for prelude in preludes] for layer in range(self.split.num_layers)]
        return tuple(prelude.hidden for prelude in preludes), calls

    def _visit(
        self,
        layer: int,
        calls: Sequence[LayerCall],
        hidden: tuple[Tensor, ...],
        boundaries: StepBoundaries | None = None,
        *,
        differentiate: bool,
    ) -> tuple[Tensor, ...]:
        if differentiate:
            visited: tuple[Tensor, ...] = _Visit.apply(  # type: ignore[no-untyped-call] # torch's is
                _LayerVisit(self, layer, calls, boundaries), self.anchor, *hidden
            )
            return visited
        with torch.no_grad(), self.stream.lease(layer) as lease, self.stream.trace.span("forward", f"layer {layer}"):
            return tuple(
                self.split.run_layer(layer, lease.weights, call, state)
                for call, state in zip(calls, hidden, strict=True)
            )
