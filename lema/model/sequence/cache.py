"""The keys and values of one layer, through which the chunks of a sequence see the earlier ones.

A layer is called on a chunk with a cache, as in generation: the cache is `transformers`' own class,
and what it holds is here. A chunk's keys and values are written behind those of the chunks before
it, and attention is given all of them. In the backward chunks come in reverse, each with a graph of
its own. What that graph adds to the gradients of earlier keys and values is summed here, and enters
the graph of the chunk that has made them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from lema.errors import ConfigError

__all__ = ["KeysReached", "KeysValues", "SequenceCache", "Span", "windows_of"]

SETTING = "sequence_chunk"


class Span(NamedTuple):
    """The tokens of a chunk: from `start` to before `stop`."""

    start: int
    stop: int

    @property
    def slice(self) -> slice:
        """The same as a slice."""
        return slice(self.start, self.stop)


class KeysReached(Exception):
    """Stops a layer once a chunk's keys and values are there, where nothing else is asked of it."""


class _Buffer:
    """What a layer makes of each token for later ones, `[rows, heads, sequence, width]`, and the
    sum of its gradients.

    The sum is in single precision where keys are in half: each chunk adds to it, and a whole
    sequence would have rounded once.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._values: Tensor | None = None
        self._gradients: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        tensors = (self._values, self._gradients)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def extended(self, states: Tensor, span: Span, first: int) -> Tensor:
        """Put in those of a chunk; return all from token `first` to the end of the chunk."""
        if self._values is None:
            shape = (*states.shape[:-2], self._length, states.shape[-1])
            self._values = states.new_empty(shape)
        with torch.no_grad():
            self._values[..., span.slice, :] = states
        if states.requires_grad and torch.is_grad_enabled():
            extended: Tensor = _Extended.apply(states, self, span, first)  # type: ignore[no-untyped-call] # torch's is
            return extended
        return self.between(first, span.stop)

    def between(self, first: int, stop: int) -> Tensor:
        """Return those of some tokens, without a graph."""
        assert self._values is not None, "no chunk has come"
        return self._values.detach()[..., first:stop, :]

    def add_gradients(self, gradients: Tensor, span: Span, first: int) -> Tensor:
        """Add to the gradients of the tokens before a chunk; return the sum of the chunk's own."""
        assert self._values is not None, "no chunk has come"
        if self._gradients is None:
            dtype = torch.promote_types(gradients.dtype, torch.float32)
            self._gradients = torch.zeros_like(self._values, dtype=dtype)
        num_before = span.start - first
        self._gradients[..., first : span.start, :] += gradients[..., :num_before, :]
        summed = self._gradients[..., span.slice, :] + gradients[..., num_before:, :]
        return summed.to(gradients.dtype)


class _Extended(torch.autograd.Function):
    """A chunk's keys, or values, behind those of earlier chunks. The gradients of those are summed
    in the buffer, from where the later chunks' part of this chunk's own comes."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        states: Tensor,  # noqa: ARG004 - autograd looks at it
        buffer: _Buffer,
        span: Span,
        first: int,
    ) -> Tensor:
        ctx.buffered = buffer, span, first  # type: ignore[attr-defined] # autograd keeps it
        return buffer.between(first, span.stop)

    @staticmethod
    def backward(ctx: FunctionCtx, gradients: Tensor) -> tuple[Tensor, None, None, None]:
        buffer, span, first = ctx.buffered  # type: ignore[attr-defined] # as above
        return buffer.add_gradients(gradients, span, first), None, None, None


class KeysValues:
    """Keys and values of one layer for one micro-batch, and the sums of their gradients.

    Args:
        length: tokens of the sequence.
    """

    def __init__(self, length: int) -> None:
        self._keys = _Buffer(length)
        self._values = _Buffer(length)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._keys.nbytes + self._values.nbytes

    def extended(
        self, keys: Tensor, values: Tensor, span: Span, first: int
    ) -> tuple[Tensor, Tensor]:
        """Put in those of a chunk `[rows, heads, chunk, width]`; return all from token `first`
        to its end."""
        return self._keys.extended(keys, span, first), self._values.extended(values, span, first)


class _CacheLayer(CacheLayerMixin):
    """One layer of the cache, as `transformers` sees it.

    Args:
        cache: the cache.
        number: which layer it is.
        window: how many tokens a token attends to; None: all before it.
    """

    def __init__(self, cache: SequenceCache, number: int, window: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # transformers' is
        self._cache = cache
        self._number = number
        self._window = window
        self.is_sliding = window is not None
        self.sliding_window = window

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the buffers are made with the first chunk."""

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: object,  # noqa: ARG002 - the signature is that of transformers
        **kwargs: object,  # noqa: ARG002 - the same
    ) -> tuple[Tensor, Tensor]:
        """Put in a chunk's keys and values; return all that it attends to."""
        return self._cache.extended(self._number, key_states, value_states, self._first)

    @property
    def _first(self) -> int:
        """The first token that is attended to."""
        start = self._cache.span.start
        return 0 if self._window is None else max(0, start - self._window + 1)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys, and which token the first belongs to."""
        first = self._first
        return self._cache.span.start + query_length - first, first

    def get_seq_length(self) -> int:
        """Return how many tokens came before."""
        return self._cache.span.start

    def get_max_length(self) -> int:
        """Return -1: there is none."""
        return -1

    def get_max_cache_shape(self) -> int:
        """Return -1: there is none; an older name of `get_max_length`."""
        return -1


class SequenceCache(Cache):
    """The cache with which the chunks of one micro-batch are called: of one layer at a time.

    Args:
        windows: of each layer, how many tokens a token attends to; None: all before it.

    Attributes:
        span: the chunk that is called.
        updated: whether the layer that runs has put in the chunk's keys and values.
    """

    def __init__(self, windows: Sequence[int | None]) -> None:
        super().__init__(
            layers=[_CacheLayer(self, number, window) for number, window in enumerate(windows)]
        )
        self.span = Span(0, 0)
        self.updated = False
        self._number = -1
        self._keys_values: KeysValues | None = None
        self._keys_only = False

    def move(self, span: Span) -> None:
        """Come to a chunk."""
        self.span = span

    @contextmanager
    def holding(
        self, number: int, span: Span, keys_values: KeysValues, *, keys_only: bool = False
    ) -> Iterator[None]:
        """Have a layer called on a chunk in the `with` block put its keys and values there.

        Args:
            number: the layer.
            span: the chunk.
            keys_values: those of the chunks before.
            keys_only: stop the layer with `KeysReached` as soon as they are there.

        Raises:
            ConfigError: the layer keeps none.
        """
        self.span = span
        self.updated = False
        self._number = number
        self._keys_values = keys_values
        self._keys_only = keys_only
        try:
            yield
        finally:
            self._keys_values = None
        if not self.updated:
            raise refusal(f"layer {number} keeps no keys and values of its own in a cache")

    def extended(
        self, number: int, keys: Tensor, values: Tensor, first: int
    ) -> tuple[Tensor, Tensor]:
        """Put in a chunk's keys and values; return all from token `first`."""
        length = self.span.stop - self.span.start
        if self._keys_values is None or number != self._number:
            raise refusal(f"layer {self._number} reads the cache of layer {number}")
        if self.updated or keys.shape[-2] != length or values.shape[-2] != length:
            raise refusal(f"layer {number} keeps something else than a key and a value a token")
        self.updated = True
        extended = self._keys_values.extended(keys, values, self.span, first)
        if self._keys_only:
            raise KeysReached
        return extended


def windows_of(layers: Sequence[object], num_layers: int) -> list[int | None]:
    """Return how far back each layer attends, in tokens; None: to all.

    Args:
        layers: of the cache that `transformers` makes for the model's config; fewer than there are:
            the others keep keys and values of all tokens.
        num_layers: of the model.

    Raises:
        ConfigError: a layer keeps something else than keys and values.
    """
    windows = list[int | None]()
    for number, layer in enumerate(layers):
        if type(layer) is DynamicSlidingWindowLayer:
            windows.append(layer.sliding_window)
        elif type(layer) is DynamicLayer:
            windows.append(None)
        else:
            kind = type(layer).__name__
            raise refusal(
                f"layer {number} keeps something else than keys and values between two chunks: "
                f"transformers gives it a {kind}"
            )
    return windows + [None] * (num_layers - len(windows))


def refusal(why: str) -> ConfigError:
    """Return the error of a model, or a batch, that cannot be cut inside of its layers."""
    return ConfigError(
        f"sequences cannot go through this model's layers in chunks: {why}",
        where=SETTING,
        how="leave it out",
    )
