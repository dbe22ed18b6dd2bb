"""A store of activations on disk: pieces are written behind the caller's back and read ahead of it.

`DiskStore` has one file without a name and a few buffers in host memory through which all bytes pass. A buffer keeps
its bytes until another piece needs it, so the piece that was written last is still in memory when the backward wants it
first. `DiskPlace` is one piece: in a buffer, in the file, or in both. What is read is compared with what was written.
"""

from __future__ import annotations

import threading
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from enum import Enum, auto

from torch import Tensor

from lema.activations.boundaries import as_bytes
from lema.activations.hoststore import HostPool
from lema.activations.protocols import Place
from lema.errors import DiskError, ReadError
from lema.storage.spillfile import Extents, OffloadFile, whole_blocks

__all__ = ["DiskPlace", "DiskStore"]


class DiskPlace:
    """See `lema.activations.protocols.Place`.

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


class _Kind(Enum):
    WRITE = auto()
    READ = auto()
    DRAIN = auto()  # waiting until a device has copied from a buffer, or to it


class DiskStore:
    """`lema.activations.protocols.Store` in a file. Any thread may call it.

    Args:
        file: where the bytes go; closed with this.
        staging: buffers on the way, of nobody else, with a limit. One piece that is larger passes all the same.
        limit: bytes that the file may have; None: as many as the disk has.
        setting: what a user sets `limit` with, for errors.
    """

    def __init__(
        self, file: OffloadFile, staging: HostPool, limit: int | None = None, *, setting: str = "disk_space"
    ) -> None:
        assert staging.limit is not None, "without a limit, staging would hold all that ever went to the disk"
        self.staging = staging
        self._file, self._limit, self._setting = file, limit, setting
        self._lock = threading.Lock()
        # Threads of its own: a copy that has ended shall not keep device memory until some writes have, too.
        self._drains = ThreadPoolExecutor(1, thread_name_prefix="lema-drain")
        self._extents = Extents()
        self._under_way: deque[tuple[DiskPlace, Future[None], _Kind]] = deque()
        self._idle: OrderedDict[DiskPlace, None] = OrderedDict()  # with buffers that nothing touches
        # A garbage collector drops in the middle of anything, in any thread: what it calls takes no lock.
        self._dropped: deque[DiskPlace] = deque()
        self._failed: BaseException | None = None
        self._written = self._read = 0
        self._closed = False

    @property
    def bytes_written(self) -> int:
        """Bytes that went to the disk, in whole blocks."""
        with self._lock:
            self._look()
            return self._written

    @property
    def bytes_read(self) -> int:
        """Bytes that came from there."""
        with self._lock:
            self._look()
            return self._read

    @property
    def file_bytes(self) -> int:
        """The bytes that the file has; it grows, and is given back as a whole."""
        return self._file.size

    @property
    def taken_bytes(self) -> int:
        """Of these, the bytes in which something waits."""
        with self._lock:
            self._look()
            return self._extents.taken_bytes

    def place(self, nbytes: int) -> Place | None:
        """Return room for `nbytes`. It waits for a write where no buffer is free.

        Raises:
            DiskError: the disk has no room, or not as much as is allowed, or something before could not be written.
        """
        size = whole_blocks(nbytes)
        with self._lock:
            self._check()
            start = self._extent(size)
            try:
                buffer = self._buffer(size)
            except BaseException:
                self._extents.give(start, size)
                raise
            return DiskPlace(self, start, nbytes, buffer)

    def settle(self) -> None:
        """Wait for what is on its way to the disk.

        Raises:
            DiskError: something could not be written.
        """
        with self._lock:
            wait([future for _, future, kind in self._under_way if kind is _Kind.WRITE])
            self._check()

    def close(self) -> None:
        """Wait for what is under way, and give everything back: what still waits is lost."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._file.close()
            self._drains.shutdown(wait=True)
            self._look()
            while self._idle:
                self._put_back(next(iter(self._idle)))
            self.staging.clear()

    def write(self, place: DiskPlace, landed: Callable[[], None]) -> None:
        """Write what is in a place's buffer, once a copy to it has landed."""
        memory = as_bytes(place.whole())

        def before() -> None:
            landed()
            place.checksum = zlib.crc32(memory[: place.nbytes])

        with self._lock:
            place.lent, place.landed = False, landed
            place.transfer = self._file.write(memory, place.start, before)
            self._begun(place, place.transfer, _Kind.WRITE)

    def expect(self, place: DiskPlace) -> None:
        """Start reading, if there is a buffer, or one with what is not expected. Never blocks."""
        if not self._lock.acquire(blocking=False):  # another thread waits for room: there is none
            return
        try:
            self._look()
            place.expected = True
            if place.buffer is not None or place.failure is not None or place.dropped or self._closed:
                return
            while (buffer := self.staging.take(place.size)) is None:
                unexpected = next((other for other in self._idle if not other.expected), None)
                if unexpected is None:
                    return
                self._put_back(unexpected)
            self._start_read(place, buffer)
        finally:
            self._lock.release()

    def memory(self, place: DiskPlace) -> Tensor:
        """Return what is, or was, in a place's buffer; see `lema.activations.protocols.Place.memory`."""
        with self._lock:
            self._check()
            place.check()
            assert not place.dropped, "a place was used that had been dropped"
            if place.buffer is None:
                self._start_read(place, self._buffer(place.size))
            self._idle.pop(place, None)
            place.lent, place.expected = True, False
            reading = place.transfer if place.reading else None
        if reading is not None:
            wait([reading])
            with self._lock:
                self._look()
                if place.failure is not None:
                    place.lent = False
                    self._rest(place)
                    place.check()
        return place.whole()[: place.nbytes]

    def used(self, place: DiskPlace, drained: Callable[[], None]) -> None:
        """Have a buffer back when a copy from there has ended."""
        with self._lock:
            assert place.lent, "a place was given back that had not been asked for"
            place.lent, place.was_used = False, True
            self._drain(place, drained)

    def drop(self, place: DiskPlace) -> None:
        """Give everything of a place back, now or later."""
        self._dropped.append(place)

    def _check(self) -> None:
        """Raise what failed since the last time."""
        self._look()
        if self._closed:
            raise DiskError(
                "the file of activations was closed: what waited there is lost",
                where=self._file.where,
                how="close it after the backward",
            )
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def _look(self) -> None:
        """See what has ended, and what was dropped."""
        self._under_way = deque([transfer for transfer in self._under_way if not self._ended(*transfer)])
        for _ in range(len(self._dropped)):
            place = self._dropped.popleft()
            if not self._gone(place):
                self._dropped.append(place)

    def _begun(self, place: DiskPlace, future: Future[None], kind: _Kind) -> None:
        place.num_under_way += 1
        self._under_way.append((place, future, kind))

    def _ended(self, place: DiskPlace, future: Future[None], kind: _Kind) -> bool:
        if not future.done():
            return False
        place.num_under_way -= 1
        if kind is not _Kind.DRAIN:
            place.transfer, place.reading = None, False
        if future.cancelled():  # it was dropped, or the file was closed
            place.failure = DiskError("what waited on the disk was given up", where=self._file.where)
        elif (error := future.exception()) is not None:
            if kind is not _Kind.DRAIN:
                place.failure, place.lost = error, kind is _Kind.WRITE
            if kind is not _Kind.READ and not place.dropped:  # else nobody would be told, or wants to know
                self._failed = error
        elif kind is _Kind.WRITE:
            self._written += place.size
            place.landed = None
        elif kind is _Kind.READ:
            self._read += place.size
        self._rest(place)
        return True

    def _rest(self, place: DiskPlace) -> None:
        """Let others have a place's buffer, if nobody uses it."""
        if place.buffer is None or place.lent or place.num_under_way or place.dropped:
            return
        self._idle[place] = None
        if place.failure is not None or self._crowded():
            self._put_back(place)
        elif place.was_used:  # perhaps for the last time
            self._idle.move_to_end(place, last=False)

    def _gone(self, place: DiskPlace) -> bool:
        """Give back what a dropped place had; say whether that could be done, or had been before."""
        if place.gone:
            return True
        if place.transfer is not None and not self._closed and place.transfer.cancel() and place.landed is not None:
            self._drain(place, place.landed)  # the write would have waited for that copy
            place.landed = None
        if place.num_under_way:
            return False
        place.gone = True
        if place.buffer is not None and place.lent:
            self.staging.forget(place.whole())  # a device may still copy, and nobody said until when
            place.buffer = None
        elif place.buffer is not None:
            self._put_back(place)
        self._extents.give(place.start, place.size)
        return True

    def _crowded(self) -> bool:
        """Say whether a piece that is larger than the limit, or many in use at once, made staging larger."""
        return self.staging.limit is not None and self.staging.held_bytes > self.staging.limit

    def _put_back(self, place: DiskPlace) -> None:
        self.staging.give(place.whole())
        place.buffer = None
        self._idle.pop(place, None)

    def _start_read(self, place: DiskPlace, buffer: Tensor) -> None:
        place.buffer, place.reading = buffer, True
        memory = as_bytes(buffer)

        def compare() -> None:
            if zlib.crc32(memory[: place.nbytes]) != place.checksum:
                raise ReadError(
                    f"{place.nbytes:,} bytes of activations were read otherwise than they were written",
                    where=self._file.where,
                    how="check that disk and its cables, or set offload_dir to a directory on another disk",
                )

        place.transfer = self._file.read(memory, place.start, lambda: None, compare)
        self._begun(place, place.transfer, _Kind.READ)

    def _drain(self, place: DiskPlace, ended: Callable[[], None]) -> None:
        self._begun(place, self._drains.submit(ended), _Kind.DRAIN)

    def _extent(self, size: int) -> int:
        def reserve(end: int) -> None:
            if self._limit is not None and end > self._limit:
                raise DiskError(
                    f"{end:,} bytes are needed for activations on the disk, and {self._limit:,} are allowed",
                    where=self._file.where,
                    how=f"raise {self._setting}, or make batches smaller or shorter",
                )
            self._file.reserve(end)

        while True:
            try:
                return self._extents.take(size, reserve)
            except DiskError:
                num_dropped = len(self._dropped)
                self._await_dropped()
                if len(self._dropped) == num_dropped == 0:
                    raise

    def _await_dropped(self) -> None:
        """Wait for what is under way for nobody any more: its room is free then."""
        wait([future for place, future, _ in self._under_way if place.dropped])
        self._look()

    def _buffer(self, size: int) -> Tensor:
        """Return a buffer that nothing touches, waiting for one if need be."""
        while (buffer := self.staging.take(size)) is None:
            if not self._make_room():
                buffer = self.staging.take(size, must=True)
                assert buffer is not None
                break
            self._check()
        return buffer

    def _make_room(self) -> bool:
        """Take a buffer from the piece that needs it least; say whether there was one, or will be after all."""
        for place in self._idle:
            if not place.expected:
                self._put_back(place)
                return True
        if self._under_way:
            wait([self._under_way[0][1]])
            return True
        if self._idle:
            self._put_back(next(reversed(self._idle)))
            return True
        return False
