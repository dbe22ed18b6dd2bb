"""A writer of one file in whole blocks, from threads of its own, past the page cache where the file
system allows it.

Through the page cache every byte costs a copy and a page, and a flush at the end for which
everything waits. Here bytes go to the disk while the next are being made, and nothing that other
programs keep in the cache is evicted.
"""

import errno
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from lema.backend.host.files import BINARY, read_into, write_from
from lema.backend.hostmemory import private_pages
from lema.errors import ReadError

__all__ = [
    "BLOCK",
    "BlockFile",
    "open_direct",
    "read_all",
    "read_at",
    "read_errors",
    "reserve",
    "write_all",
]

BLOCK = 4096  # a write past the page cache must begin and end on a block, in the file and in memory
CHUNK_BYTES = 8 << 20  # of one write: large enough for any disk
NUM_CHUNKS = 4  # one being filled, two being written, one waiting
THREADS = 2  # writes under way: a disk is idle between them otherwise


class BlockFile:
    """A file of known size, filled through views of memory that are written behind the caller's
    back. The views may be asked for in any order of offsets, but no byte twice. The space is taken
    at once, so a full disk is noticed before the work; a write that fails is raised by a later
    call. `OSError`: the disk is full or failing; so do all methods but `close`. The `descriptor`,
    open for reading and writing, stays open; by `path` the file is opened a second time, past the
    page cache."""

    def __init__(self, descriptor: int, path: Path, size: int) -> None:
        self._plain = descriptor
        self._size = size
        reserve(descriptor, size)
        self._direct = open_direct(path, os.O_WRONLY)
        self._direct_works = self._direct is not None
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="lema-write")
        self._pending: deque[tuple[Future[None], memoryview | None]] = deque()
        self._memory: memoryview | None = None  # of the chunk being filled
        self._num_chunks = 0
        # of the chunk: where it starts, and what of it is filled
        self._base = self._begin = self._end = 0
        # blocks filled in part, and how many of their bytes are
        self._edges: dict[int, tuple[memoryview, int]] = {}

    def views(self, offset: int, nbytes: int) -> Iterator[memoryview]:
        """Yield memory for the bytes from `offset` on; its content at the next request is
        written.
        """
        end = offset + nbytes
        while offset < end:
            memory = self._at(offset)
            stop = min(end, self._base + CHUNK_BYTES)
            yield memory[offset - self._base : stop - self._base]
            offset = self._end = stop
            if stop == self._base + CHUNK_BYTES:
                self._send()

    def finish(self) -> None:
        """Block until every byte is on the disk."""
        self._send()
        assert not self._edges, f"bytes in {len(self._edges)} blocks were never given"
        while self._pending:
            self._pending.popleft()[0].result()
        os.ftruncate(self._plain, self._size)  # the last block was padded
        os.fsync(self._plain)

    def close(self) -> None:
        """Wait for running writes, and drop those that have not begun."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._direct is not None:
            os.close(self._direct)
            self._direct = None
            self._direct_works = False

    def _at(self, offset: int) -> memoryview:
        """Return the memory of the chunk whose next byte is the one at `offset`."""
        if self._memory is None or offset != self._end:
            self._send()
            self._memory = self._free()
            self._base = offset // CHUNK_BYTES * CHUNK_BYTES
            self._begin = self._end = offset
        return self._memory

    def _free(self) -> memoryview:
        if self._num_chunks < NUM_CHUNKS:
            self._num_chunks += 1
            return _pages(CHUNK_BYTES)
        while True:
            written, memory = self._pending.popleft()
            written.result()
            if memory is not None:
                return memory

    def _send(self) -> None:
        """Hand what is filled of the chunk to the writers: whole blocks at once, the others when
        they are whole.
        """
        if self._memory is None:
            return
        memory = self._memory
        begin = self._begin
        end = self._end
        first = -(-begin // BLOCK) * BLOCK
        last = end // BLOCK * BLOCK
        if begin < first:
            self._add_to_block(memory, begin, min(first, end))
        if end > max(last, begin) and last >= first:
            self._add_to_block(memory, last, end)
        if first < last:
            self._submit(memory[first - self._base : last - self._base], first, memory)
        else:
            # nothing to write; the memory comes back all the same
            self._submit(memory[:0], 0, memory)
        self._memory = None

    def _add_to_block(self, memory: memoryview, begin: int, end: int) -> None:
        """Keep the bytes of a block that is not filled yet; write it when it is."""
        block = begin // BLOCK
        edge, filled = self._edges.pop(block) if block in self._edges else (_pages(BLOCK), 0)
        start = begin - block * BLOCK
        edge[start : start + end - begin] = memory[begin - self._base : end - self._base]
        filled += end - begin
        if filled == min(BLOCK, self._size - block * BLOCK):
            self._submit(edge, block * BLOCK, None)
        else:
            self._edges[block] = edge, filled

    def _submit(self, view: memoryview, offset: int, memory: memoryview | None) -> None:
        self._pending.append((self._pool.submit(self._write, view, offset), memory))

    def _write(self, view: memoryview, offset: int) -> None:
        if self._direct is not None and self._direct_works:
            try:
                write_all(self._direct, view, offset)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._direct_works = False  # this file system refuses after all
        write_all(self._plain, view, offset)


def open_direct(path: Path, mode: int) -> int | None:
    """Open a file past the page cache, `os.O_RDONLY` or `os.O_WRONLY`; None: its file system has
    no such transfers.
    """
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        return os.open(path, mode | BINARY | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None


def reserve(descriptor: int, size: int, start: int = 0) -> None:
    """Give a file its size, and take the space from `start` on at once; the bytes then lie
    together, too.
    """
    os.ftruncate(descriptor, size)
    if not hasattr(os, "posix_fallocate"):  # macOS
        return
    try:
        os.posix_fallocate(descriptor, start, size - start)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise  # the others say that this file system cannot reserve; then writing finds out


def _pages(nbytes: int) -> memoryview:
    """Zeroed memory that begins on a page."""
    return memoryview(private_pages(nbytes))


def write_all(descriptor: int, view: memoryview, offset: int) -> None:
    """Write bytes at an offset, however many calls of the system that takes."""
    while view:
        count = write_from(descriptor, view, offset)
        view = view[count:]
        offset = offset + count


def read_all(descriptor: int, views: Sequence[memoryview], offset: int, needed: int) -> None:
    """Fill `views` in turn from an offset until `needed` bytes are there; a file that ends
    earlier is an `OSError`.
    """
    done = 0
    while done < needed:
        left = []
        skipped = done
        for view in views:
            left += [view[skipped:]] if skipped < len(view) else []
            skipped = max(0, skipped - len(view))
        count = read_into(descriptor, left, offset + done)
        if count == 0:
            raise OSError(errno.EIO, f"the file ends {needed - done:,} bytes early")
        done += count


def read_at(descriptor: int, file: Path, offset: int, nbytes: int) -> bytearray:
    """Return bytes of a `file` that is open; `ReadError`: its disk fails, or it ends before. Not
    mapped, because a disk that fails under a mapped file ends the process."""
    content = bytearray(nbytes)
    with read_errors(file, offset, nbytes):
        read_all(descriptor, [memoryview(content)], offset, nbytes)
    return content


@contextmanager
def read_errors(file: Path, offset: int, nbytes: int) -> Iterator[None]:
    """Have an `OSError` of a `with` block that reads bytes of a file be a `ReadError` that names
    both.
    """
    try:
        yield
    except OSError as error:
        what = f"reading {nbytes:,} bytes at {offset:,} failed: {error.strerror or error}"
        raise ReadError(
            what, where=str(file), how="check that the file is complete and the disk works"
        ) from error
