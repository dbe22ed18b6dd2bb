"""The chunks of one micro-batch, and how each layer is called on each of them.

What a chunk's call takes beside the hidden state, such as a mask or a rotary table, is made by the
model's own forward, which is called on the chunk's tokens with a cache that has the length of the
chunks before it, as generation calls it. So nothing here knows what these arguments are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from lema.errors import is_out_of_memory
from lema.model.capture import PASSED_THROUGH_THE_MODEL, tensors_in
from lema.model.flow import LayerCall, Prelude
from lema.model.sequence.blockmask import block_masks
from lema.model.sequence.cache import SequenceCache, kinds_of, refusal
from lema.model.sequence.masks import (
    asks_for_packs,
    numbers_of_rows,
    packed_rows,
    rotary_of_length,
    tables_by_length,
)
from lema.model.sequence.states import Span

__all__ = ["PADDING", "ChunkedCall", "ChunkedRows", "most_of_calls", "spans_of"]

MASK = "attention_mask"
POSITIONS = "position_ids"
INPUTS = frozenset({"input_ids", MASK, POSITIONS})
CALL_BYTES = 32 << 20
PADDING = 2  # tokens
PACK = (0, 1, 0, 1)  # positions of two rows


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


def spans_of(length: int, size: int) -> list[Span]:
    """Return the chunks of a sequence of so many tokens, each of `size` but for the last. That is
    never a single token, which models take for one that they generate, and change a state in its
    place."""
    starts = list(range(0, max(1, length - 1), size))
    return [Span(start, stop) for start, stop in pairwise([*starts, length])]


def most_of_calls(hidden_bytes: int) -> int:
    """Return the bytes of a micro-batch's calls, up to which these are kept for the backward.

    Args:
        hidden_bytes: of its hidden state.
    """
    return max(hidden_bytes, CALL_BYTES)


class ChunkedRows:
    """The chunks of one micro-batch.

    Args:
        model: the model.
        layers: its decoder layers.
        front: runs it up to them.
        batch: `input_ids`, `[rows, sequence]`, and what else the model takes.
        size: tokens of a chunk.

    Attributes:
        spans: the chunks.
        cache: with which they are called.

    Raises:
        ConfigError: what the model takes, or what its layers keep, cannot be cut.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: torch.nn.ModuleList,
        front: Front,
        batch: Mapping[str, Tensor],
        size: int,
    ) -> None:
        self._model = model
        self._layers = layers
        self._front = front
        self._batch = dict(batch)
        self._length = batch["input_ids"].shape[1]
        _check_inputs(self._batch)
        self.spans = spans_of(self._length, size)
        self.cache = SequenceCache(kinds_of(DynamicCache(config=model.config).layers, len(layers)))
        positions = batch.get(POSITIONS)
        self._numbers: Tensor | None = None  # of the rows of packs, to which attention keeps
        if positions is not None and MASK not in batch and self._keeps_packs():
            self._numbers = numbers_of_rows(positions)
        self._tables = tables_by_length(model, layers)
        self._calls: list[tuple[LayerCall, ...] | None] = [None] * len(self.spans)
        self._hidden_bytes = 0

    def prelude(self, *, differentiate: bool = False) -> Prelude:
        """Run the model up to its layers, chunk after chunk; return the hidden state of the whole
        micro-batch, and the call of every layer, which calls it on each chunk.
        """
        states = list[Tensor]()
        for chunk in range(len(self.spans)):
            front = self.front(chunk, differentiate=differentiate)
            states.append(front.hidden)
            self._hidden_bytes += front.hidden.nbytes
            self._calls[chunk] = front.calls
            if self._call_bytes() > most_of_calls(self._hidden_bytes):
                # Masks of long sequences are larger than all else: they are made at each visit.
                self._calls = [None] * len(self.spans)
        hidden = torch.cat(states, dim=1)
        calls = tuple(
            ChunkedCall((), {}, hidden_is_keyword=False, rows=self, number=number)
            for number in range(len(self._layers))
        )
        return Prelude(hidden, calls)

    def call(self, number: int, chunk: int) -> LayerCall:
        """Return the call of a layer on a chunk."""
        calls = self._calls[chunk]
        if calls is None:
            calls = self.front(chunk, again=True).calls
        return calls[number]

    def _keeps_packs(self) -> bool:
        """Whether the model itself keeps attention within the rows of a pack."""
        ids = self._batch["input_ids"][:1, : len(PACK)]
        positions = torch.tensor([PACK], device=ids.device)[:, : ids.shape[1]]
        sample = {"input_ids": ids, POSITIONS: positions}
        return asks_for_packs(partial(self._front, sample, None, again=True))

    @property
    def masked(self) -> bool:
        """Whether a mask says which tokens are padding."""
        return MASK in self._batch

    def sample(self, length: int, size: int) -> tuple[Prelude, ChunkedRows]:
        """Return what the model makes of the first `length` tokens up to its layers, and the same
        tokens in chunks of `size`. If there is a mask, the first `PADDING` of them are padding.
        Nothing is left behind."""
        batch = {"input_ids": self._batch["input_ids"][:1, :length]}
        if self.masked:
            batch[MASK] = torch.ones_like(batch["input_ids"])
            batch[MASK][:, :PADDING] = 0
        prelude = self._front(batch, None, again=True)
        return prelude, ChunkedRows(self._model, self._layers, self._front, batch, size)

    def front(self, chunk: int, *, differentiate: bool = False, again: bool = False) -> Prelude:
        """Run the model up to its layers on one chunk; see `Front`."""
        span = self.spans[chunk]
        self.cache.move(span)
        with ExitStack() as stack:
            for context in self._contexts():
                stack.enter_context(context)
            try:
                front = self._front(
                    self._cut(span), self.cache, differentiate=differentiate, again=again
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
            ids = self._batch["input_ids"]
            last = torch.tensor(self._length - 1, device=ids.device)
            yield rotary_of_length(self._tables, last if positions is None else positions.max())
        if self._numbers is not None and positions is not None:
            attention = self._model.config.get_text_config()._attn_implementation
            yield packed_rows(attention, positions, self._numbers)

    def _cut(self, span: Span) -> dict[str, Tensor]:
        """Return a chunk's part of what the model takes. A mask is of all tokens up to its end."""
        return {
            name: tensor[:, : span.stop] if name == MASK else tensor[:, span.slice]
            for name, tensor in self._batch.items()
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
    def cache(self) -> SequenceCache:
        """The cache with which the layer is called."""
        return self.rows.cache

    @property
    def keeps(self) -> bool:
        """Whether the layer keeps anything of a chunk for later ones."""
        return self.cache.kinds[self.number].keeps

    def chunk(self, index: int) -> LayerCall:
        """Return the call on a chunk."""
        return self.rows.call(self.number, index)


def _arguments(calls: Iterable[LayerCall]) -> list[object]:
    return [call.captured_values for call in calls]


def _check_inputs(batch: Mapping[str, Tensor]) -> None:
    if unknown := sorted(batch.keys() - INPUTS):
        raise refusal(f"batches have {', '.join(unknown)}, which may belong to the whole sequence")
    shape = batch["input_ids"].shape
    for name, tensor in batch.items():
        if tensor.shape != shape:
            raise refusal(f"{name} is {[*tensor.shape]}, not {[*shape]} as the tokens are")
