"""One layer visit as one autograd function, and the layer-major pass built of visits.

Every micro-batch of a step goes through a layer before the next layer is leased, so weights cross the link twice per
optimizer step however many micro-batches it has. The forward of a visit keeps only each micro-batch's input to the
layer (its boundary activation); the backward leases the layer again and recomputes (Chen et al. 2016,
https://arxiv.org/abs/1604.06174), one micro-batch at a time. The top layer, the head and the loss are one visit: the
graph is formed, used and freed while the layer is on lease.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lema.activations import BoundaryArena
from lema.backend import Backend
from lema.loss import LossChunks, targets_of
from lema.split import LayerCall, Split
from lema.stream.lease import LayerStream, Lease
from lema.stream.schedule import forward_order, training_order

__all__ = ["StreamedModel"]

MODEL_INPUTS = frozenset({"input_ids", "attention_mask", "position_ids", "token_type_ids"})


class _LayerVisit:
    """One layer, forward and backward, over all micro-batches of a step."""

    def __init__(
        self, model: StreamedModel, layer: int, calls: Sequence[LayerCall], arena: BoundaryArena | None
    ) -> None:
        self._model, self._layer, self._calls, self._arena = model, layer, calls, arena
        self._inputs: list[Tensor] = []
        self._outputs: list[Tensor] = []  # with their graphs, where nothing is recomputed
        self._states: list[Tensor] = []
        self._lease: Lease | None = None

    def forward(self, hidden: Sequence[Tensor], needs_grad: Sequence[bool]) -> tuple[Tensor, ...]:
        """Run every micro-batch through the layer: `[batch, sequence, hidden]` each, in and out."""
        model, outputs = self._model, []
        with model.stream.lease(self._layer) as lease:
            for index, (call, state, needs) in enumerate(zip(self._calls, hidden, needs_grad, strict=True)):
                kept = state.detach() if self._arena is None else self._arena.keep(self._layer, index, state)
                self._inputs.append(kept.requires_grad_(needs))
                if model.recompute:
                    self._states.append(model.backend.rng_state())
                    outputs.append(model.split.run_layer(self._layer, lease.weights, call, state))
                else:
                    outputs.append(self._keep_graph(lease, call, self._inputs[-1]))
        return tuple(outputs)

    def backward(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Turn the gradients of the outputs into those of the inputs; adapters' gradients are added to `.grad`."""
        model = self._model
        after = model.backend.rng_state()
        with model.stream.lease(self._layer) as self._lease:
            for index, gradient in enumerate(gradients):
                output = self._recompute(index) if model.recompute else self._outputs[index]
                torch.autograd.backward(output, gradient)
                if not model.recompute:
                    self._outputs[index] = output.detach()  # this micro-batch's graph is done with
        self._lease = None
        model.backend.set_rng_state(after)
        found = [state.grad for state in self._inputs]
        self._inputs, self._outputs, self._states, self._arena = [], [], [], None
        return found

    def _recompute(self, index: int) -> Tensor:
        model = self._model
        assert self._lease is not None
        model.backend.set_rng_state(self._states[index])
        with torch.enable_grad():
            return model.split.run_layer(self._layer, self._lease.weights, self._calls[index], self._inputs[index])

    def _keep_graph(self, lease: Lease, call: LayerCall, state: Tensor) -> Tensor:
        """Run with grad; the graph refers to weights by place, and finds them in the lease of the backward."""

        def pack(tensor: Tensor) -> Any:
            reference = lease.refer(tensor)
            return tensor if reference is None else reference

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            assert self._lease is not None, "a leased weight was read outside its layer's backward"
            return self._lease.resolve(packed)

        with torch.enable_grad(), saved_tensors_hooks(pack, unpack):
            output = self._model.split.run_layer(self._layer, lease.weights, call, state)
        self._outputs.append(output)
        return output.detach()


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
        loss: LossChunks,
        anchor: Tensor,  # noqa: ARG004 - autograd looks at it
        *hidden: Tensor,
    ) -> Tensor:
        top = model.split.num_layers - 1
        adapters = model.adapters_of(top)
        ctx.adapters, ctx.scale, ctx.inputs, ctx.adapter_gradients = adapters, loss.scale, [], []
        total = torch.zeros((), dtype=torch.float32, device=model.backend.device)
        with model.stream.lease(top) as lease:
            for index, (call, state) in enumerate(zip(calls, hidden, strict=True)):
                needs = ctx.needs_input_grad[4 + index]
                leaf = state.detach().requires_grad_(needs)
                with torch.enable_grad():
                    output = model.split.run_layer(top, lease.weights, call, leaf)
                value, gradient = loss.backward(index, output.detach())
                total = total + value
                wanted = [leaf] * needs + adapters
                found = torch.autograd.grad(output, wanted, gradient, allow_unused=True) if wanted else ()
                ctx.inputs.append(found[0] if needs else None)
                ctx.adapter_gradients.append(found[needs:])
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        factor = gradients[0] / ctx.scale
        for found in ctx.adapter_gradients:
            pairs = [(p, g * factor) for p, g in zip(ctx.adapters, found, strict=True) if g is not None]
            if pairs:
                torch.autograd.backward([p for p, _ in pairs], [g for _, g in pairs])  # adds to .grad, in order
        scaled = [None if state is None else state * factor.to(state.dtype) for state in ctx.inputs]
        ctx.adapter_gradients = ctx.inputs = None
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
    """

    def __init__(
        self,
        split: Split,
        stream: LayerStream,
        backend: Backend,
        *,
        recompute: bool = True,
        loss_chunk_tokens: int = 1024,
    ) -> None:
        self.split, self.stream, self.backend = split, stream, backend
        self.recompute = recompute
        self._loss_chunk_tokens = loss_chunk_tokens
        self._anchor = torch.zeros((), device=backend.device, requires_grad=True)

    def adapters_of(self, layer: int) -> list[nn.Parameter]:
        """Return the trainable parameters of one layer."""
        return [p for p in self.split.layers[layer].parameters() if p.requires_grad]

    @property
    def lowest_trained(self) -> int:
        """The lowest layer that trains: nothing below it is visited by the backward."""
        trained = (layer for layer in range(self.split.num_layers) if self.adapters_of(layer))
        return next(trained, self.split.num_layers - 1)

    def announce_step(self) -> None:
        """Announce the leases of one training step, so that its first layers are read while others work."""
        self.stream.announce(training_order(self.split.num_layers, self.lowest_trained))

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
            self.announce_step()
        top, lowest = self.split.num_layers - 1, self.lowest_trained
        with self.stream.lease(0) as first:
            hidden, calls = self._prelude(micro_batches, first)
            arena = BoundaryArena(hidden, range(lowest, top)) if self.recompute else None
            if top > 0:
                hidden = self._visit(0, calls[0], hidden, arena, differentiate=lowest <= 0)
        for layer in range(1, top):
            hidden = self._visit(layer, calls[layer], hidden, arena, differentiate=lowest <= layer)
        loss: Tensor = _Turn.apply(self, calls[top], chunks, self._anchor, *hidden)  # type: ignore[no-untyped-call] # torch's is
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
        self, micro_batches: Sequence[Mapping[str, Tensor]], first: Lease
    ) -> tuple[tuple[Tensor, ...], list[list[LayerCall]]]:
        """Return each micro-batch's hidden state before the layers, and per layer the call of each micro-batch."""
        preludes = []
        for batch in micro_batches:
            inputs = {name: value.to(self.backend.device) for name, value in batch.items() if name in MODEL_INPUTS}
            preludes.append(self.split.prelude(inputs, first.weights))
        calls = [[prelude.calls[layer] for prelude in preludes] for layer in range(self.split.num_layers)]
        return tuple(prelude.hidden for prelude in preludes), calls

    def _visit(
        self,
        layer: int,
        calls: Sequence[LayerCall],
        hidden: tuple[Tensor, ...],
        arena: BoundaryArena | None = None,
        *,
        differentiate: bool,
    ) -> tuple[Tensor, ...]:
        if differentiate:
            visited: tuple[Tensor, ...] = _Visit.apply(  # type: ignore[no-untyped-call] # torch's is
                _LayerVisit(self, layer, calls, arena), self._anchor, *hidden
            )
            return visited
        with torch.no_grad(), self.stream.lease(layer) as lease:
            return tuple(
                self.split.run_layer(layer, lease.weights, call, state)
                for call, state in zip(calls, hidden, strict=True)
            )
