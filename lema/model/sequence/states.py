"""The memory of what one layer keeps of a sequence's chunks, and the gradients that come back.

Keys and values of a chunk are written behind those of the chunks before it, and attention is given
all of them. Of a convolution or a recurrence the chunk before has left a state. In the backward
chunks come in reverse, each with a graph of its own, which begins at what earlier chunks have left.
What it adds to the gradients of earlier keys and values is summed here, and enters the graph of the
chunk that has made them; so does the gradient of a state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

__all__ = ["Attended", "AttendedBlocks", "ChunkStates", "Span"]


class Span(NamedTuple):
    """The tokens of a chunk: from `start` to before `stop`."""

    start: int
    stop: int

    @property
    def slice(self) -> slice:
        """The same as a slice."""
        return slice(self.start, self.stop)

    def within(self, span: Span) -> Span:
        """Return where the tokens are that `span` has at these places."""
        return Span(span.start + self.start, span.start + self.stop)


class _Buffer:
    """What a layer makes of each token for later ones, `[rows, heads, sequence, width]`, and the
    sum of its gradients.

    The sum is in single precision where keys are in half: each chunk adds to it, and a whole
    sequence would have rounded once.

    Args:
        length: tokens of the sequence.
        fork: the tokens that all rows share, which are computed for the first row alone.
    """

    def __init__(self, length: int, fork: int = 0) -> None:
        self._length = length
        self._fork = fork
        self._values: Tensor | None = None
        self._gradients: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        tensors = (self._values, self._gradients)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def extended(self, states: Tensor, span: Span, first: int) -> Tensor:
        """Put in those of a chunk; return all from token `first` to the end of the chunk."""
        self.put(states, span)
        if states.requires_grad and torch.is_grad_enabled():
            extended: Tensor = _Extended.apply(states, self, span, first)  # type: ignore[no-untyped-call] # torch's is
            return extended
        return self.between(first, span.stop)

    def put(self, states: Tensor, span: Span) -> None:
        """Put in those of a chunk."""
        if self._values is None:
            shape = (*states.shape[:-2], self._length, states.shape[-1])
            # zeros, because padding before the first chunk is masked, but attention multiplies it
            self._values = states.new_zeros(shape) if span.start else states.new_empty(shape)
        elif len(states) > len(self._values):
            shared = self._values[..., : self._fork, :]
            self._values = states.new_empty(len(states), *self._values.shape[1:])
            self._values[..., : self._fork, :] = shared
        with torch.no_grad():
            self._values[: len(states), ..., span.slice, :] = states

    def rows_at(self, stop: int) -> slice:
        """Return the rows for which a chunk that ends before token `stop` is computed."""
        return slice(1) if stop <= self._fork else slice(None)

    def between(self, first: int, stop: int, end: int | None = None) -> Tensor:
        """Return those of some tokens, without a graph, as the chunk has them that ends before
        token `end`; None: before `stop`."""
        assert self._values is not None, "no chunk has come"
        rows = self.rows_at(stop if end is None else end)
        return self._values.detach()[rows, ..., first:stop, :]

    def sums(self) -> Tensor:
        """Return the sums of the gradients of all tokens."""
        assert self._values is not None, "no chunk has come"
        if self._gradients is None:
            dtype = torch.promote_types(self._values.dtype, torch.float32)
            self._gradients = torch.zeros_like(self._values, dtype=dtype)
        return self._gradients

    def add_gradients(self, gradients: Tensor, span: Span, first: int) -> Tensor:
        """Add to the gradients of the tokens from `first` to the end of a chunk; return the sum of
        the chunk's own."""
        self.sums()[self.rows_at(span.stop), ..., first : span.stop, :] += gradients
        return self.own_gradients(span)

    def own_gradients(self, span: Span) -> Tensor:
        """Return the sum of the gradients of a chunk's own; it is handed out once."""
        assert self._values is not None, "no chunk has come"
        sums = self.sums()[..., span.slice, :]
        rows = self.rows_at(span.stop)
        of_chunk = sums if rows.stop is None else sums.sum(dim=0, keepdim=True)
        summed = of_chunk.to(self._values.dtype, copy=True)
        sums.zero_()
        return summed


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


class AttendedBlocks(Protocol):
    """The keys and values that a chunk attends to, and the sums of their gradients, of which
    attention has one block at a time."""

    @property
    def on_device(self) -> bool:
        """Whether all are on the device at once."""

    def block(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return keys and values from `start` to before `stop`, `[rows, heads, n, width]`. Blocks
        are asked for in ascending order."""

    def gradients(self, start: int, stop: int) -> AbstractContextManager[tuple[Tensor, Tensor]]:
        """Return a context with the sums of the gradients of a block, to add to in it."""

    def own_gradients(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of those that the graph has made."""


class Attended:
    """The keys and values that a chunk attends to, and the sums of their gradients, on the device.

    Args:
        keys: of all tokens.
        values: of all tokens.
        span: the chunk.
        first: the first token that is attended to.
    """

    on_device = True

    def __init__(self, keys: _Buffer, values: _Buffer, span: Span, first: int) -> None:
        self._keys = keys
        self._values = values
        self._span = span
        self._first = first

    def block(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return some keys and values `[rows, heads, n, width]`, counted from the first."""
        bounds = self._first + start, self._first + stop, self._span.stop
        return self._keys.between(*bounds), self._values.between(*bounds)

    def sums(self) -> tuple[Tensor, Tensor]:
        """Return the sums of the gradients of all that the chunk attends to, to add to."""
        part = slice(self._first, self._span.stop)
        rows = self._keys.rows_at(self._span.stop)
        return self._keys.sums()[rows, ..., part, :], self._values.sums()[rows, ..., part, :]

    @contextmanager
    def gradients(self, start: int, stop: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the sums of the gradients of a block, to add to in the `with` block."""
        keys, values = self.sums()
        yield keys[..., start:stop, :], values[..., start:stop, :]

    def own_gradients(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of the chunk's own keys and values."""
        return self._keys.own_gradients(self._span), self._values.own_gradients(self._span)


class _State:
    """A state that each chunk leaves to the next: what each has left, by the token after it, and
    of the chunk that has a graph where that begins and ends."""

    def __init__(self) -> None:
        self._left: dict[int, Tensor] = {}
        self.leaf: Tensor | None = None  # what the chunk was given
        self._exit: Tensor | None = None  # what the chunk leaves
        self._gradient: Tensor | None = None  # of that, from the chunk after it
        self._repeated = False  # whether the chunk was given one row's state for several rows

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(state.nbytes for state in self._left.values())

    def entered(self, span: Span, num_rows: int | None = None) -> Tensor | None:
        """Return what the chunk before has left, for so many rows; None, of the first: of as many
        as it had. None: nothing."""
        if self.leaf is None and span.start in self._left:
            state = self._left[span.start].detach()
            self._repeated = num_rows is not None and len(state) < num_rows
            if num_rows is not None and self._repeated:
                state = state.repeat(num_rows, *[1] * (state.dim() - 1))
            if not torch.is_grad_enabled():
                return state
            self.leaf = state.requires_grad_(state.is_floating_point())
        return self.leaf

    def leave(self, state: Tensor, span: Span) -> None:
        """Leave a state after a chunk."""
        if not torch.is_grad_enabled():
            # A copy, because a view would keep all that it is one of.
            self._left[span.stop] = state.detach().clone()
            return
        self._left.pop(span.stop, None)  # the chunk that it was for is done
        self._exit = state if state.requires_grad else None

    def last(self) -> Tensor:
        """Return what the last chunk has left."""
        return self._left[max(self._left)]

    def root(self) -> tuple[Tensor, Tensor] | None:
        """Return what the chunk leaves, and its gradient; None: it has none."""
        if self._exit is None or self._gradient is None:
            return None
        return self._exit, self._gradient

    def end(self, gradient: Tensor | None) -> None:
        """Let go of the chunk's graph; `gradient` is that of what it was given."""
        if gradient is not None and self._repeated:
            gradient = gradient.sum(dim=0, keepdim=True)
        self._gradient = gradient
        self.leaf = None
        self._exit = None


class ChunkStates:
    """What one layer keeps of one micro-batch for later chunks, and the gradients of that.

    Args:
        length: tokens of the sequence.
        fork: the tokens that all rows share, which are computed for the first row alone.
        num_rows: of the micro-batch, if they share some.
    """

    def __init__(self, length: int, fork: int = 0, num_rows: int = 1) -> None:
        self._keys = _Buffer(length, fork)
        self._values = _Buffer(length, fork)
        self._fork = fork
        self._num_rows = num_rows
        self._states: dict[str, _State] = {}

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._keys.nbytes + self._values.nbytes + self.handed_on_bytes

    @property
    def handed_on(self) -> tuple[str, ...]:
        """The names of the states that each chunk leaves to the next."""
        return tuple(self._states)

    @property
    def num_handed_on(self) -> int:
        """How many states each chunk leaves to the next."""
        return len(self._states)

    @property
    def handed_on_bytes(self) -> int:
        """Bytes of the states that chunks have left."""
        return sum(state.nbytes for state in self._states.values())

    def extended(
        self, keys: Tensor, values: Tensor, span: Span, first: int
    ) -> tuple[Tensor, Tensor]:
        """Put in a chunk's keys and values `[rows, heads, chunk, width]`; return all from token
        `first` to its end."""
        return self._keys.extended(keys, span, first), self._values.extended(values, span, first)

    def keys_values(self, length: int) -> tuple[Tensor, Tensor] | None:
        """Return keys and values of so many tokens, `[rows, heads, length, width]`, without a
        graph; None: there are none."""
        if not self._keys.nbytes:
            return None
        return self._keys.between(0, length), self._values.between(0, length)

    def last_states(self) -> dict[str, Tensor]:
        """Return the states that the last chunk has left, by name."""
        return {name: state.last() for name, state in self._states.items()}

    def attended(self, span: Span, first: int) -> AttendedBlocks:
        """Return the keys and values from token `first` to the end of a chunk, by blocks."""
        return Attended(self._keys, self._values, span, first)

    def entered(self, name: str, span: Span) -> Tensor | None:
        """Return a state as the chunk before has left it; None: there is none."""
        state = self._states.get(name)
        if state is None:
            return None
        return state.entered(span, self._num_rows if 0 < span.start == self._fork else None)

    def leave(self, name: str, state: Tensor, span: Span) -> None:
        """Leave a state after a chunk."""
        self._states.setdefault(name, _State()).leave(state, span)

    def roots(self) -> list[tuple[Tensor, Tensor]]:
        """Return the states that the chunk with a graph leaves, with their gradients, as far as
        they have some."""
        roots = [state.root() for state in self._states.values()]
        return [root for root in roots if root is not None]

    def leaves(self) -> list[Tensor]:
        """Return the states that the chunk with a graph was given."""
        leaves = [state.leaf for state in self._states.values()]
        return [leaf for leaf in leaves if leaf is not None]

    def end(self, gradients: Sequence[Tensor | None]) -> None:
        """Let go of the graph of a chunk; `gradients` are those of its `leaves`."""
        formed = iter(gradients)
        for state in self._states.values():
            state.end(None if state.leaf is None else next(formed))
