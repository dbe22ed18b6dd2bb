"""A causal language model in three parts: what comes before the decoder layers, the layers, and what comes after.

No part is ours. The model's own forward is run with every layer's `forward` replaced by a recorder, so embeddings,
masks, rotary tables, final norm, soft-capping and logit scales are the model's own code:

- the *prelude* records each layer's arguments and stops at the last layer;
- the *head* lets the last layer return the true hidden state and runs to the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lema.backend import Backend
from lema.errors import ModelError
from lema.skeleton import find_layers

__all__ = ["LayerCall", "Prelude", "Split"]

BASE_LAYER = ".base_layer"  # where an adapter keeps the module it wraps


@dataclass(frozen=True)
class LayerCall:
    """The arguments one layer was called with, but for the hidden state."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden_is_keyword: bool

    @classmethod
    def record(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[LayerCall, Tensor]:
        """Take a call apart into its hidden state, `[batch, sequence, hidden]`, and the rest."""
        if args:
            return cls(args[1:], kwargs, False), args[0]
        rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        return cls((), rest, True), kwargs["hidden_states"]

    def arguments(self, hidden: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the call's arguments with `hidden` in its place."""
        if self.hidden_is_keyword:
            return (), {"hidden_states": hidden, **self.kwargs}
        return (hidden, *self.args), self.kwargs


@dataclass(frozen=True)
class Prelude:
    """One micro-batch before its first layer: the hidden state, and the call of every layer."""

    hidden: Tensor
    calls: tuple[LayerCall, ...]


class _ReachedLastLayer(Exception):
    """Stops the model's forward once every layer's call is recorded."""


class Split:
    """The parts of one model. The layers' weights are given at each call; all others are the model's own.

    Args:
        model: the model, adapters attached or not; every parameter outside the decoder layers is real.
        backend: for the generator state and autocast.
    """

    def __init__(self, model: PreTrainedModel, backend: Backend) -> None:
        self.model = model
        self.layers_name, self.layers = find_layers(model)
        self._backend = backend
        self._dtype = model.dtype
        self._names: dict[int, dict[str, str]] = {}  # per layer: a weight's name on disk -> its name in the module now
        self._wrap: Callable[[Tensor], Any] | None = None  # how a layer returns its hidden state; learnt from a call

    @property
    def num_layers(self) -> int:
        """How many decoder layers there are."""
        return len(self.layers)

    def prelude(self, batch: Mapping[str, Tensor], first_layer_weights: Mapping[str, Tensor]) -> Prelude:
        """Run the model up to its layers.

        Args:
            batch: `input_ids`, int64 `[batch, sequence]`, and what else the model's forward takes.
            first_layer_weights: of layer 0, by name; used once, to learn what a layer returns.
        """
        calls: list[LayerCall] = []
        hidden: list[Tensor] = []

        def recorder(index: int) -> Callable[..., Any]:
            def record(*args: Any, **kwargs: Any) -> Any:
                call, state = LayerCall.record(args, kwargs)
                calls.append(call)
                if index == 0:
                    hidden.append(state)
                    if self._wrap is None:
                        self._wrap = self._learn(call, state, first_layer_weights)
                if index == self.num_layers - 1:
                    raise _ReachedLastLayer
                assert self._wrap is not None
                return self._wrap(state)

            return record

        recorders = [recorder(index) for index in range(self.num_layers)]
        with torch.no_grad(), self.autocast(), self.replaced(recorders), suppress(_ReachedLastLayer):
            self.model(**batch, use_cache=False)
        if len(calls) != self.num_layers:
            raise ModelError(
                f"the model called {len(calls)} of its {self.num_layers} layers before the last one",
                where=f"{self.layers_name} of {type(self.model).__name__}",
                how="only models that run each layer of one stack once, in order, stream",
            )
        return Prelude(hidden[0], tuple(calls))

    def run_layer(self, index: int, weights: Mapping[str, Tensor], call: LayerCall, hidden: Tensor) -> Tensor:
        """Run one layer on `hidden`, `[batch, sequence, hidden]`, with the weights given; returns the same shape."""
        with self.autocast():
            out = self.call_layer(index, weights, *call.arguments(hidden))
        return out if isinstance(out, Tensor) else out[0]

    def call_layer(
        self, index: int, weights: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call one layer's own forward, even while it is replaced, with the weights given; returns what it returns."""
        layer = self.layers[index]
        replacement = layer.__dict__.pop("forward", None)
        try:
            # Nothing is tied within a layer; looking for it would walk the modules at every call.
            return torch.func.functional_call(layer, self._rename(index, weights), args, kwargs, tie_weights=False)
        finally:
            if replacement is not None:
                layer.forward = replacement

    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits `[rows, tokens, vocabulary]` of the last layer's output `[rows, tokens, hidden]`.

        The part of the forward before the layers runs on placeholder tokens, and its result is thrown away. The
        generator is put back before the head begins, so that what it draws is what the whole model would draw.
        """
        state = self._backend.rng_state()
        wrap = self._wrap
        assert wrap is not None, "the head runs after the prelude"

        def keep(*args: Any, **kwargs: Any) -> Any:
            return wrap(LayerCall.record(args, kwargs)[1])

        def finish(*_: Any, **__: Any) -> Any:
            self._backend.set_rng_state(state)
            return wrap(hidden)

        placeholder = int(getattr(self.model.config, "pad_token_id", None) == 0)  # any token but padding
        tokens = torch.full(hidden.shape[:2], placeholder, dtype=torch.long, device=hidden.device)
        with self.autocast(), self.replaced([keep] * (self.num_layers - 1) + [finish]):
            logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits

    def _learn(self, call: LayerCall, hidden: Tensor, weights: Mapping[str, Tensor]) -> Callable[[Tensor], Any]:
        """Run layer 0 for real, once, to see whether layers return a tensor or a tuple."""
        state = self._backend.rng_state()
        out = self.call_layer(0, weights, *call.arguments(hidden))
        self._backend.set_rng_state(state)
        if isinstance(out, Tensor):
            return lambda hidden: hidden
        rest = tuple(out[1:])
        return lambda hidden: (hidden, *rest)

    def _rename(self, index: int, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Name the weights as the layer does now: an adapter moves a module's weights under `base_layer`."""
        if index not in self._names:
            layer = self.layers[index]
            owned = chain(layer.named_parameters(), layer.named_buffers())
            self._names[index] = {name.replace(BASE_LAYER, ""): name for name, _ in owned}
        names = self._names[index]
        return {names[name]: tensor for name, tensor in weights.items()}

    def adapters_changed(self) -> None:
        """Forget the layers' names: adapters were attached or taken off."""
        self._names.clear()

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which weights of this model's dtype compute."""
        return self._backend.autocast(self._dtype)

    @contextmanager
    def replaced(self, forwards: list[Callable[..., Any]]) -> Iterator[None]:
        """Replace the layers' `forward` for the length of a `with` block."""
        for layer, forward in zip(self.layers, forwards, strict=True):
            layer.forward = forward
        try:
            yield
        finally:
            for layer in self.layers:
                del layer.forward
