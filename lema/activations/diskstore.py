"""The store of activations on a disk: written in the background, read ahead, and compared with the
bytes written.

Bytes pass through a few buffers in host memory. Such a buffer is kept with what is in it until
another piece needs it, so the activations that were written last are there first.
"""

import threading
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from lema.activations.hoststore import HostPool
from lema.errors import DiskError, ReadError
from lema.storage.spillfile import Extents, OffloadFile, as_bytes, whole_blocks

__all__ = ["DiskPiece", "DiskStore"]

# a drain waits until a device has copied from a buffer, or to it
Kind = Literal["write", "read", "drain"]


@dataclass(eq=False)
class _Transfer:
    """What touches the buffer of a piece; `landed`, of a write, waits for the copy to the buffer
    that comes before.
    """

    piece: "DiskPiece"
    kind: Kind
    future: Future[None]
    landed: Callable[[], None] | None = None

    def cancel(self) -> Callable[[], None] | None:
        """Cancel it if it has not begun; return, once, what the buffer is not free before: the end
        of the copy to it, which a write would have waited for.
        """
        landed = self.landed if self.future.cancel() else None
        if landed is not None:
            self.landed = None
        return landed


class _FileSpace:
    """A file, and which of its bytes are free. It may have `limit` bytes; None: no limit."""

    def __init__(self, file: OffloadFile, limit: int | None) -> None:
        self.file = file
        self.extents = Extents()
        self._limit = limit

    def take(self, size: int) -> int:
        """Return where so many bytes are free; `DiskError`: the disk has no room, or not as much
        as is allowed.
        """
        return self.extents.take(size, self._grow)

    def give(self, start: int, size: int) -> None:
        """Give back what `take` returned."""
        self.extents.give(start, size)

    def reserve(self, nbytes: int) -> None:
        """Make sure that the file has room for so many bytes beside those that are taken."""
        self._grow(self.extents.taken_bytes + nbytes)

    def _grow(self, end: int) -> None:
        if self._limit is not None and end > self._limit:
            what = (
                f"{end:,} bytes are needed for activations on disk, but {self._limit:,} are allowed"
            )
            how = "raise disk_space, or use smaller or shorter batches"
            raise DiskError(what, where=self.file.where, how=how)
        self.file.reserve(end)


class DiskPiece:
    """Where the bytes of one piece of device memory wait: on the disk, and at times in a buffer.
    Its methods are called from one thread at a time, `drop` excepted, which any thread may call at
    any time, also a garbage collector."""

    def __init__(self, store: "DiskStore", start: int, nbytes: int, buffer: Tensor) -> None:
        self._store = store
        self.start = start
        self.nbytes = nbytes
        self.buffer: Tensor | None = buffer  # uint8 `[size]` with the bytes, if it has one
        self.lent = True  # the buffer is the caller's
        self.expected = False  # the bytes will be wanted soon
        self.transfers: list[_Transfer] = []  # those under way that touch the buffer
        self.checksum: int | None = None  # of the bytes; None: they are not on the disk
        # why there are none; they may be read again if they are on the disk
        self.failure: BaseException | None = None
        self.dropped = self.gone = False  # not needed any more; and all its memory is released
        self.num_raised = store._num_raised  # failures that the store had told when this was placed

    @property
    def size(self) -> int:
        """The bytes of its blocks."""
        return whole_blocks(self.nbytes)

    def fill(self) -> Tensor:
        """Return uint8 `[nbytes]` of host memory, to be filled; called once, first."""
        assert self.buffer is not None, "the buffer of a piece was wanted that has none"
        return self.buffer[: self.nbytes]

    def filled(self, landed: Callable[[], None]) -> None:
        """Take what `fill` returned: a copy to it is on its way; `landed` blocks, in any thread,
        until it is there.
        """
        assert self.buffer is not None, "a piece was filled that has no buffer"
        memory = as_bytes(self.buffer)
        store = self._store

        def before() -> None:
            landed()
            self.checksum = zlib.crc32(memory[: self.nbytes])

        with store._lock:
            self.lent = False
            store._begin(
                _Transfer(
                    self, "write", store._space.file.write(memory, self.start, before), landed
                )
            )

    def expect(self) -> None:
        """Start bringing the bytes to host memory, if they are elsewhere and there is room.
        Never blocks.
        """
        store = self._store
        # because another thread that waits for room may hold it long
        if not store._lock.acquire(blocking=False):
            return
        try:
            store._poll()
            self.expected = True
            if self.buffer is not None or self.failure is not None or self.dropped or store._closed:
                return
            if (buffer := store._spare(self.size)) is not None:
                store._start_read(self, *buffer)
        finally:
            store._lock.release()

    def ready(self) -> bool:
        """Say whether `memory` would return at once."""
        reading = self.transfer_in_flight("read")
        return self.buffer is not None and (reading is None or reading.future.done())

    def memory(self) -> Tensor:
        """Return uint8 `[nbytes]` of host memory that holds the bytes, or that a copy to it is on
        its way to; it stays until `used`. `DiskError`, `ReadError`: they could not be written, or
        read, or are not what was written."""
        store = self._store
        with store._lock:
            store._check()
            self.check()
            assert not self.dropped, "a piece was used that had been dropped"
            if self.buffer is None:
                store._start_read(self, store._buffer(self.size), [])
            store._idle.pop(self, None)
            self.lent = True
            self.expected = False
            reading = self.transfer_in_flight("read")
        if reading is not None:
            # without the lock, because others may keep and drop pieces meanwhile
            wait([reading.future])
            with store._lock:
                store._poll()
                if self.failure is not None:
                    self.lent = False
                    store._make_idle(self)
                    self.check()
        return self.fill()

    def used(self, drained: Callable[[], None]) -> None:
        """Take back what `memory` returned: a copy from there is queued; `drained` blocks until
        it has ended.
        """
        with self._store._lock:
            assert self.lent, "a piece was returned that had not been requested"
            self.lent = False
            if not self._store._closed:
                self._store._begin(_Transfer(self, "drain", self._store._drains.submit(drained)))

    def drop(self) -> None:
        """Drop the bytes. May be called twice, and in any state."""
        self.dropped = True
        self._store._dropped.append(self)

    def end(self) -> None:
        """Have no memory any more, because all of it was released."""
        self.gone = True

    def hold(self, buffer: Tensor) -> None:
        """Have the bytes in a buffer from now on."""
        self.buffer = buffer

    def take_buffer(self) -> Tensor | None:
        """Return the buffer, which is the piece's no more; None: it had none."""
        buffer = self.buffer
        self.buffer = None
        return buffer

    def fail(self, error: BaseException, *, unwritten: bool = False) -> None:
        """Have no bytes, because of an error; `unwritten`: none on the disk either."""
        self.failure = error
        if unwritten:
            self.checksum = None

    def transfer_in_flight(self, *kinds: Kind) -> _Transfer | None:
        """Return the running transfer that is of one of these kinds; None: there is none."""
        return next(
            (transfer for transfer in tuple(self.transfers) if transfer.kind in kinds), None
        )

    def check(self) -> None:
        """Raise why there are no bytes; they may be read again, if they are on the disk."""
        if (failure := self.failure) is not None:
            self.failure = None if self.checksum is not None else failure
            raise failure


class DiskStore:
    """Room for pieces in a file, which it closes. Any thread may call it. Bytes pass through
    `staging`, a pool of nobody else's, with a limit; a larger piece passes all the same. The file
    may have `limit` bytes; None: no limit."""

    def __init__(self, file: OffloadFile, staging: HostPool, limit: int | None = None) -> None:
        assert staging.limit is not None, (
            "without a limit, staging would hold everything that was ever written to disk"
        )
        self.staging = staging
        self._space = _FileSpace(file, limit)
        self._closed = False
        self._lock = threading.Lock()
        # Threads of its own: a copy that has ended shall not keep device memory until some writes
        # have, too.
        self._drains = ThreadPoolExecutor(1, thread_name_prefix="lema-drain")
        self._in_flight: deque[_Transfer] = deque()
        # with buffers that nothing touches
        self._idle: OrderedDict[DiskPiece, None] = OrderedDict()
        # without the lock, because a collector drops at any time
        self._dropped: deque[DiskPiece] = deque()
        self._failed: tuple[DiskPiece, BaseException] | None = None
        self.bytes_written = self.bytes_read = 0  # in whole blocks, as far as calls have seen
        self._num_raised = 0

    def allocate(self, nbytes: int) -> DiskPiece:
        """Return room for `nbytes`. It waits for a write where no buffer is free. `DiskError`: the
        disk has no room, or not as much as is allowed, or something before could not be written."""
        size = whole_blocks(nbytes)
        with self._lock:
            self._check()
            start = self._extent(size)
            try:
                return DiskPiece(self, start, nbytes, self._buffer(size))
            except BaseException:
                self._space.give(start, size)
                raise

    def reserve(self, nbytes: int) -> None:
        """Make sure that the file has room for `nbytes` in whole blocks, beside those in which
        something waits. It waits for what is under way of pieces that were dropped; `DiskError` as
        of `allocate`."""
        with self._lock:
            while self._dropped:
                self._await_dropped()
            self._check()
            self._space.reserve(nbytes)

    def close(self) -> None:
        """Wait for what is under way, and give everything back: what still waits is lost."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._space.file.close()
            self._drains.shutdown(wait=True)
            self._poll()
            while self._idle:
                self._put_back(next(iter(self._idle)))
            self.staging.clear()

    def _check(self) -> None:
        """Raise what failed since the last time."""
        self._poll()
        if self._closed:
            what = "the file of activations was closed, so the activations in it are lost"
            how = "close it after the backward"
            raise DiskError(what, where=self._space.file.where, how=how)
        failed = self._failed
        self._failed = None
        if failed is not None and not failed[0].dropped:  # a dropped piece needs no error
            self._num_raised += 1
            raise failed[1]

    def _poll(self) -> None:
        """Handle transfers that have ended, and pieces that were dropped."""
        self._in_flight = deque(
            [transfer for transfer in self._in_flight if not self._ended(transfer)]
        )
        for piece in [self._dropped.popleft() for _ in range(len(self._dropped))]:
            if not self._gone(piece):
                self._dropped.append(piece)

    def _begin(self, transfer: _Transfer) -> None:
        transfer.piece.transfers.append(transfer)
        self._in_flight.append(transfer)

    def _ended(self, transfer: _Transfer) -> bool:
        """Say whether a transfer has ended, and if so take its outcome down."""
        piece = transfer.piece
        kind = transfer.kind
        future = transfer.future
        if not future.done():
            return False
        piece.transfers.remove(transfer)
        if future.cancelled():  # because it was dropped, or the file was closed
            what = "the activations on disk were abandoned"
            piece.fail(DiskError(what, where=self._space.file.where))
        elif (error := future.exception()) is not None:
            if kind != "drain":
                piece.fail(error, unwritten=kind == "write")
            # Who reads is told by `memory`. A step that was told of one failure is given up,
            # because of which the failures of its other pieces are not told to the next step.
            if kind != "read" and not piece.dropped and piece.num_raised == self._num_raised:
                self._failed = piece, error
        elif kind == "write":
            self.bytes_written += piece.size
        elif kind == "read":
            self.bytes_read += piece.size
        self._make_idle(piece, used=kind == "drain")
        return True

    def _make_idle(self, piece: DiskPiece, *, used: bool = False) -> None:
        """Free the buffer of a piece that is not in use; first one that was used already,
        perhaps for the last time.
        """
        if piece.buffer is None or piece.lent or piece.transfers or piece.dropped:
            return
        self._idle[piece] = None
        # by one large piece, or many in use at once
        crowded = self.staging.allocated_bytes > (self.staging.limit or 0)
        if crowded or piece.failure is not None:
            self._put_back(piece)
        elif used:
            self._idle.move_to_end(piece, last=False)

    def _gone(self, piece: DiskPiece) -> bool:
        """Give back what a dropped piece had; say whether that could be done, or had been
        before.
        """
        if piece.gone:
            return True
        transfer = None if self._closed else piece.transfer_in_flight("write", "read")
        if transfer is not None and (landed := transfer.cancel()) is not None:
            self._begin(_Transfer(piece, "drain", self._drains.submit(landed)))
        if piece.transfers:
            return False
        piece.end()
        # While it is lent, a device may still copy for an unknown time: then it is not used again.
        self._put_back(piece, again=not piece.lent)
        self._space.give(piece.start, piece.size)
        return True

    def _put_back(self, piece: DiskPiece, *, again: bool = True) -> None:
        if (buffer := piece.take_buffer()) is not None:
            (self.staging.give if again else self.staging.forget)(buffer)
        self._idle.pop(piece, None)

    def _start_read(self, piece: DiskPiece, buffer: Tensor, after: Sequence[Future[None]]) -> None:
        """Fill a buffer from the disk, once other transfers that touch it have ended."""
        piece.hold(buffer)
        memory = as_bytes(buffer)

        def before() -> None:
            wait(after)

        def compare() -> None:
            if zlib.crc32(memory[: piece.nbytes]) != piece.checksum:
                what = f"{piece.nbytes:,} bytes of activations differ from what was written"
                how = (
                    "check the disk and its cables, or set offload_dir to a directory on "
                    "another disk"
                )
                raise ReadError(what, where=self._space.file.where, how=how)

        self._begin(
            _Transfer(piece, "read", self._space.file.read(memory, piece.start, before, compare))
        )

    def _extent(self, size: int) -> int:
        """Return a free place of `size` bytes in the file; if there is none, wait for transfers
        of dropped pieces.
        """
        while True:
            try:
                return self._space.take(size)
            except DiskError:
                if not self._dropped:
                    raise
                self._await_dropped()

    def _await_dropped(self) -> None:
        """Wait for transfers of dropped pieces, because their room is free then."""
        wait([transfer.future for transfer in self._in_flight if transfer.piece.dropped])
        self._poll()

    def _buffer(self, size: int) -> Tensor:
        """Return a buffer that nothing touches, waiting for one if need be."""
        must = False
        while (buffer := self.staging.take(size, must=must)) is None:
            if self._evict():
                continue
            if self._in_flight:
                wait([self._in_flight[0].future])
            # because what is expected can be read again, and who asks now cannot wait for it
            elif self._idle:
                self._put_back(next(reversed(self._idle)))
            else:
                must = True
            self._check()
        return buffer

    def _spare(self, size: int) -> tuple[Tensor, list[Future[None]]] | None:
        """Return a buffer that is not needed soon, with what must end before it is overwritten;
        None: there is none.
        """
        while (buffer := self.staging.take(size)) is None and self._evict():
            pass
        if buffer is not None:
            return buffer, []
        # Because a copy to the device has mostly ended before this thread can see it, a read is
        # queued behind that.
        for piece in [transfer.piece for transfer in self._in_flight if transfer.kind == "drain"]:
            only = (
                piece.transfer_in_flight("read", "write") is None
                and not piece.lent
                and not piece.expected
            )
            if only and piece.buffer is not None and len(piece.buffer) == size:
                buffer = piece.take_buffer()
                assert buffer is not None
                return buffer, [transfer.future for transfer in piece.transfers]
        return None

    def _evict(self) -> bool:
        """Take the buffer from the piece that needs it least and is not expected; say whether
        there was one.
        """
        piece = next((piece for piece in self._idle if not piece.expected), None)
        if piece is not None:
            self._put_back(piece)
        return piece is not None
