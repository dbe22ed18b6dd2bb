"""The first pass of a generation, over a long prompt: layer after layer, and in each layer chunk
after chunk of the prompt.

So each layer is leased once, whatever the length, and only one chunk has activations at a time.
What a layer has left of the whole prompt is handed to the cache with which generation goes on, by
the calls that the layer itself makes of a prompt at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.utils import ModelOutput

from lema.engine.engine import Engine
from lema.engine.head.pieces import PiecedHead
from lema.engine.layers.call_chunks import CACHES, CallChunks, shape_of
from lema.engine.layers.layer import Layer
from lema.engine.layers.layer_pass import LayerPass, layers_of
from lema.engine.layers.rows import Rows
from lema.model.flow import Prelude
from lema.model.sequence.states import ChunkStates

__all__ = ["Prefill"]

LEARNING_TOKENS = 8


class Prefill:
    """Takes prompts through a model's layers in chunks.

    Args:
        engine: the objects that every layer works with.
        size: tokens of a chunk.
        layers: the model's, which take rows in chunks; None: they are made here.
        offloads: whether what a layer keeps waits in host memory for the next token.
        head: the head, where its weight is leased in pieces; None: it is on the device.
    """

    def __init__(
        self,
        engine: Engine,
        size: int,
        layers: Sequence[Layer[Any]] | None = None,
        *,
        offloads: bool = False,
        head: PiecedHead | None = None,
    ) -> None:
        self._engine = engine
        self._size = size
        self._layers = layers_of(engine, in_chunks=True) if layers is None else layers
        self._offloads = offloads
        self._head = head

    def takes(self, arguments: Mapping[str, Any], *, uses_cache: bool = False) -> bool:
        """Whether a call of the module that holds the layers is the first pass over a prompt that
        is longer than a chunk, with a cache as `generate` makes it by default.

        Args:
            arguments: of the call, by name.
            uses_cache: whether the module makes a cache if it is given none.
        """
        if all(arguments.get(name) is None for name in ("input_ids", "inputs_embeds")):
            return False
        cache = _cache_of(arguments)
        return (
            shape_of(arguments)[1] > self._size
            and arguments.get("return_dict") is not False
            and (uses_cache if cache is None else type(cache) is DynamicCache and _is_empty(cache))
        )

    @torch.no_grad()
    def run(
        self,
        forward: Callable[..., Any],
        arguments: Mapping[str, Any],
    ) -> ModelOutput:
        """Return what the module makes of the prompt.

        Args:
            forward: the module's own.
            arguments: of its call, by name.

        Raises:
            ConfigError: the prompt, or the model, cannot be cut.
        """
        engine = self._engine
        stream = engine.stream
        split = engine.split
        self._learn()
        passed = _cache_of(arguments)
        assert passed is None or isinstance(passed, DynamicCache), "the prompt is not taken"
        cache = DynamicCache(config=split.model.config) if passed is None else passed
        chunks = CallChunks(split, forward, arguments, self._size, engine.backend.device)
        rows = chunks.rows(leaves_out_padding=_last_are_tokens(arguments), shares=True)
        in_layers = _in_front(rows.prelude())
        order = stream.forward_order()
        if not stream.announced:
            stream.announce(order)
        states = rows.keep_states()
        for number in LayerPass(engine, self._layers, in_layers).up():
            while states:  # taken out, because the next layer needs the room
                _hand_over(cache, number, states.pop(), rows.length)
            if self._offloads:
                cache.layers[number].offload()  # type: ignore[no-untyped-call] # transformers' is
        if len(self._layers) == stream.num_visited:  # else the head's pieces come next
            stream.announce(order)
        (hidden,) = in_layers.take()
        result = chunks.finish(hidden)
        for name in CACHES:
            if name in type(result).__dataclass_fields__:  # type: ignore[attr-defined] # it has them
                result[name] = cache
        return result

    def _learn(self) -> None:
        """See what layers return, if that is not known."""
        split = self._engine.split
        device = self._engine.backend.device
        few = {"input_ids": torch.ones(1, LEARNING_TOKENS, dtype=torch.long, device=device)}
        if not split.has_learned(few):
            head = nullcontext() if self._head is None else self._head.standing_in()
            with self._engine.stream.lease(0) as first, head:
                split.prelude(few, first.weights)


def _in_front(prelude: Prelude) -> Rows:
    """Return the rows in front of the first layer."""
    return Rows([[call] for call in prelude.calls], [prelude.hidden])


def _hand_over(cache: DynamicCache, number: int, left: ChunkStates, length: int) -> None:
    """Give a cache what a layer has left of a sequence."""
    keys_values = left.keys_values(length)
    if keys_values is not None:
        cache.update(*keys_values, number)
        layer: Any = cache.layers[number]
        if layer.is_sliding:
            # Copies, because it keeps the last ones as views of all.
            layer.keys = layer.keys.clone()
            layer.values = layer.values.clone()
    for name, state in left.last_states().items():
        kind, _, index = name.partition(" ")
        if kind == "convolution":
            kernel_size = state.shape[-1]
            cache.update_conv_state(
                state, number, state_idx=int(index), conv_kernel_size=kernel_size
            )
        else:
            cache.update_recurrent_state(state, number, state_idx=int(index))


def _cache_of(arguments: Mapping[str, Any]) -> Cache | None:
    return next((arguments[name] for name in CACHES if arguments.get(name) is not None), None)


def _is_empty(cache: DynamicCache) -> bool:
    """Whether nothing has been put into a cache."""
    begun = [getattr(layer, "is_initialized", False) for layer in cache.layers]
    for layer in cache.layers:
        for kind in ("conv", "recurrent"):
            begun += getattr(layer, f"is_{kind}_states_initialized", {}).values()
    return not any(begun)


def _last_are_tokens(arguments: Mapping[str, Any]) -> bool:
    """Whether no row ends in padding, to which new tokens would be appended."""
    mask = arguments.get("attention_mask")
    return isinstance(mask, Tensor) and mask.dim() == 2 and bool((mask[:, -1] != 0).all())
