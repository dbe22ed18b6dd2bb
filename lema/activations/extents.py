"""Which bytes of a file are taken, and which may be used again."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

__all__ = ["Extents"]


class Extents:
    """Ranges of bytes: the smallest free one that is large enough is taken first, free neighbours become one.

    Attributes:
        taken_bytes: of all ranges that are taken.
        end: where the last of them ends.
    """

    def __init__(self) -> None:
        self.taken_bytes = self.end = 0
        self._sizes: list[tuple[int, int]] = []  # size and start of each free range before the end, sorted
        self._starts: dict[int, int] = {}  # the same, size by start
        self._ends: dict[int, int] = {}  # start by end

    def take(self, nbytes: int, reserve: Callable[[int], None]) -> int:
        """Return where `nbytes` may lie; `reserve` is called first where the end must grow, and may refuse."""
        at = bisect_left(self._sizes, (nbytes, 0))
        if at < len(self._sizes):
            size, start = self._sizes[at]
            self._remove(start)
            if size > nbytes:
                self._add(start + nbytes, size - nbytes)
        else:
            start = self.end
            reserve(start + nbytes)
            self.end = start + nbytes
        self.taken_bytes += nbytes
        return start

    def give(self, start: int, nbytes: int) -> None:
        """Give back what was taken."""
        self.taken_bytes -= nbytes
        end = start + nbytes
        if end in self._starts:
            end += self._remove(end)
        if start in self._ends:
            start = self._ends[start]
            self._remove(start)
        if end == self.end:
            self.end = start
        else:
            self._add(start, end - start)

    def _add(self, start: int, nbytes: int) -> None:
        insort(self._sizes, (nbytes, start))
        self._starts[start] = nbytes
        self._ends[start + nbytes] = start

    def _remove(self, start: int) -> int:
        nbytes = self._starts.pop(start)
        del self._ends[start + nbytes]
        del self._sizes[bisect_left(self._sizes, (nbytes, start))]
        return nbytes
