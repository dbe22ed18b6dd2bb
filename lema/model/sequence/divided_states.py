"""What one layer keeps of a sequence's chunks where processes divide the sequence.

Keys and values of a round's chunks are gathered from all processes as soon as the layer has made
its own, so a process has those of the whole row, of one layer at a time. Each process sums up what
its chunks add to the gradients of them, and when a round is differentiated, each gets the sum for
its chunk from all. A state comes from the process that has the chunk before, and its gradient goes
back there; both travel while other parts of the layer are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn.functional import pad

from lema.model.sequence.division import DividedRow, RowDivision
from lema.model.sequence.states import Attended, ChunkStates, Span

__all__ = ["DividedStates"]

OF_GRADIENTS = 1000  # is added to the number of a state in messages about its gradient


class _Attended(Attended):
    """The keys and values that a chunk attends to. The gradients of its own come from all
    processes.

    Args:
        states: what the layer keeps.
        arguments: of `Attended`.
        span: the chunk.
    """

    def __init__(self, states: DividedStates, arguments: tuple[Any, Any, Span, int]) -> None:
        super().__init__(*arguments)
        self._states = states
        self._chunk = arguments[2]

    def own_gradients(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of the chunk's own keys and values."""
        return self._states.own_gradients(self._chunk)


class _Extended(torch.autograd.Function):
    """A chunk's keys and values behind those of earlier tokens, which other processes have made."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        keys: Tensor,  # noqa: ARG004 - autograd looks at it
        values: Tensor,  # noqa: ARG004 - the same
        states: DividedStates,
        span: Span,
        first: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.extended = states, span, first  # type: ignore[attr-defined] # autograd keeps it
        return states.between(first, span.stop)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        states, span, first = ctx.extended  # type: ignore[attr-defined] # as above
        for sums, gradient in zip(states.attended(span, first).sums(), gradients, strict=True):
            sums += gradient
        return *states.own_gradients(span), None, None, None


class _Arrival(torch.autograd.Function):
    """A state that another process has left, whose gradient goes back there; `anchor` requires
    grad.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        anchor: Tensor,
        state: Tensor,
        division: RowDivision,
        owner: int,
        number: int,
    ) -> Tensor:
        ctx.arrival = anchor, division, owner, number  # type: ignore[attr-defined] # autograd keeps it
        return state.view_as(state)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        anchor, division, owner, number = ctx.arrival  # type: ignore[attr-defined] # as above
        division.group.send(gradients[0], owner, number + OF_GRADIENTS, "gradients of states")
        return torch.zeros_like(anchor), None, None, None, None


class _Departure(torch.autograd.Function):
    """A root of a chunk's graph for a state that another process goes on with, which sends its
    gradient.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, state: Tensor, division: RowDivision, owner: int, number: int
    ) -> Tensor:
        ctx.departure = division, owner, number, state.device  # type: ignore[attr-defined] # autograd keeps it
        return state.new_zeros(1)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG004 - it stands for what the other process sends
        division, owner, number, device = ctx.departure  # type: ignore[attr-defined] # as above
        return division.group.receive(owner, number + OF_GRADIENTS, device), None, None, None


class DividedStates(ChunkStates):
    """What one layer keeps of one micro-batch whose rows are divided, and the gradients of that.

    Args:
        row: the chunks.
        division: the processes that have them.
        names: of the states that the layer hands from chunk to chunk.
        device: where they are.
    """

    def __init__(
        self, row: DividedRow, division: RowDivision, names: Sequence[str], device: torch.device
    ) -> None:
        super().__init__(row.length)
        self._row = row
        self._division = division
        self._names = list(names)
        self._device = device
        self._trains = False  # whether keys or values of the chunk with a graph have a gradient
        self._gathered = set[int]()  # rounds
        # by the state's name and the token after it
        self._received: dict[tuple[str, int], Tensor] = {}
        self._sent = set[tuple[str, int]]()
        # of the chunk that has a graph: the states that it was given, with their anchors
        self._arrivals: dict[str, tuple[Tensor, Tensor]] = {}
        self._departures: list[Tensor] = []
        # states without a graph, whose gradient comes all the same
        self._unwanted: list[tuple[int, int]] = []

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return super().nbytes + sum(state.nbytes for state in self._received.values())

    def extended(
        self, keys: Tensor, values: Tensor, span: Span, first: int
    ) -> tuple[Tensor, Tensor]:
        """Put in the keys and values of a round's chunks, of which this process has made one's;
        return all from token `first` to the end of that.
        """
        number = self._row.round_of(span)
        if number not in self._gathered:
            self._gather(keys.detach(), values.detach(), self._row.rounds[number])
            self._gathered.add(number)
        self._trains = torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad)
        if self._trains:
            extended: tuple[Tensor, Tensor] = _Extended.apply(keys, values, self, span, first)  # type: ignore[no-untyped-call] # torch's is
            return extended
        return self.between(first, span.stop)

    def between(self, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of some tokens, without a graph."""
        return self._keys.between(first, stop), self._values.between(first, stop)

    def attended(self, span: Span, first: int) -> Attended:
        """Return the keys and values from token `first` to the end of a chunk, by blocks."""
        return _Attended(self, (self._keys, self._values, span, first))

    def _gather(self, keys: Tensor, values: Tensor, spans: Sequence[Span]) -> None:
        longest = max(span.stop - span.start for span in spans)
        # One message for both, equally long in all processes: chunks differ by a token at most.
        padded = [
            pad(part, (0, 0, 0, longest - part.shape[-2])).contiguous() for part in (keys, values)
        ]
        message = torch.cat([part.view(-1).view(torch.uint8) for part in padded])
        received = self._division.group.gather(message, "keys and values")
        for span, message in zip(spans, received, strict=True):
            sizes = [part.nbytes for part in padded]
            buffers = (self._keys, self._values)
            for buffer, part, sent in zip(buffers, padded, message.split(sizes), strict=True):
                states = sent.view(part.dtype).view(part.shape)
                buffer.put(states[..., : span.stop - span.start, :], span)

    def own_gradients(self, span: Span) -> tuple[Tensor, Tensor]:
        """Return the sums of the gradients of a chunk's own keys and values, of what chunks of all
        processes have added in this round and in later ones.
        """
        sums = self._keys.sums(), self._values.sums()
        of_chunk = [summed[..., span.slice, :] for summed in sums]
        if self._trains:  # else no process asks
            parts = [
                torch.cat([summed[..., chunk.slice, :].flatten() for summed in sums])
                for chunk in self._row.rounds[self._row.round_of(span)]
            ]
            total = self._division.group.sum_scattered(parts)
            flat = total.split([part.numel() for part in of_chunk])
            of_chunk = [
                part.view(shaped.shape) for part, shaped in zip(flat, of_chunk, strict=True)
            ]
        dtypes = [values.dtype for values in self.between(0, 1)]
        keys, values = (part.to(dtype) for part, dtype in zip(of_chunk, dtypes, strict=True))
        return keys, values

    def _elsewhere(self, owner: int | None) -> bool:
        return owner is not None and owner != self._division.group.rank

    def entered(self, name: str, span: Span) -> Tensor | None:
        """Return a state as the chunk before has left it, in whichever process; None: there is
        none.
        """
        owner = self._row.owner_before(span)
        if owner is None or not self._elsewhere(owner):
            return super().entered(name, span)
        if name not in self._names:
            return None
        number = self._names.index(name)
        key = name, span.start
        if key not in self._received:
            self._received[key] = self._division.group.receive(owner, number, self._device)
        state = self._received[key]
        if not (torch.is_grad_enabled() and state.is_floating_point()):
            return state
        if name not in self._arrivals:
            anchor = torch.zeros(1, device=state.device, requires_grad=True)
            arrived: Tensor = _Arrival.apply(anchor, state, self._division, owner, number)  # type: ignore[no-untyped-call] # torch's is
            self._arrivals[name] = anchor, arrived
        return self._arrivals[name][1]

    def leave(self, name: str, state: Tensor, span: Span) -> None:
        """Leave a state after a chunk, to whichever process has the next."""
        owner = self._row.owner_after(span)
        if owner is None or not self._elsewhere(owner) or name not in self._names:
            super().leave(name, state, span)
            return
        number = self._names.index(name)
        key = name, span.stop
        if key not in self._sent:
            self._division.group.send(state, owner, number, "states")
            self._sent.add(key)
        if not (torch.is_grad_enabled() and state.is_floating_point()):
            return
        if state.requires_grad:
            departure: Tensor = _Departure.apply(state, self._division, owner, number)  # type: ignore[no-untyped-call] # torch's is
            self._departures.append(departure)
        else:
            self._unwanted.append((owner, number))

    def roots(self) -> list[tuple[Tensor, Tensor]]:
        """Return the states that the chunk with a graph leaves, with their gradients, or what
        stands for them until they have come.
        """
        standing = [(departure, torch.zeros_like(departure)) for departure in self._departures]
        return [*super().roots(), *standing]

    def leaves(self) -> list[Tensor]:
        """Return the states that the chunk with a graph was given, or what stands for them."""
        return [*super().leaves(), *(anchor for anchor, _ in self._arrivals.values())]

    def end(self, gradients: Sequence[Tensor | None]) -> None:
        """Let go of the graph of a chunk; `gradients` are those of its `leaves`."""
        super().end(gradients[: len(gradients) - len(self._arrivals)])
        self._arrivals.clear()
        self._departures.clear()
        for owner, number in self._unwanted:
            self._division.group.receive(owner, number + OF_GRADIENTS, self._device)
        self._unwanted.clear()
