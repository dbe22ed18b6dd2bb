"""What a layer keeps of the chunks of a sequence for the chunks after them: keys and values, or
states.

A layer is called on a chunk with a cache, as in generation: the cache is `transformers`' own class,
and what it holds is here (`lema.model.sequence.states`), of one layer at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from lema.compat import empty_cache_layer
from lema.errors import ConfigError
from lema.model.sequence.attention import Handed, attention_in_blocks
from lema.model.sequence.states import ChunkStates, Span

__all__ = ["LayerKind", "SequenceCache", "StatesComplete", "kinds_of"]

SETTING = "sequence_chunk"


class StatesComplete(Exception):
    """Stops a layer once a chunk has left what later chunks need, where nothing else is asked."""


@dataclass(frozen=True)
class LayerKind:
    """What a layer keeps of a sequence.

    Args:
        attends: whether it keeps keys and values.
        window: how many tokens a token attends to; None: all before it.
        num_states: of convolutions, or recurrences.
    """

    attends: bool
    window: int | None = None
    num_states: int = 0

    @property
    def keeps(self) -> bool:
        """Whether it keeps anything."""
        return self.attends or self.num_states > 0


class _AttentionLayer(CacheLayerMixin):
    """One layer of the cache that keeps keys and values, as `transformers` sees it.

    Args:
        cache: the cache.
        number: which layer it is.
        kind: what it keeps.
    """

    def __init__(self, cache: SequenceCache, number: int, kind: LayerKind) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # transformers' is
        self._attention = cache, number, kind.window
        self.is_sliding = kind.window is not None
        self.sliding_window = kind.window

    def lazy_initialization(self, *args: object, **kwargs: object) -> None:
        """Do nothing: memory is taken with the first chunk."""

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: object,  # noqa: ARG002 - the signature is that of transformers
        **kwargs: object,  # noqa: ARG002 - the same
    ) -> tuple[Tensor, Tensor]:
        """Put in a chunk's keys and values; return all that it attends to."""
        cache, number, _ = self._attention
        return cache.extended(number, key_states, value_states, self._first)

    @property
    def _first(self) -> int:
        """The first token that is attended to."""
        cache, _, window = self._attention
        return 0 if window is None else max(0, cache.span.start - window + 1)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys, and which token the first belongs to."""
        first = self._first
        return self.get_seq_length() + query_length - first, first

    def get_seq_length(self) -> int:
        """Return how many tokens came before."""
        return self._attention[0].span.start

    def get_max_length(self) -> int:
        """Return -1: there is none."""
        return -1

    def get_max_cache_shape(self) -> int:
        """Return -1: there is none; an older name of `get_max_length`."""
        return -1


class _StatesLayer(LinearAttentionCacheLayerMixin):
    """One layer of the cache that keeps states of convolutions and recurrences, as `transformers`
    sees it; the arguments are those of `_AttentionLayer`.
    """

    def __init__(self, cache: SequenceCache, number: int, kind: LayerKind) -> None:
        # Not that of transformers, which makes attributes of what are questions to the cache here.
        self._recurrence = cache, number
        self.number_of_states = kind.num_states
        self.record_past = False

    def lazy_initialization(self, *args: object, **kwargs: object) -> None:
        """Do nothing: memory is taken with the first chunk."""

    @property
    def has_previous_state(self) -> dict[int, bool]:  # type: ignore[override] # a question to the cache, not an attribute
        """Of each state, whether chunks came before."""
        cache, _ = self._recurrence
        return dict.fromkeys(range(self.number_of_states), cache.span.start > cache.first)

    @property
    def conv_states(self) -> dict[int, Tensor | None]:  # type: ignore[override] # a question to the cache, not an attribute
        """The last inputs of each convolution, from the chunk before; None: there is none."""
        return self._entered("convolution")

    @property
    def recurrent_states(self) -> dict[int, Tensor | None]:  # type: ignore[override] # a question to the cache, not an attribute
        """The state of each recurrence after the chunk before; None: there is none."""
        return self._entered("recurrence")

    def _entered(self, kind: str) -> dict[int, Tensor | None]:
        cache, number = self._recurrence
        return {
            index: cache.entered(number, f"{kind} {index}")
            for index in range(self.number_of_states)
        }

    def update_conv_state(
        self,
        conv_states: Tensor,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: object,  # noqa: ARG002 - the signature is that of transformers
    ) -> Tensor:
        """Put in the inputs of a convolution `[rows, channels, chunk]`; return them behind those
        that it still reaches.
        """
        cache, number = self._recurrence
        if conv_kernel_size is None:
            raise refusal(f"layer {number} does not say how far its convolution reaches")
        name = f"convolution {state_idx}"
        before = cache.entered(number, name)
        missing = conv_kernel_size if before is None else 0
        inputs = pad(conv_states, (max(0, missing - conv_states.shape[-1]), 0))
        if before is not None:
            inputs = torch.cat([before, inputs], dim=-1)
        cache.left(number, name, inputs[..., -conv_kernel_size:])
        return inputs

    def update_recurrent_state(
        self,
        recurrent_states: Tensor,
        state_idx: int = 0,
        **kwargs: object,  # noqa: ARG002 - the signature is that of transformers
    ) -> Tensor:
        """Put in the state of a recurrence after a chunk; return it."""
        cache, number = self._recurrence
        cache.left(number, f"recurrence {state_idx}", recurrent_states)
        return recurrent_states


class _MixedLayer(_StatesLayer, _AttentionLayer):  # type: ignore[override] # as transformers' own
    """One layer of the cache that keeps keys and values, and states."""

    def __init__(self, cache: SequenceCache, number: int, kind: LayerKind) -> None:
        _AttentionLayer.__init__(self, cache, number, kind)
        _StatesLayer.__init__(self, cache, number, kind)


class SequenceCache(Cache):
    """The cache with which the chunks of one micro-batch are called: of one layer at a time.

    Args:
        kinds: what each layer keeps.
        first: the first token that is in a chunk.

    Attributes:
        kinds: what each layer keeps.
        first: the first token that is in a chunk.
        span: the chunk that is called.
    """

    def __init__(self, kinds: Sequence[LayerKind], first: int = 0) -> None:
        layers: Any = [self._layer(number, kind) for number, kind in enumerate(kinds)]
        super().__init__(layers=layers)
        self.kinds = tuple(kinds)
        self.first = first
        self.span = Span(0, 0)
        self._number = -1
        self._states: ChunkStates | None = None
        self._handed: Handed | None = None
        self._noted: list[str] = []  # what the layer has left of the chunk
        # what each layer leaves of a chunk, as its first run has shown
        self._expected: dict[int, list[str]] = {}
        self._stops = False

    def _layer(self, number: int, kind: LayerKind) -> object:
        empty = empty_cache_layer()
        if not kind.keeps and empty is not None:
            return empty()
        if not kind.num_states:
            return _AttentionLayer(self, number, kind)
        return (_MixedLayer if kind.attends else _StatesLayer)(self, number, kind)

    def move(self, span: Span) -> None:
        """Come to a chunk."""
        self.span = span

    @contextmanager
    def holding(
        self, number: int, span: Span, states: ChunkStates, *, stops: bool = False
    ) -> Iterator[None]:
        """Have a layer called on a chunk in the `with` block leave what it keeps in `states`.

        Args:
            number: the layer.
            span: the chunk.
            states: what it has left of the chunks before.
            stops: stop the layer with `StatesComplete` as soon as it has left all.

        Raises:
            ConfigError: the layer keeps something else than `transformers` says.
        """
        self.span = span
        self._number = number
        self._states = states
        self._handed = None
        self._noted = []
        self._stops = stops
        try:
            with attention_in_blocks(lambda: self._handed):
                yield
        finally:
            self._states = None
            self._handed = None
        if self._noted != self._expected.setdefault(number, self._noted):
            raise refusal(f"layer {number} does not keep the same of every chunk")
        if self.kinds[number].keeps != bool(self._noted):
            raise refusal(f"layer {number} keeps nothing of its own in a cache")

    def extended(
        self, number: int, keys: Tensor, values: Tensor, first: int
    ) -> tuple[Tensor, Tensor]:
        """Put in a chunk's keys and values; return all from token `first`."""
        length = self.span.stop - self.span.start
        if keys.shape[-2] != length or values.shape[-2] != length:
            raise refusal(f"layer {number} keeps something else than a key and a value a token")
        states = self._running(number)
        extended = states.extended(keys, values, self.span, first)
        self._handed = Handed(*extended, (keys, values), states.attended(self.span, first))
        self._note("keys and values")
        return extended

    def entered(self, number: int, name: str) -> Tensor | None:
        """Return a state as the chunk before has left it; None: there is none."""
        return self._running(number).entered(name, self.span)

    def left(self, number: int, name: str, state: Tensor) -> None:
        """Leave a state for the chunk after this one."""
        self._running(number).leave(name, state, self.span)
        self._note(name)

    def _running(self, number: int) -> ChunkStates:
        if self._states is None or number != self._number:
            raise refusal(f"layer {self._number} reads the cache of layer {number}")
        return self._states

    def _note(self, name: str) -> None:
        if name in self._noted:
            raise refusal(f"layer {self._number} leaves {name} twice of a chunk")
        self._noted.append(name)
        if self._stops and self._noted == self._expected.get(self._number):
            raise StatesComplete


def kinds_of(layers: Sequence[object], num_layers: int) -> list[LayerKind]:
    """Return what each layer keeps.

    Args:
        layers: of the cache that `transformers` makes for the model's config; fewer than there are:
            the others keep keys and values of all tokens.
        num_layers: of the model.

    Raises:
        ConfigError: a layer keeps something that is not known here.
    """
    kinds = list[LayerKind]()
    for number, layer in enumerate(layers):
        if isinstance(layer, LinearAttentionLayer) and hasattr(Cache, "get_conv_state"):
            window: int | None = getattr(layer, "sliding_window", None)
            attends = isinstance(layer, CacheLayerMixin)
            kinds.append(LayerKind(attends, window, layer.number_of_states))
        elif type(layer) is DynamicSlidingWindowLayer:
            kinds.append(LayerKind(attends=True, window=layer.sliding_window))
        elif type(layer) is DynamicLayer:
            kinds.append(LayerKind(attends=True))
        elif type(layer) is empty_cache_layer():
            kinds.append(LayerKind(attends=False))
        else:
            raise refusal(
                f"layer {number} keeps something else than keys, values and states between two "
                f"chunks: transformers gives it a {type(layer).__name__}"
            )
    return kinds + [LayerKind(attends=True)] * (num_layers - len(kinds))


def refusal(why: str) -> ConfigError:
    """Return the error of a model, or a batch, that cannot be cut inside of its layers."""
    return ConfigError(
        f"sequences cannot go through this model's layers in chunks: {why}",
        where=SETTING,
        how="leave it out",
    )
