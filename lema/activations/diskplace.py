"""Where one piece waits on a disk, and in a buffer at times."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from lema.activations.diskstore import DiskStore

__all__ = ["DiskPlace"]


class DiskPlace:
    """See `lema.activations.seams.Place`.

    Attributes:
        start: where in the file its blocks are.
        nbytes: of the piece.
        size: of its blocks.
        buffer: of that size, with the bytes, if it has one.
        lent: the buffer is the caller's.
        expected: the bytes will be wanted soon.
        was_used: they have been wanted before.
        num_under_way: transfers that touch the buffer.
        transfer: the one of the file, if that is under way.
        reading: that is a read.
        landed: waits for the copy to the buffer.
        checksum: of the bytes.
        failure: why there are none.
        lost: for ever.
        dropped: nobody wants them.
        gone: it has nothing any more.
    """

    def __init__(self, store: DiskStore, start: int, nbytes: int, buffer: Tensor) -> None:
        self._store, self.start, self.nbytes, self.size = store, start, nbytes, len(buffer)
        self.buffer: Tensor | None = buffer
        self.lent, self.expected, self.was_used, self.reading = True, False, False, False
        self.num_under_way = 0
        self.transfer: Future[None] | None = None
        self.landed: Callable[[], None] | None = None
        self.checksum: int | None = None
        self.failure: BaseException | None = None
        self.lost = self.dropped = self.gone = False

    def fill(self) -> Tensor:
        """Return where the bytes are to be put."""
        return self.whole()[: self.nbytes]

    def filled(self, landed: Callable[[], None]) -> None:
        """Have them written once they have landed."""
        self._store.write(self, landed)

    def expect(self) -> None:
        """Start reading them, if there is room. Never blocks."""
        self._store.expect(self)

    def ready(self) -> bool:
        """Say whether `memory` would return at once."""
        reading = self.transfer if self.reading else None
        return self.buffer is not None and (reading is None or reading.done())

    def memory(self) -> Tensor:
        """Return them, as soon as they have been read."""
        return self._store.memory(self)

    def used(self, drained: Callable[[], None]) -> None:
        """Take back what `memory` returned, to be used again when it has drained."""
        self._store.used(self, drained)

    def drop(self) -> None:
        """Let everything of it be given back, as soon as nothing touches it."""
        self.dropped = True
        self._store.drop(self)

    def whole(self) -> Tensor:
        """Return its buffer, uint8 `[size]`."""
        assert self.buffer is not None, "the buffer of a place was wanted that has none"
        return self.buffer

    def check(self) -> None:
        """Raise why there are no bytes; they may be read again, if they were written."""
        failure = self.failure
        if not self.lost:
            self.failure = None
        if failure is not None:
            raise failure
