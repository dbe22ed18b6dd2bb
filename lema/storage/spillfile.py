"""A nameless file for what does not fit in memory: written behind the caller's back, read ahead of
it.

It is nameless from the start where the system allows that, and otherwise from the moment it is
open, so nothing remains of it however the process ends. Bytes bypass the page cache where the file
system allows it, and otherwise are dropped from the cache as soon as they are on the disk, because
the file is there to save memory. An allocator keeps account of which bytes of the file are in use
and which may be used again.
"""

import errno
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from lema.backend.host.files import drop_cached
from lema.backend.hostmemory import mapped
from lema.backend.trace import NO_TRACE, NoTrace
from lema.errors import DiskError, ReadError
from lema.storage.directio import BLOCK, read_all, reserve, write_all

__all__ = ["Extents", "OffloadFile", "as_bytes", "whole_blocks"]

Call = Callable[[], None] | None
THREADS = 2  # transfers under way: a disk is idle between them otherwise


def whole_blocks(nbytes: int) -> int:
    """Return how many bytes the blocks take that hold `nbytes`."""
    return -(-nbytes // BLOCK) * BLOCK


def as_bytes(memory: Tensor) -> memoryview:
    """Return host memory as files are read into it and written from it."""
    return memoryview(memory.numpy())  # type: ignore[arg-type] # numpy's stubs lack the buffer protocol before 3.12


class OffloadFile:
    """A file that lives as long as this object. Memory and offsets given to it are whole blocks. It
    lies in `directory`, which is made if need be. Errors say `what` it holds, and `how` a user can
    fix a disk that is full or fails. `DiskError`: no file can be made there."""

    def __init__(self, directory: Path, what: str, how: str, trace: NoTrace = NO_TRACE) -> None:
        self.where = str(directory)
        self._what = what
        self._how = how
        self._trace = trace
        try:
            directory.mkdir(parents=True, exist_ok=True)
            # Where a file cannot lose its name while it is open, the system deletes it when it is
            # closed.
            file = tempfile.TemporaryFile(prefix=".lema-", dir=directory, buffering=0)  # noqa: SIM115 - it is kept open
            self._descriptor = file.fileno()
            self._direct = _set_direct(self._descriptor, True)
        except OSError as error:
            raise self._error(DiskError, "no file can be made", error) from error
        # a transfer under way keeps this object alive
        self._close = weakref.finalize(self, file.close)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="lema-offload")
        self.size = 0  # bytes that it can hold

    def reserve(self, nbytes: int) -> None:
        """Make sure that the file can hold `nbytes`, or raise `DiskError`; it never becomes
        smaller.
        """
        more = nbytes - self.size
        if more <= 0:
            return
        # Asked beforehand, because a file system without reservations would only fail in the middle
        # of a step.
        if more > (free := shutil.disk_usage(self.where).free):
            what = (
                f"{nbytes:,} bytes are needed for {self._what}, and {free + self.size:,} are free"
            )
            raise DiskError(what, where=self.where, how=self._how)
        try:
            reserve(self._descriptor, nbytes, self.size)
        except OSError as error:
            raise self._error(DiskError, f"{nbytes:,} bytes cannot be had", error) from error
        self.size = nbytes

    def mapped(self) -> Tensor:
        """Return its bytes as memory, uint8 `[size]`; what is written there goes to the disk when
        the system likes. The space is taken until this object and what lies there are gone.
        `DiskError`: it cannot be mapped."""
        try:
            return mapped(self._descriptor, self.size)
        except OSError as error:
            raise self._error(DiskError, "the file cannot be mapped", error) from error

    def write(self, memory: memoryview, offset: int, before: Call = None) -> Future[None]:
        """Start writing `memory` at `offset`, once `before`, called in another thread, has
        returned. It must stay as it is from then on until the result is there, which raises
        DiskError where writing failed."""
        return self._pool.submit(self._move, True, memory, offset, before)

    def read(
        self, memory: memoryview, offset: int, before: Call, after: Call = None
    ) -> Future[None]:
        """Start filling `memory` from `offset`, once `before`, called in another thread, has
        returned. There `after` is called when it is filled. The result raises ReadError, and what
        `before` or `after` raised."""
        return self._pool.submit(self._move, False, memory, offset, before, after)

    def close(self) -> None:
        """Wait for running transfers, drop those that have not begun, and free the space."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._close()

    def _move(
        self,
        writing: bool,
        memory: memoryview,
        offset: int,
        before: Call = None,
        after: Call = None,
    ) -> None:
        if before is not None:
            before()
        try:
            with self._trace.span("boundaries", "write" if writing else "read", nbytes=len(memory)):
                self._transfer(writing, memory, offset)
                if not self._direct and writing:
                    # only what is on the disk can be dropped from the cache
                    os.fsync(self._descriptor)
                if not self._direct:
                    drop_cached(self._descriptor, offset, len(memory))
        except OSError as error:
            what = "writing failed" if writing else "reading failed"
            raise self._error(DiskError if writing else ReadError, what, error) from error
        if after is not None:
            after()

    def _transfer(self, writing: bool, memory: memoryview, offset: int) -> None:
        direct = self._direct  # now: another thread may be refused, and say so, while this one is
        try:
            if writing:
                write_all(self._descriptor, memory, offset)
            else:
                read_all(self._descriptor, [memory], offset, len(memory))
        except OSError as error:
            if error.errno != errno.EINVAL or not direct:
                raise
            # this file system refuses after all
            self._direct = _set_direct(self._descriptor, False)
            self._transfer(writing, memory, offset)

    def _error(self, kind: type[DiskError], what: str, error: OSError) -> DiskError:
        return kind(
            f"{what} for {self._what}: {error.strerror or error}", where=self.where, how=self._how
        )


def _set_direct(descriptor: int, direct: bool) -> bool:
    """Have transfers go past the page cache, or no longer; return whether they do."""
    if not hasattr(os, "O_DIRECT"):
        return False
    import fcntl

    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(
            descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT
        )
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: this file system has no direct transfers
            raise
        return False
    return direct


class Extents:
    """Ranges of bytes: the smallest free one that is large enough is taken first, free
    neighbours become one.
    """

    def __init__(self) -> None:
        self.taken_bytes = 0  # of all ranges that are taken
        self.end = 0  # where the last of them ends
        self._free: dict[int, int] = {}  # start -> bytes of each free range before the end

    def take(self, nbytes: int, reserve: Callable[[int], None]) -> int:
        """Return where `nbytes` may lie; `reserve` is called first where the end must grow, and
        may refuse.
        """
        size, start = min(
            ((size, start) for start, size in self._free.items() if size >= nbytes),
            default=(0, self.end),
        )
        if size:
            del self._free[start]
        else:
            reserve(start + nbytes)
            self.end = start + nbytes
        if size > nbytes:
            self._free[start + nbytes] = size - nbytes
        self.taken_bytes += nbytes
        return start

    def give(self, start: int, nbytes: int) -> None:
        """Free the space."""
        self.taken_bytes -= nbytes
        end = start + nbytes
        end += self._free.pop(end, 0)
        before = next(
            (free_start for free_start, size in self._free.items() if free_start + size == start),
            None,
        )
        if before is not None:
            start -= self._free.pop(before)
        if end == self.end:
            self.end = start
        else:
            self._free[start] = end - start
