"""The chunks of one micro-batch, and how each layer is called on each of them.

What a chunk's call takes beside the hidden state, such as a mask or a rotary table, is made by the
model's own forward, which is called on the chunk's tokens with a cache that has the length of the
chunks before it, as generation calls it. So nothing here knows what these arguments are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel

from lema.errors import is_out_of_memory
from lema.model.capture import PASSED_THROUGH_THE_MODEL, tensors_in
from lema.model.flow import LayerCall, Prelude
from lema.model.sequence.blockmask import block_masks
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
from lema.model.sequence.states import ChunkStates, Span
from lema.model.state.hooks import is_hooked

__all__ = [
    "EMBEDDINGS",
    "IDS",
    "MASK",
    "PADDING",
    "POSITIONS",
    "ChunkedCall",
    "ChunkedRows",
    "most_of_calls",
    "spans_of",
]

IDS = "input_ids"
EMBEDDINGS = "inputs_embeds"
MASK = "attention_mask"
POSITIONS = "position_ids"
INPUTS = frozenset({IDS, MASK, POSITIONS})
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
        batch: Mapping[str, Tensor],
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


def spans_of(length: int, size: int, first: int = 0) -> list[Span]:
    """Return the chunks of the tokens from `first` to before `length`, each of `size` but for the
    last. That is never a single token, which models take for one that they generate, and change a
    state in its place."""
    starts = list(range(first, max(first + 1, length - 1), size))
    return [Span(start, stop) for start, stop in pairwise([*starts, length])]


def tokens_inside(mask: Tensor) -> Span:
    """Return the tokens between the padding that all rows of `mask`, `[rows, sequence]`, have at
    their beginning and at their end; all, if every token is padding."""
    seen = (mask != 0).any(dim=0).nonzero().flatten()
    if not len(seen):
        return Span(0, mask.shape[1])
    first, last = seen[[0, -1]].tolist()
    # never one token alone; see `spans_of`
    return Span(max(0, min(first, last - 1)), last + 1)


def shared_tokens(batch: Mapping[str, Tensor]) -> int:
    """Return with how many tokens all rows of a micro-batch begin, padding among them; 0: they have
    no ids, or share nothing."""
    if IDS not in batch or len(batch[IDS]) == 1:
        return 0
    alike = torch.stack([(tensor == tensor[:1]).all(dim=0) for tensor in batch.values()])
    return int(alike.all(dim=0).cumprod(dim=0).sum())


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
        batch: `input_ids`, `[rows, sequence]`, or `inputs_embeds`, `[rows, sequence, hidden]`, and
            what else the model takes.
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
        batch: Mapping[str, Tensor],
        size: int | RowDivision,
        *,
        leaves_out_padding: bool = False,
        shares: bool = False,
    ) -> None:
        self._model = model
        self._layers = layers
        self._front = front
        self._batch = dict(batch)
        _check_inputs(self._batch, self._tokens)
        inside = Span(0, self.length)
        if leaves_out_padding and MASK in batch:
            inside = tokens_inside(batch[MASK])
        self._division = None if isinstance(size, int) else size
        self._fork = 0
        if isinstance(size, int):
            shared = shared_tokens(self._batch) if shares else 0
            if size <= shared - inside.start and shared < inside.stop - 1:
                self._fork = shared
            self.spans = spans_of(self._fork, size, inside.start) if self._fork else []
            self.spans += spans_of(inside.stop, size, self._fork or inside.start)
        else:
            self.spans = size.of(self.length).spans
        kinds = kinds_of(DynamicCache(config=model.config).layers, len(layers))
        self.cache = SequenceCache(kinds, inside.start)
        positions = batch.get(POSITIONS)
        self._numbers: Tensor | None = None  # of the rows of packs, to which attention keeps
        if positions is not None and MASK not in batch and self._keeps_packs():
            self._numbers = numbers_of_rows(positions)
        self._tables = tables_by_length(model, layers)
        self._calls: list[tuple[LayerCall, ...] | None] = [None] * len(self.spans)
        self._finished: list[ChunkStates] | None = None

    @property
    def _tokens(self) -> Tensor:
        """The tokens' ids, or what the caller has looked up for them."""
        return self._batch[self._name]

    @property
    def length(self) -> int:
        """Tokens of the sequence."""
        return self._tokens.shape[1]

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
        """Whether the model itself keeps attention within the rows of a pack."""
        tokens = self._tokens[:1, : len(PACK)]
        positions = torch.tensor([PACK], device=tokens.device)[:, : tokens.shape[1]]
        sample = {self._name: tokens, POSITIONS: positions}
        return asks_for_packs(partial(self._front, sample, None, again=True))

    @property
    def _name(self) -> str:
        """What the model calls its tokens."""
        return IDS if IDS in self._batch else EMBEDDINGS

    @property
    def masked(self) -> bool:
        """Whether a mask says which tokens are padding."""
        return MASK in self._batch

    def sample(self, length: int, size: int) -> tuple[Prelude, ChunkedRows]:
        """Return what the model makes of the first `length` tokens up to its layers, and the same
        tokens in chunks of `size`. Fewer are repeated. If there is a mask, the first `PADDING` of
        them are padding. Nothing is left behind."""
        tokens = self._tokens[:1, :length].detach()
        repeats = -(-length // tokens.shape[1])
        tokens = tokens.repeat(1, repeats, *[1] * (tokens.dim() - 2))[:, :length]
        batch = {self._name: tokens}
        if self.masked:
            batch[MASK] = tokens.new_ones(tokens.shape[:2], dtype=torch.long)
            batch[MASK][:, :PADDING] = 0
        prelude = self._front(batch, None, again=True)
        return prelude, ChunkedRows(self._model, self._layers, self._front, batch, size)

    def _embeddings(self, *, differentiate: bool) -> Tensor | None:
        """Return what the model looks up for all tokens, where somebody has a hook on it: noise
        goes by the length of the sequence. None: nobody has."""
        if IDS not in self._batch:
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
        with ExitStack() as stack:
            for context in self._contexts():
                stack.enter_context(context)
            try:
                front = self._front(
                    self._cut(span, self.rows_of(chunk), embeddings),
                    self.cache,
                    differentiate=differentiate,
                    again=again,
                )
            except PASSED_THROUGH_THE_MODEL as error:
                if is_out_of_memory(error):
                    raise
                raise refusal(f"the model does not run on a chunk: {error}") from error
        if not all(call.bare and not call.after for call in front.calls):
            raise refusal("its layers hand on more than the hidden state")
        if any(tensor.requires_grad for tensor in tensors_in(_arguments(front.calls))):
            raise refusal("its layers are given something that trains before them")
        return front

    def _contexts(self) -> Iterable[AbstractContextManager[None]]:
        """Yield the contexts in which the model is called on a chunk."""
        positions = self._batch.get(POSITIONS)
        yield block_masks()
        if self._tables:
            last = torch.tensor(self.length - 1, device=self._tokens.device)
            yield rotary_of_length(self._tables, last if positions is None else positions.max())
        if self._numbers is not None and positions is not None:
            attention = self._model.config.get_text_config()._attn_implementation
            yield packed_rows(attention, positions, self._numbers)

    def _cut(self, span: Span, rows: slice, embeddings: Tensor | None) -> dict[str, Tensor]:
        """Return a chunk's part of what the model takes. A mask is of all tokens up to its end."""
        batch = self._batch
        if embeddings is not None:
            batch = {name: tensor for name, tensor in batch.items() if name != IDS}
            batch[EMBEDDINGS] = embeddings
        return {
            name: tensor[rows, : span.stop] if name == MASK else tensor[rows, span.slice]
            for name, tensor in batch.items()
        }

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


def _check_inputs(batch: Mapping[str, Tensor], tokens: Tensor) -> None:
    if unknown := sorted(batch.keys() - INPUTS - {EMBEDDINGS}):
        raise refusal(f"batches have {', '.join(unknown)}, which may belong to the whole sequence")
    shape = tokens.shape[:2]
    for name, tensor in batch.items():
        if tensor is not tokens and tensor.shape != shape:
            raise refusal(f"{name} is {[*tensor.shape]}, not {[*shape]} as the tokens are")
