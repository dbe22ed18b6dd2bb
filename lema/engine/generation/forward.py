"""The model's own forward, one layer after the other: what a cache of keys and values needs, one
token at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from inspect import signature
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from transformers import Cache

from lema.engine.generation.prefill import Prefill
from lema.engine.head.pieces import PiecedHead
from lema.engine.layers.experts import call_in_groups
from lema.model import Split
from lema.model.capture import named_arguments
from lema.stream import LayerStream, Lease

__all__ = ["KeyValues", "layer_caches", "leased_forwards", "streaming_forward"]

KeyValues: TypeAlias = Literal["device", "host"]
"""Where keys and values of the layers wait for the next token."""


@contextmanager
def _leased(stream: LayerStream, index: int) -> Iterator[Lease]:
    """Lease a layer, or a piece of the head's weight, of one forward after the other."""
    order = stream.forward_order()
    if not stream.announced:
        stream.announce(order[order.index(index) :])
    with stream.lease(index) as lease:
        if index == stream.num_visited - 1:
            # While this one computes the next token's first layers are read, because it will need
            # them all.
            stream.announce(order)
        yield lease


def leased_forwards(
    split: Split, stream: LayerStream, keys_values: KeyValues = "device"
) -> list[Callable[..., Any]]:
    """Return a forward for each layer that leases it as the model's own forward reaches it. The
    forward of one layer after the other is what a cache of keys and values needs, and what one
    token at a time allows; training goes layer-major instead. With keys and values on the "host",
    those of one layer at a time are on the device: they come with the layer's lease and leave with
    it, whatever kind of cache `transformers` made."""

    def call(lease: Lease, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if lease.layer in stream.groups:
            return call_in_groups(split, stream, lease, args, kwargs)
        return split.call_layer(lease.layer, lease.weights, args, kwargs)

    def forward(index: int) -> Callable[..., Any]:
        def run(*args: object, **kwargs: object) -> object:
            with _leased(stream, index) as lease:
                if keys_values == "device":
                    return call(lease, args, kwargs)
                for cache in layer_caches(index, args, kwargs):
                    cache.prefetch()
                output = call(lease, args, kwargs)
                # Looked up again, because the first token makes the layers of some caches as it
                # goes.
                for cache in layer_caches(index, args, kwargs):
                    cache.offload()
                return output

        return run

    return [forward(index) for index in range(split.num_layers)]


@contextmanager
def streaming_forward(
    split: Split,
    stream: LayerStream,
    keys_values: KeyValues = "device",
    head: PiecedHead | None = None,
    prefill: Prefill | None = None,
) -> Iterator[None]:
    """Make the model's own forward lease each layer as it reaches it, and each piece of the head's
    weight where it is leased in pieces, for the length of a `with` block. With a `prefill` long
    prompts go through the layers in chunks."""

    def product(pieces: PiecedHead, inputs: Tensor) -> Tensor:
        logits = []
        for number, span in enumerate(pieces.spans, split.num_layers):
            with _leased(stream, number) as lease:
                logits.append(pieces.product(inputs, lease.weights["weight"], span))
        return torch.cat(logits, dim=-1)

    stream.cancel()
    in_pieces = nullcontext() if head is None else head.standing_in(partial(product, head))
    try:
        with (
            split.replaced(leased_forwards(split, stream, keys_values)),
            in_pieces,
            nullcontext() if prefill is None else _long_prompts(split, prefill),
        ):
            yield
    finally:
        stream.cancel()


@contextmanager
def _long_prompts(split: Split, prefill: Prefill) -> Iterator[None]:
    """Have long prompts go through the layers in chunks in a `with` block."""
    owner: Any = split.owner
    forward = owner.forward
    parameters = signature(forward)

    @wraps(forward)
    def in_chunks(*args: object, **kwargs: object) -> object:
        arguments = named_arguments(parameters, args, kwargs)
        if not prefill.takes(arguments):
            return forward(*args, **kwargs)
        return prefill.run(forward, arguments)

    owner.forward = in_chunks
    try:
        yield
    finally:
        del owner.forward


def layer_caches(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return what one layer keeps of the caches among its arguments: of keys and values, or of
    states.
    """
    caches = [item for item in (*args, *kwargs.values()) if isinstance(item, Cache)]
    return [cache.layers[index] for cache in caches if index < len(cache.layers)]
