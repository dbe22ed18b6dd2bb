"""A causal language model in three parts: the prelude before the decoder layers, the layers, and the head after them.

All three are the model's own code. The model's forward is run with every layer's `forward` replaced by a recorder, so
embeddings, masks, rotary tables, final norm, soft-capping and logit scales are the model's own:

- the *prelude* records each layer's arguments and stops at the last layer;
- the *head* lets the last layer return the true hidden state and runs to the logits.

PEFT casts the input of an adapter to the adapter's fp32. Under autocast, where half precision computes, it is cast back
for the product, and the product keeps a copy of its own: as many copies of one input as it has adapters. Where the two
casts change no bit they are left out here. With a dropout between them, or another kind of adapter than plain LoRA,
they stay, because that computes in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from transformers import PreTrainedModel

from lema.backend import Backend, Parallel
from lema.backend.registry import has_addresses
from lema.errors import ModelError, is_out_of_memory
from lema.model.capture import (
    PASSED_THROUGH_THE_MODEL,
    HandedOn,
    LayerCall,
    alike,
    as_leaf,
    depends_on,
    same_structure,
    structure,
    tensors_in,
    values_unread,
    with_bytes,
    without_dropout,
    without_values,
)
from lema.model.compiled import CompiledLayers
from lema.model.row_tables import RowTables
from lema.model.skeleton import find_layers
from lema.model.weight_names import LayerNames, stored_name

__all__ = ["Prelude", "Split", "without_casts"]


def without_casts(layer: nn.Module) -> None:
    """Have the adapters of a layer that computes under autocast, or in fp32, take their input as it is.

    PEFT casts the input of an adapter to the adapter's fp32. Under autocast, where halves compute, that is cast back
    for the product, which keeps a copy of its own, so an input is kept as many times as it has adapters. Leaving both
    casts out changes no bit. They stay where a dropout, or another kind of adapter, computes in fp32 between them.
    """
    for part in layer.modules():
        if isinstance(part, Linear) and _hands_on(part):
            part.cast_input_dtype_enabled = False


def _hands_on(part: Linear) -> bool:
    """Whether all that an adapter does with its input is to multiply it by its A."""
    return not part.lora_variant and all(isinstance(one, nn.Identity) for one in part.lora_dropout.values())


LEARNING_TOKENS = 8
OUT_OF_ORDER = "it does not run its layers once each, in their order"


@dataclass(frozen=True)
class Prelude:
    """One micro-batch before its first layer: the hidden state, and the call of every layer."""

    hidden: Tensor
    calls: tuple[LayerCall, ...]


class _LayerReached(Exception):
    """Stops the model's forward once enough is recorded."""


class Split:
    """The parts of one model. The layers' weights are given at each call; all others are the model's own.

    Args:
        model: the model, adapters attached or not; every parameter outside the decoder layers is real.
        backend: for the generator state and autocast.
        compiled: run layers compiled, where they can be.
        parallel: the processes that hold the model together; None: the backend's.

    Attributes:
        lazy: whether the device compiles what is run on it, and its tensors have no addresses. It is then not asked
            for values, because each answer would be a graph to compile.
        tables: the embeddings that are looked up row by row; None: all are whole.
    """

    def __init__(
        self, model: PreTrainedModel, backend: Backend, *, compiled: bool = False, parallel: Parallel | None = None
    ) -> None:
        self.model, self.parallel = model, parallel or backend.parallel
        self.layers_name, self.layers = find_layers(model)
        self._backend = backend
        self.lazy = not has_addresses(backend.device)
        self._dtype = model.dtype
        self._rest: tuple[Any, ...] | None = None  # what layers return after the hidden state; None: it is bare
        self._mark_absent = True  # a None among it may be a tensor in another layer, so it has a placeholder too
        self.tables: RowTables | None = None
        self._learnt: set[bool] = set()  # in training, in evaluation: some models do other things between layers
        self._watched: set[int] = set()  # layers seen to leave their arguments alone
        self._to_compile = compiled
        self._compiled: CompiledLayers | None = None
        self.adapters_changed()

    @property
    def num_layers(self) -> int:
        """How many decoder layers there are."""
        return len(self.layers)

    def prelude(
        self, batch: Mapping[str, Tensor], first_layer_weights: Mapping[str, Tensor], *, differentiate: bool = False
    ) -> Prelude:
        """Run the model up to its layers.

        Args:
            batch: `input_ids`, int64 `[batch, sequence]`, and what else the model's forward takes.
            first_layer_weights: of layer 0, by name; used once, to learn what a layer returns.
            differentiate: let the hidden state keep its graph, where something before the layers trains.
        """
        calls: list[LayerCall] = []
        hidden: list[Tensor] = []
        if self.model.training not in self._learnt:
            self._learn(self._few(batch), first_layer_weights)

        def recorder(index: int) -> Callable[..., Any]:
            def record(*args: Any, **kwargs: Any) -> Any:
                call, state = LayerCall.record(args, kwargs)
                if index == 0:
                    hidden.append(state)  # once, because the recorders hand it on to the later layers as it is
                elif (below := calls[-1].left) is not None and below.is_in(call.args, call.kwargs):
                    call.received = below
                elif calls:
                    calls[-1].left = None
                calls.append(call)
                if index == self.num_layers - 1:
                    raise _LayerReached  # because the head needs what the layers make, and nothing has run them yet
                if self._rest is None:
                    return state
                call.left = HandedOn.like(self._rest, self._mark_absent)
                return (state, *call.left.placeholders)

            return record

        recorders = [recorder(index) for index in range(self.num_layers)]
        with (
            torch.set_grad_enabled(differentiate),
            self.autocast(),
            self._unread(),
            self.replaced(recorders),
            suppress(_LayerReached),
        ):
            self.model(**batch, use_cache=False)
        if len(calls) != self.num_layers:
            raise self._refusal(OUT_OF_ORDER)
        return Prelude(hidden[0], tuple(calls))

    def known(self, batch: Mapping[str, Tensor]) -> bool:
        """Whether `prelude` needs no weights: on a lazy device, where what layers return is learnt from their shapes.

        A model whose forward looks at values is learnt as it is on other devices, which finds out as well what is wrong
        with one that cannot be split.
        """
        if not self.lazy or self.model.training in self._learnt:
            return self.lazy
        device, marked = self._backend.device, self._mark_absent
        few = {name: (value.shape, value.dtype) for name, value in self._few(batch).items()}
        try:
            with without_values(self.model, self.layers, device):
                given = {stored_name(name): one for name, one in self.layers[0].named_parameters() if one.is_meta}
                weights = {name: torch.empty(one.shape, dtype=one.dtype, device=device) for name, one in given.items()}
                shapes = {name: torch.ones(shape, dtype=dtype, device=device) for name, (shape, dtype) in few.items()}
                self._learn(shapes, weights)
        except (ModelError, *PASSED_THROUGH_THE_MODEL):
            self._rest, self._mark_absent = None, marked
            return False
        if self._rest is not None:
            self._rest = tuple(with_bytes(one, device) for one in self._rest)
        return True

    def _few(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a few tokens of a batch; of processes that hold a layer together each may have its part of them."""
        few = math.lcm(LEARNING_TOKENS, self.parallel.size)
        return {name: value[:1, :few] for name, value in batch.items()}

    def _unread(self) -> AbstractContextManager[None]:
        """Return the context in which the model's own forward asks a lazy device for nothing."""
        return values_unread() if self.lazy else nullcontext()

    @property
    def compiled(self) -> CompiledLayers | None:
        """The layers as they are compiled; None: they are not."""
        if self._to_compile and self._compiled is None:
            self._compiled = CompiledLayers(list(self.layers), self.layers_name, self._backend)
        return self._compiled

    def compiles(self, index: int) -> bool:
        """Whether `run_layer` runs a layer compiled, as far as is known: its first run may show that it cannot."""
        return self.compiled is not None and self.compiled.compiles(index)

    def run_layer(
        self, index: int, weights: Mapping[str, Tensor], call: LayerCall, hidden: Tensor, *, compiled: bool = True
    ) -> Tensor:
        """Run one layer on `hidden`, `[batch, sequence, hidden]`, with the weights given; returns the same shape.
        `compiled` false: not compiled, even where it could be. Of processes that hold a layer together each may have
        its part of the sequence, from `enter` on, until the last layer has put the parts together."""
        parallel = self.parallel
        # Compared in a layer's first run, because what it leaves in its arguments would be lost to the later layers.
        before = None if index in self._watched else structure([call.args, call.kwargs])
        with self.autocast():
            out: Any = NotImplemented
            if compiled and self.compiled is not None:
                out = self.compiled.call(index, self._renamed(index, weights), call, hidden)
            if out is NotImplemented:
                out = self.call_layer(index, weights, *call.arguments(hidden))
        if before is not None:
            if not same_structure(before, structure([call.args, call.kwargs])):
                raise self._refusal(f"layer {index} leaves something for later layers besides the hidden state")
            self._watched.add(index)
        if call.left is not None:
            call.left.values = tuple(out[1:])
        output: Tensor = out if isinstance(out, Tensor) else out[0]
        return parallel.leave_layers(output) if index == self.num_layers - 1 else output

    def enter(self, hidden: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return what this process gives its first layer of each micro-batch's hidden state; differentiable."""
        return tuple(self.parallel.enter_layers(state) for state in hidden)

    def call_layer(
        self, index: int, weights: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call one layer's own forward, even while it is replaced, with the weights given; returns what it returns."""
        layer = self.layers[index]
        replacement = layer.__dict__.pop("forward", None)
        try:
            # Nothing is tied within a layer; looking for it would walk the modules at every call.
            return torch.func.functional_call(layer, self._renamed(index, weights), args, kwargs, tie_weights=False)
        finally:
            if replacement is not None:
                layer.forward = replacement

    def head(self, hidden: Tensor, batch: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the logits `[rows, tokens, vocabulary]` of the last layer's output `[rows, tokens, hidden]`.

        The part of the forward before the layers runs on `batch`, or on placeholder tokens, and its result is thrown
        away. The generator is put back before the head begins: what it draws is what the whole model would draw.
        """
        state = self._backend.rng_state()

        def keep(*args: Any, **kwargs: Any) -> Any:
            return self._returned(LayerCall.record(args, kwargs)[1])

        def finish(*_: Any, **__: Any) -> Any:
            self._backend.set_rng_state(state)
            return self._returned(hidden)

        thrown_away: AbstractContextManager[None] = nullcontext()
        if batch is None:
            if self.tables is not None:
                thrown_away = self.tables.nothing_looked_at()
            # Any token but padding, because padding could be masked.
            placeholder = int(getattr(self.model.config, "pad_token_id", None) == 0)
            batch = {"input_ids": torch.full(hidden.shape[:2], placeholder, dtype=torch.long, device=hidden.device)}
        with thrown_away, self.autocast(), self._unread(), self.replaced([keep] * (self.num_layers - 1) + [finish]):
            logits: Tensor = self.model(**batch, use_cache=False).logits
        return logits

    def _learn(self, few: Mapping[str, Tensor], first_layer_weights: Mapping[str, Tensor]) -> None:
        """Run layer 0 for real, once, to see what layers return; then see whether the model can be split at all.

        Args:
            few: a batch of a few tokens.
            first_layer_weights: as in `prelude`.
        """
        state = self._backend.rng_state()

        def run(*args: Any, **kwargs: Any) -> Any:
            call, hidden = LayerCall.record(args, kwargs)
            entered = self.parallel.enter_layers(hidden)
            out = self.call_layer(0, first_layer_weights, *call.arguments(entered))
            self._rest = None if isinstance(out, Tensor) else tuple(out[1:])
            raise _LayerReached

        try:
            with torch.no_grad(), self.autocast(), self.replaced([run] * self.num_layers), suppress(_LayerReached):
                self.model(**few, use_cache=False)
        except PASSED_THROUGH_THE_MODEL as error:
            if is_out_of_memory(error):
                raise
            raise self._refusal(f"it does not run on a few token ids alone: {error}") from error
        try:
            self._check(few)
        except PASSED_THROUGH_THE_MODEL as error:
            if is_out_of_memory(error):
                raise
            # With None as it is, because it may compute with what layers return beside the hidden state.
            self._mark_absent = False
            self._check(few)
        self._backend.set_rng_state(state)
        self._learnt.add(self.model.training)

    def _check(self, few: Mapping[str, Tensor]) -> None:
        """Make sure that the model is a prelude, layers one after the other, and a head.

        Raises:
            ModelError: something but the hidden state goes from layer to layer, or from below the layers to the head.
        """
        returned: list[tuple[Any, ...]] = []  # by each layer
        order: list[int] = []

        def probe(index: int) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                call, hidden = LayerCall.record(args, kwargs)
                order.append(index)
                if returned and hidden is not returned[-1][0]:
                    raise self._refusal(f"the hidden state is worked on between layers {index - 1} and {index}")
                call.received = HandedOn(returned[-1][1:]) if returned else None
                if depends_on(tensors_in(call.others()), tensors_in(returned)):
                    raise self._refusal(f"layer {index} is given more of the layers below than the hidden state")
                handed_on = HandedOn.like(self._rest or (), self._mark_absent).placeholders
                returned.append((as_leaf(hidden), *map(as_leaf, handed_on)))
                return returned[-1][0] if self._rest is None else returned[-1]

            return run

        # With grad, because the graph of the logits says which layers' outputs they depend on.
        probes = [probe(index) for index in range(self.num_layers)]
        with torch.enable_grad(), self.autocast(), self.replaced(probes):
            logits: Tensor = self.model(**few, use_cache=False).logits
        if order != list(range(self.num_layers)):
            raise self._refusal(OUT_OF_ORDER)
        if depends_on([logits], tensors_in(returned[:-1])):
            raise self._refusal("its head looks at more layers than the last")
        last = returned[-1][0].detach()
        try:
            with torch.no_grad(), without_dropout(self.model):
                expected = self.head(last, few)
                alone = [self.head(last), torch.cat([self.head(last[:, :1]), self.head(last[:, 1:])], dim=1)]
        except PASSED_THROUGH_THE_MODEL as error:
            if is_out_of_memory(error):
                raise
            raise self._refusal("its head needs more than the last layer's output, token by token") from error
        if any(not alike(found, expected) for found in alone):
            raise self._refusal("its head needs more than the last layer's output, token by token")

    def _returned(self, hidden: Tensor) -> Any:
        """Return `hidden` as a layer would."""
        return hidden if self._rest is None else (hidden, *self._rest)

    def _refusal(self, why: str) -> ModelError:
        return ModelError(
            f"this model cannot be streamed layer by layer: {why}",
            where=f"{self.layers_name} of {type(self.model).__name__}",
            how="`lema models` lists the types that stream",
        )

    def _renamed(self, index: int, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Name the weights as the layer does now."""
        if index not in self._names:
            self._names[index] = LayerNames(self.layers[index])
        return self._names[index].renamed(weights)

    def adapters_changed(self) -> None:
        """Forget the layers' names and compiled forms, because adapters were attached or taken off."""
        self._names: dict[int, LayerNames] = {}
        self._compiled = None
        for layer in self.layers:
            without_casts(layer)

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
