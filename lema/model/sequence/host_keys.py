"""Keys and values of a layer that wait in host memory between the chunks of a sequence.

What a chunk leaves goes to the host, and attention has its blocks of keys come back one page after
the other, forwards and backwards; so do the sums of their gradients, which go down again. So what a
layer holds on the device does not grow with the row. A layer that computes anything else of all
keys than attention in blocks is refused: it is handed what only stands for them.

Sums of gradients travel both ways. Were they added on the host, a chunk's backward would bring
``2b`` bytes of each number up (keys or values of ``b`` bytes, in the recomputed forward and in the
backward) and 4 down, in place of ``2b + 4`` up and 4 down. A link carries both directions at
once, so that is 4 against 8 bytes in half precision. But the processor would read and write 12
bytes for each number meanwhile, and a sum of sums would round in another way than keys on the
device do. A page of keys serves all queries of a chunk: ``7 * chunk * g`` operations for each
of its numbers, with `g` heads of queries for one of keys. That is some 14,000 operations a byte
for chunks of 4,096 and four heads, which takes longer than the copies do on links of tens of GB/s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd.function import FunctionCtx

from lema.backend import Carrier
from lema.errors import ConfigError
from lema.model.sequence.attention import KEYS
from lema.model.sequence.blockmask import QUESTIONS
from lema.model.sequence.pages import PagedTokens, PageForm, PageStore
from lema.model.sequence.states import ChunkStates, Span

__all__ = ["HostKeys", "HostStates", "KeysElsewhere"]

PAGE_BYTES = 4 << 20  # of keys and values of all rows, a few of a link's shortest full copies


class HostKeys:
    """Host memory for the keys and values of the layer at work.

    Args:
        carrier: copies between there and the device.
    """

    def __init__(self, carrier: Carrier) -> None:
        self.store = PageStore(carrier)

    def states(self, length: int, fork: int = 0, num_rows: int = 1) -> HostStates:
        """Return what takes the states of a layer; the arguments are those of `ChunkStates`."""
        return HostStates(self.store, length, fork, num_rows)


class KeysElsewhere(Tensor):
    """Stands for keys, or values, `[rows, heads, n, width]` that are not on the device; it has no
    values of its own. `standing_for` makes one."""

    @staticmethod
    def standing_for(states: Tensor, num_tokens: int) -> KeysElsewhere:
        """Return what stands for so many tokens; `states` are those of a chunk."""
        shape = (*states.shape[:-2], num_tokens, states.shape[-1])
        with unset_fake_temporarily():
            stand_in = torch.empty(1, dtype=states.dtype, device=states.device).expand(*shape)
            return stand_in.as_subclass(KeysElsewhere)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Answer questions about the shape. `ConfigError`: anything else is asked."""
        if func in QUESTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise ConfigError(
            "keys and values cannot wait in host memory: a layer of this model computes something "
            "of all of them that is not attention in blocks, as latent attention does, and "
            "attention that is not `sdpa` or has dropout, biases or a cap in it",
            where="keys_values",
            how="set it to device",
        )


class HostStates(ChunkStates):
    """What a layer keeps of one micro-batch, with keys and values in pages of host memory.

    Args:
        store: room for pages.
        length: tokens of the sequence.
        fork: the tokens that all rows share, which are computed for the first row alone.
        num_rows: of the micro-batch.
    """

    def __init__(self, store: PageStore, length: int, fork: int, num_rows: int) -> None:
        super().__init__(length, fork, num_rows)
        self._store = store
        self._length = length
        self._written = 0  # the token up to which keys and values are there
        self._paged: PagedTokens | None = None
        self._sums: PagedTokens | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        paged = (self._paged, self._sums)
        return super().nbytes + sum(tokens.nbytes for tokens in paged if tokens is not None)

    @property
    def host_bytes(self) -> tuple[int, int]:
        """Bytes of host memory for keys and values of the whole row, and for the sums of their
        gradients."""
        if self._paged is None:
            return 0, 0
        return self._paged.host_bytes, self._all_sums().host_bytes

    def extended(
        self, keys: Tensor, values: Tensor, span: Span, first: int
    ) -> tuple[Tensor, Tensor]:
        """Put in a chunk's keys and values; return them, or what stands for all from token
        `first` to their end."""
        self._write(keys.detach(), values.detach(), span)
        if first == span.start:  # there are no others
            extended: tuple[Tensor, Tensor] = _Alone.apply(keys, values, self, span)  # type: ignore[no-untyped-call] # torch's is
            return extended
        num_tokens = span.stop - first
        return (
            KeysElsewhere.standing_for(keys, num_tokens),
            KeysElsewhere.standing_for(values, num_tokens),
        )

    def _write(self, keys: Tensor, values: Tensor, span: Span) -> None:
        if self._paged is None:
            self._paged = PagedTokens(self._store, self._form(keys, values), self._length)
        # A chunk that is recomputed makes what it has left before, bit for bit.
        if span.stop > self._written:
            with torch.no_grad():
                self._paged.write((keys, values), span.start)
            self._written = span.stop

    def _form(self, keys: Tensor, values: Tensor) -> PageForm:
        """Return how keys and values lie in a page, of a whole number of blocks."""
        parts = tuple((part.shape[1], part.shape[-1], part.dtype) for part in (keys, values))
        block = PageForm(KEYS, parts)
        num_blocks = min(PAGE_BYTES // (self._num_rows * block.row_bytes), -(-self._length // KEYS))
        # a power of two, because rows of all lengths use the same room
        return PageForm(KEYS << max(0, num_blocks.bit_length() - 1), parts)

    def attended(self, span: Span, first: int) -> _Attended:
        """Return the keys and values from token `first` to the end of a chunk, by blocks."""
        return _Attended(self, span, first)

    def keys_values(self, length: int) -> tuple[Tensor, Tensor] | None:
        """Return keys and values of so many tokens, `[rows, heads, length, width]`, on the device;
        None: there are none."""
        if self._paged is None:
            return None
        keys, values = self._paged.read(0, length, self._paged.num_rows)
        return keys.clone(), values.clone()

    def block(self, start: int, stop: int, span: Span) -> tuple[Tensor, Tensor]:
        """Return keys and values of some tokens on the device, for the rows of a chunk."""
        assert self._paged is not None, "no chunk has come"
        num_rows = 1 if span.stop <= self._fork else self._paged.num_rows
        keys, values = self._paged.read(start, stop, num_rows)
        return keys, values

    @contextmanager
    def gradients(self, start: int, stop: int, span: Span) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the sums of gradients of some keys and values on the device, of the rows of a
        chunk, to add to in the `with` block."""
        with self._all_sums().changing(start, stop, self._rows_of(span)) as (keys, values):
            yield keys, values

    def own_gradients(self, span: Span) -> tuple[Tensor, Tensor]:
        """Return the sums of the gradients of a chunk's own; they are handed out once."""
        assert self._paged is not None, "no chunk has come"
        shared = self._rows_of(span).stop is not None
        dtypes = [dtype for _, _, dtype in self._paged.form.parts]
        gradients = list[Tensor]()
        for start, sums in self._all_sums().take(*span):
            summed = [part.sum(dim=0, keepdim=True) if shared else part for part in sums]
            if not gradients:
                length = span.stop - span.start
                gradients = [
                    part.new_empty(*part.shape[:2], length, part.shape[-1], dtype=dtype)
                    for part, dtype in zip(summed, dtypes, strict=True)
                ]
            for gradient, part in zip(gradients, summed, strict=True):
                begin = start - span.start
                gradient[:, :, begin : begin + part.shape[-2]] = part
        keys, values = gradients
        return keys, values

    def _rows_of(self, span: Span) -> slice:
        """The rows for which a chunk is computed."""
        return slice(1) if span.stop <= self._fork else slice(None)

    def _all_sums(self) -> PagedTokens:
        """The sums of gradients, in single precision at least."""
        assert self._paged is not None, "no chunk has come"
        if self._sums is None:
            form = self._paged.form
            parts = tuple(
                (heads, width, torch.promote_types(dtype, torch.float32))
                for heads, width, dtype in form.parts
            )
            self._sums = PagedTokens(
                self._store,
                PageForm(form.tokens, parts),
                self._length,
                num_rows=self._paged.num_rows,
            )
        return self._sums


class _Attended:
    """The keys and values that a chunk attends to, of which a few pages are on the device.

    Args:
        states: what the layer keeps.
        span: the chunk.
        first: the first token that is attended to.
    """

    on_device = False

    def __init__(self, states: HostStates, span: Span, first: int) -> None:
        self._states = states
        self._span = span
        self._first = first

    def block(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return some keys and values `[rows, heads, n, width]`, counted from the first."""
        return self._states.block(self._first + start, self._first + stop, self._span)

    @contextmanager
    def gradients(self, start: int, stop: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the sums of their gradients, to add to in the `with` block."""
        bounds = self._first + start, self._first + stop
        with self._states.gradients(*bounds, self._span) as sums:
            yield sums

    def own_gradients(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of the chunk's own keys and values."""
        return self._states.own_gradients(self._span)


class _Alone(torch.autograd.Function):
    """Keys and values of a chunk that attends to its own alone. Later chunks' part of their
    gradients comes from the host."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, keys: Tensor, values: Tensor, states: HostStates, span: Span
    ) -> tuple[Tensor, Tensor]:
        handed = keys.detach().contiguous().clone(), values.detach().contiguous().clone()
        needs_grad: Sequence[bool] = ctx.needs_input_grad  # type: ignore[attr-defined] # autograd has it
        pairs = zip(handed, needs_grad, strict=False)
        ctx.mark_non_differentiable(*[tensor for tensor, needs in pairs if not needs])
        ctx.set_materialize_grads(False)
        ctx.paged = states, span  # type: ignore[attr-defined] # autograd keeps it
        return handed

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        states, span = ctx.paged  # type: ignore[attr-defined] # as above
        with states.gradients(*span, span) as sums:
            for total, gradient in zip(sums, gradients, strict=True):
                if gradient is not None:
                    total += gradient
        return *states.own_gradients(span), None, None
