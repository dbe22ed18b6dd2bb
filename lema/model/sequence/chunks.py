"""The chunks of one micro-batch, and how each layer is called on each of them.

What a chunk's call takes beside the hidden state, such as a mask or a rotary table, is made by the
model's own forward, which is called on the chunk's tokens with a cache that has the length of the
chunks before it, as generation calls it. So nothing here knows what these arguments are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, PreTrainedModel

from lema.errors import is_out_of_memory
from lema.model.capture import PASSED_THROUGH_THE_MODEL, changed, tensors_in
from lema.model.flow import LayerCall, Prelude
from lema.model.sequence.blockmask import block_masks, causal_like, pairs_of
from lema.model.sequence.cache import SequenceCache, kinds_of, refusal
from lema.model.sequence.divided_states import DividedStates
from lema.model.sequence.division import RowDivision
from lema.model.sequence.host_keys import HostKeys
from lema.model.sequence.masks import (
    asks_for_packs,
    numbers_of_rows,
    packed_rows,
    rotary_of_length,
    tables_by_length,
)
from lema.model.sequence.spans import (
    borders_in,
    shared_tokens,
    spans_between,
    spans_of,
    tokens_inside,
)
from lema.model.sequence.states import ChunkStates, Span
from lema.model.sequence.token_inputs import IDS, MASK, POSITIONS, TokenInputs
from lema.model.state.hooks import is_hooked

__all__ = ["PADDING", "ChunkedCall", "ChunkedRows", "most_of_calls"]

CALL_BYTES = 32 << 20
MOST_IN_HOST = 4 << 20  # of calls, where hidden states are not on the device either
PADDING = 2  # tokens
PACK = (0, 1, 0, 1)  # positions of two rows


Allocate: TypeAlias = Callable[[Sequence[int], torch.dtype], Tensor]
"""Makes a tensor of zeros in host memory."""


class Front(Protocol):
    """Runs the model up to its layers on one chunk of a sequence."""

    def __call__(
        self,
        batch: Mapping[str, Any],
        cache: SequenceCache | None,
        *,
        differentiate: bool = False,
        again: bool = False,
    ) -> Prelude:
        """Return the hidden state and the call of every layer.

        Args:
            batch: the chunk's part of what the model takes.
            cache: at the chunk; None: the sequence is not cut.
            differentiate: let the hidden state keep its graph.
            again: the hidden state is thrown away, and nothing is left behind.
        """


def most_of_calls(hidden_bytes: int) -> int:
    """Return the bytes of a micro-batch's calls, up to which these are kept for the backward.

    Args:
        hidden_bytes: of its hidden state on the device.
    """
    return max(hidden_bytes, CALL_BYTES)


class ChunkedRows:
    """The chunks of one micro-batch.

    Args:
        model: the model.
        layers: its decoder layers.
        front: runs it up to them.
        inputs: what the model takes of each token.
        size: tokens of a chunk; or how processes divide the rows, of which this one has some
            chunks.
        leaves_out_padding: whether tokens that are padding in all rows, before all others or after
            them, are in no chunk. What is made of them is zero.
        shares: whether tokens with which all rows begin are computed for the first row alone.

    Attributes:
        spans: the chunks.
        cache: with which they are called.

    Raises:
        ConfigError: what the model takes, or what its layers keep, cannot be cut.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: nn.ModuleList,
        front: Front,
        inputs: TokenInputs,
        size: int | RowDivision,
        *,
        leaves_out_padding: bool = False,
        shares: bool = False,
    ) -> None:
        self._model = model
        self._layers = layers
        self._front = front
        self._inputs = inputs
        self._division = None if isinstance(size, int) else size
        self._fork = 0
        inside = Span(0, self.length)
        if leaves_out_padding and inputs.padding is not None:
            inside = tokens_inside(inputs.padding)
        self.spans = self._cut_into(inside, size, shares=shares)
        kinds = kinds_of(DynamicCache(config=model.config).layers, len(layers))
        self.cache = SequenceCache(kinds, inside.start)
        self._numbers: Tensor | None = None  # of the rows of packs, to which attention keeps
        positions = self._text_positions
        if positions is not None and MASK not in inputs.values and self._keeps_packs():
            self._numbers = numbers_of_rows(positions)
        self._tables = tables_by_length(model, layers)
        self._calls: list[tuple[LayerCall, ...] | None] = [None] * len(self.spans)
        self._finished: list[ChunkStates] | None = None

    def _cut_into(self, inside: Span, size: int | RowDivision, *, shares: bool) -> list[Span]:
        """Return the chunks of some tokens of the sequence."""
        inputs = self._inputs
        masks = inputs.masks
        if not isinstance(size, int):
            if masks:
                raise refusal("its masks are made of whole sequences")
            return size.of(self.length).spans
        if masks:
            return spans_between(borders_in(masks, self.length), self.length, size)
        shared = shared_tokens(inputs.values, IDS) if shares else 0
        if size <= shared - inside.start and shared < inside.stop - 1:
            self._fork = shared
        before = spans_of(self._fork, size, inside.start) if self._fork else []
        return before + spans_of(inside.stop, size, self._fork or inside.start)

    @property
    def _tokens(self) -> Tensor:
        """The tokens' ids, or what the caller has looked up for them."""
        return self._inputs.tokens

    @property
    def length(self) -> int:
        """Tokens of the sequence."""
        return self._inputs.length

    @property
    def _text_positions(self) -> Tensor | None:
        """The positions `[rows, sequence]` by which `transformers` tells rows of a pack: where
        there are several kinds, the first. None: the model counts them."""
        positions = self._inputs.positions
        return positions if positions is None or positions.dim() == 2 else positions[0]

    @property
    def parts(self) -> Sequence[Span]:
        """Where the chunks lie in the hidden states that this process has."""
        if self._division is None:
            return self.spans
        sizes = (span.stop - span.start for span in self.spans)
        bounds = accumulate(sizes, initial=0)
        return [Span(start, stop) for start, stop in pairwise(bounds)]

    def prelude(self, *, differentiate: bool = False, allocate: Allocate | None = None) -> Prelude:
        """Run the model up to its layers, chunk after chunk; return the hidden state of the whole
        micro-batch, and the call of every layer, which calls it on each chunk.

        Args:
            differentiate: let the hidden state keep its graph.
            allocate: makes room for the hidden state; None: it is on the device.
        """
        states = list[Tensor]()
        hidden_bytes = 0
        hidden = None
        embeddings = self._embeddings(differentiate=differentiate)
        for chunk in range(len(self.spans)):
            front = self.front(chunk, embeddings, differentiate=differentiate)
            if allocate is None:
                states.append(front.hidden.expand(len(self._tokens), *front.hidden.shape[1:]))
                hidden_bytes += front.hidden.nbytes
            else:
                if hidden is None:
                    shape = (len(self._tokens), self.length, *front.hidden.shape[2:])
                    hidden = allocate(shape, front.hidden.dtype)
                hidden[:, self.spans[chunk].slice] = front.hidden
            self._calls[chunk] = front.calls
            most = MOST_IN_HOST if allocate is not None else most_of_calls(hidden_bytes)
            if self._call_bytes() > most:
                # What grows with the sequence is made at each visit.
                self._calls = [None] * len(self.spans)
        if hidden is None:
            hidden = torch.cat(states, dim=1)
            outside = (0, 0, self.spans[0].start, self.length - self.spans[-1].stop)
            if any(outside) and self._division is None:
                hidden = pad(hidden, outside)
        calls = tuple(
            ChunkedCall((), {}, hidden_is_keyword=False, rows=self, number=number)
            for number in range(len(self._layers))
        )
        return Prelude(hidden, calls)

    def rows_of(self, chunk: int) -> slice:
        """Return the rows for which a chunk is computed: the first one, if all have its tokens."""
        return slice(1) if self.spans[chunk].stop <= self._fork else slice(None)

    def states(self, number: int, host_keys: HostKeys | None = None) -> ChunkStates:
        """Return what takes the states of a layer through which the chunks are to go.

        Args:
            number: the layer.
            host_keys: has keys and values wait in host memory, unless somebody takes them; None:
                they are on the device.
        """
        division = self._division
        if division is None:
            shape = self.spans[-1].stop, self._fork, len(self._tokens)
            if host_keys is None or self._finished is not None:
                states = ChunkStates(*shape)
            else:
                states = host_keys.states(*shape)
        else:
            names = division.states.get(number, ())
            row = division.of(self.length)
            states = DividedStates(row, division, names, self._tokens.device)
        if self._finished is not None:
            self._finished.append(states)
        return states

    def note_states(self, number: int, names: Sequence[str]) -> None:
        """Note which states a layer hands from chunk to chunk."""
        if self._division is not None:
            self._division.note_states(number, names)

    def keep_states(self) -> list[ChunkStates]:
        """Return a list to which the states of each layer are added from now on."""
        self._finished = []
        return self._finished

    def call(self, number: int, chunk: int) -> LayerCall:
        """Return the call of a layer on a chunk."""
        calls = self._calls[chunk]
        if calls is None:
            calls = self.front(chunk, again=True).calls
        return calls[number]

    def _keeps_packs(self) -> bool:
        """Whether the model itself keeps attention within the rows of a pack, by as many kinds of
        positions as there are."""
        tokens = self._tokens[:1, : len(PACK)]
        pack = torch.tensor([PACK], device=tokens.device)[:, : tokens.shape[1]]
        positions = self._inputs.positions
        if positions is not None and positions.dim() == 3:
            pack = pack.expand(len(positions), *pack.shape)
        sample = {self._inputs.name: tokens, POSITIONS: pack}
        return asks_for_packs(partial(self._front, sample, None, again=True))

    @property
    def masked(self) -> bool:
        """Whether a mask says which tokens are padding."""
        return self._inputs.padding is not None

    def sample(self, length: int, size: int) -> tuple[Prelude, ChunkedRows]:
        """Return what the model makes of the first `length` tokens up to its layers, and the same
        tokens in chunks of `size`. Fewer are repeated. If there is a mask, the first `PADDING` of
        them are padding. Nothing is left behind."""
        tokens = self._tokens[:1, :length].detach()
        repeats = -(-length // tokens.shape[1])
        tokens = tokens.repeat(1, repeats, *[1] * (tokens.dim() - 2))[:, :length]
        batch = {self._inputs.name: tokens}
        if self.masked:
            batch[MASK] = tokens.new_ones(tokens.shape[:2], dtype=torch.long)
            batch[MASK][:, :PADDING] = 0
        elif isinstance(mask := self._inputs.values.get(MASK), Tensor):
            # without one the layers might see later tokens
            batch[MASK] = causal_like(mask, length, self.cache.kinds[0].window)
        prelude = self._front(batch, None, again=True)
        inputs = TokenInputs(batch)
        rows = ChunkedRows(self._model, self._layers, self._front, inputs, size)
        return Prelude(prelude.hidden, tuple(_alone(prelude.calls))), rows

    def _embeddings(self, *, differentiate: bool) -> Tensor | None:
        """Return what the model looks up for all tokens, where somebody has a hook on it: noise
        goes by the length of the sequence. None: nobody has."""
        if self._inputs.name != IDS:
            return None
        try:
            table = self._model.get_input_embeddings()
        except (NotImplementedError, AttributeError):
            return None
        if not isinstance(table, nn.Module) or not is_hooked(table):
            return None
        with torch.set_grad_enabled(differentiate):
            embeddings: Tensor = table(self._tokens)
        return embeddings

    def front(
        self,
        chunk: int,
        embeddings: Tensor | None = None,
        *,
        differentiate: bool = False,
        again: bool = False,
    ) -> Prelude:
        """Run the model up to its layers on one chunk; see `Front`. `embeddings` of all tokens
        stand for their ids."""
        span = self.spans[chunk]
        self.cache.move(span)
        inputs = self._inputs if embeddings is None else self._inputs.looked_up(embeddings)
        part = inputs.part(span, self.rows_of(chunk))
        with ExitStack() as stack:
            for context in self._contexts():
                stack.enter_context(context)
            try:
                front = self._front(part, self.cache, differentiate=differentiate, again=again)
            except PASSED_THROUGH_THE_MODEL as error:
                if is_out_of_memory(error):
                    raise
                raise refusal(f"the model does not run on a chunk: {error}") from error
        calls = _alone(front.calls)
        if any(tensor.requires_grad for tensor in tensors_in(_arguments(calls))):
            raise refusal("its layers are given something that trains before them")
        masks = {id(leaf) for leaf in tree_leaves(part.get(MASK))} if inputs.masks else set()
        return Prelude(front.hidden, tuple(self._with_cached_keys(calls, masks)))

    def _with_cached_keys(
        self, calls: Sequence[LayerCall], masks: Collection[int]
    ) -> Iterator[LayerCall]:
        """Yield the calls of all layers with masks that have the keys which the cache hands them.

        Args:
            calls: of a chunk.
            masks: the `id` of each mask that was made before, of all keys up to the chunk's end.
        """
        span = self.cache.span
        size = span.stop - span.start
        for number, call in enumerate(calls):
            if not masks or not self.cache.kinds[number].attends:
                yield call
                continue
            _, first = self.cache.get_mask_sizes(size, number)
            keys = Span(first, span.stop)

            def cut(leaf: object, keys: Span = keys) -> object:
                if isinstance(leaf, Tensor) and id(leaf) in masks:
                    return pairs_of(leaf, Span(0, size), keys)
                return leaf

            yield call.with_arguments(changed(call.args, cut), changed(call.kwargs, cut))

    def _contexts(self) -> Iterable[AbstractContextManager[None]]:
        """Yield the contexts in which the model is called on a chunk."""
        positions = self._inputs.positions
        yield block_masks()
        if self._tables:
            last = torch.tensor(self.length - 1, device=self._tokens.device)
            yield rotary_of_length(self._tables, last if positions is None else positions.max())
        if self._numbers is not None and self._text_positions is not None:
            attention = self._model.config.get_text_config()._attn_implementation
            yield packed_rows(attention, self._text_positions, self._numbers)

    def _call_bytes(self) -> int:
        """Bytes of what the calls hold on the device."""
        storages = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
            for calls in self._calls
            if calls is not None
            for tensor in tensors_in(_arguments(calls))
        }
        return sum(storages.values())


@dataclass
class ChunkedCall(LayerCall):
    """The call of a layer on a micro-batch that goes through it in chunks."""

    rows: ChunkedRows = field(kw_only=True)
    number: int = field(kw_only=True)

    @property
    def spans(self) -> Sequence[Span]:
        """The chunks."""
        return self.rows.spans

    @property
    def parts(self) -> Sequence[Span]:
        """Where they lie in the hidden state."""
        return self.rows.parts

    @property
    def cache(self) -> SequenceCache:
        """The cache with which the layer is called."""
        return self.rows.cache

    @property
    def keeps(self) -> bool:
        """Whether the layer keeps anything of a chunk for later ones."""
        return self.cache.kinds[self.number].keeps

    def chunk(self, index: int) -> LayerCall:
        """Return the call on a chunk, as the model was called."""
        call = self.rows.call(self.number, index)
        call.call_as(self.autocast, self.hooks)
        if self.adapter is not None:
            call.compute_with(self.adapter)
        if self.choices is not None:
            by_row = self.choices.unflatten(0, (-1, self.rows.length))
            call.choose(by_row[:, self.spans[index].slice].flatten(0, 1))
        return call


def _arguments(calls: Iterable[LayerCall]) -> list[object]:
    return [call.captured_values for call in calls]


def _alone(calls: Iterable[LayerCall]) -> list[LayerCall]:
    """Return the calls of layers that run one at a time. `ConfigError`: they need each other."""
    alone = [call.alone() for call in calls]
    if any(call is None for call in alone):
        raise refusal("its layers hand on more than the hidden state")
    return [call for call in alone if call is not None]
