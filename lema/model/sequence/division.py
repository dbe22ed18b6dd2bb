"""How the tokens of a row are divided over processes (context parallelism).

A row is cut into chunks, so many for each process, and they are dealt out in rounds: forwards in
the first, backwards in the second, and so on. A token late in a row attends to more tokens than an
early one, and so each process has as much to attend to as the others. The last chunk of a round and
the first of the next are one process's, so states stay there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from lema.backend.contextgroup import ContextGroup
from lema.model.sequence.states import Span

__all__ = ["DividedRow", "RowDivision"]

LEAST = 2  # tokens of a chunk; models take a single one for one that they generate
NUM_ROUNDS = 2


@dataclass(frozen=True)
class DividedRow:
    """The chunks of rows of one length.

    Args:
        rank: this process's place among those that divide the rows.
        rounds: of each round the chunks, in the order of ranks.
    """

    rank: int
    rounds: tuple[tuple[Span, ...], ...]

    @property
    def length(self) -> int:
        """Tokens of the rows."""
        return max(span.stop for span in self.rounds[-1])

    @property
    def spans(self) -> list[Span]:
        """The chunks of this process."""
        return [spans[self.rank] for spans in self.rounds]

    def round_of(self, span: Span) -> int:
        """Return in which round one of this process's chunks is."""
        return self.spans.index(span)

    def owner_before(self, span: Span) -> int | None:
        """Return which process has the chunk before one; None: there is none."""
        return self._owner(lambda chunk: chunk.stop == span.start)

    def owner_after(self, span: Span) -> int | None:
        """Return which process has the chunk after one; None: there is none."""
        return self._owner(lambda chunk: chunk.start == span.stop)

    def _owner(self, is_it: Callable[[Span], bool]) -> int | None:
        return next(
            (rank for spans in self.rounds for rank, span in enumerate(spans) if is_it(span)), None
        )


@dataclass
class RowDivision:
    """How a run divides rows.

    Args:
        group: the processes that divide them.
        chunk: tokens that a chunk has at most; None: any.
        states: of each layer, the names of the states that its chunks leave to the next.
    """

    group: ContextGroup
    chunk: int | None = None
    states: dict[int, tuple[str, ...]] = field(default_factory=dict)

    @property
    def shortest(self) -> int:
        """Tokens that a row has at least; shorter ones are padded."""
        return LEAST * self.group.size

    def of(self, length: int) -> DividedRow:
        """Return the chunks of rows of so many tokens."""
        size = self.group.size
        rounds = NUM_ROUNDS
        if self.chunk is not None:
            # an even number, so that each process has as much to attend to
            rounds *= -(-length // (NUM_ROUNDS * size * self.chunk))
        rounds = max(1, min(rounds, length // (LEAST * size)))
        count = rounds * size
        bounds = [length * number // count for number in range(count + 1)]
        spans = [Span(start, stop) for start, stop in pairwise(bounds)]
        dealt = []
        for number in range(rounds):
            of_round = spans[number * size : (number + 1) * size]
            dealt.append(tuple(of_round if number % 2 == 0 else reversed(of_round)))
        return DividedRow(self.group.rank, tuple(dealt))

    def cut(self, tensor: Tensor) -> Tensor:
        """Return this process's columns of `[rows, sequence, ...]`."""
        spans = self.of(tensor.shape[1]).spans
        return torch.cat([tensor[:, span.slice] for span in spans], dim=1)

    def note_states(self, number: int, names: Iterable[str]) -> None:
        """Note which states a layer hands from chunk to chunk."""
        self.states[number] = tuple(sorted(names))
