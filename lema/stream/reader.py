"""A reader of layers into host buffers: a few large reads by several threads, past the page cache where possible.

A read that fails is never lost: the ticket carries the error to the training thread.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lema.backend.hostmemory import anonymous
from lema.backend.trace import NO_TRACE, NoTrace
from lema.errors import ReadError
from lema.storage.quantized.published import move_elements
from lema.stream.placement import DTYPES, PAGE, ByteRun, Cast, LayerBytes
from lema.stream.weightcheck import BaseGuard
from lema.stream.workers import Ticket, Workers

__all__ = ["LayerReader"]


SEGMENT = 16 << 20  # bytes of one read: a few fill any disk's queue, and between two of them there is little to do


class _File:
    """One open file: a descriptor past the page cache where the file system allows it, an ordinary one beside it."""

    def __init__(self, path: Path, direct: bool) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.direct: int | None = None
        self._opened = [self.descriptor]
        if direct and hasattr(os, "O_DIRECT"):
            try:
                self.direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
                self._opened.append(self.direct)
            except OSError as error:
                if error.errno != errno.EINVAL:  # EINVAL: this file system has no direct reads
                    self.close()
                    raise

    def read(self, memory: memoryview, start: int, offset: int, nbytes: int, alone: bool = True) -> None:
        """Fill `memory[start : start + nbytes]` from `offset` on.

        Args:
            alone: the pages of memory that these bytes lie in may be overwritten as a whole.
        """
        if self.direct is not None and (start - offset) % PAGE == 0:
            try:
                self._read_pages(self.direct, memory, start, offset, nbytes, alone)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:  # EINVAL: this file system refuses direct reads after all
                    raise
                self.direct = None  # not closed yet: other threads may be reading through it
        _read_fully(self.descriptor, [memory[start : start + nbytes]], offset, nbytes, self.path)

    def _read_pages(
        self, descriptor: int, memory: memoryview, start: int, offset: int, nbytes: int, alone: bool
    ) -> None:
        """Read whole pages around the bytes wanted, by one request."""
        lead = offset % PAGE
        pages = -(-(lead + nbytes) // PAGE)
        first, last = (0, 0) if alone else (int(lead > 0), int((lead + nbytes) % PAGE > 0))
        if pages == 1:
            last = min(last, 1 - first)
        begin = start - lead
        inner = memory[begin + first * PAGE : begin + (pages - last) * PAGE]
        # The first and the last page go aside where another piece has bytes in theirs in memory.
        aside = _bytes(anonymous(2 * PAGE)) if first or last else memoryview(b"")
        views = [*[aside[:PAGE]] * first, *([inner] if len(inner) else []), *[aside[PAGE : 2 * PAGE]] * last]
        _read_fully(descriptor, views, offset - lead, lead + nbytes, self.path)
        if first:
            count = min(nbytes, PAGE - lead)
            memory[start : start + count] = aside[lead : lead + count]
        if last:
            count = min(nbytes, (lead + nbytes - 1) % PAGE + 1)
            end, skipped = start + nbytes, PAGE + (lead if pages == 1 else 0)
            memory[end - count : end] = aside[skipped : skipped + count]

    def close(self) -> None:
        for descriptor in self._opened:
            os.close(descriptor)


class LayerReader:
    """A pool of threads that read layers.

    Args:
        threads: how many reads are under way at once.
        direct: read past the page cache where the file system allows it.
        trace: records every read.
        guard: checks the weights that are read for the first time; None: they are not checked.
    """

    THREADS = 8  # most of them wait for the disk: that it always has the next read costs no processor time

    def __init__(
        self,
        threads: int = THREADS,
        direct: bool = True,
        trace: NoTrace = NO_TRACE,
        guard: BaseGuard | None = None,
    ) -> None:
        self._trace, self._guard = trace, guard
        self._workers = Workers(threads, "lema-read")
        self._direct = direct
        self._files: dict[Path, _File] = {}
        self._lock = threading.Lock()
        self.bytes_read = 0
        weakref.finalize(
            self, self._workers.stop
        ).atexit = False  # because a reader may be dropped without being closed

    def submit(
        self, layer: LayerBytes, buffer: Tensor, before: Callable[[], None] | None = None, *, name: str = "weights"
    ) -> Ticket:
        """Start reading `layer` into `buffer`, uint8 `[at least layer.nbytes]`, page-aligned.

        `before` is called in a reader thread ahead of the first byte; it blocks until the buffer may be overwritten.
        `name` is what a trace calls the reads.
        """
        memory = _bytes(buffer)
        parts: list[Callable[[], None]] = []
        for run in _segments(layer):
            look = None
            if self._guard is not None and self._guard.new(run.file, run.offset, run.nbytes):
                read = buffer[run.slot_offset : run.slot_offset + run.nbytes]
                look = partial(self._guard.look, read, run.file, run.offset)
            parts.append(partial(self._read, name, run, memory, look))
        for cast in layer.casts:
            look = None
            if self._guard is not None and self._guard.new_cast(cast):
                look = partial(self._guard.look_at_cast, cast)
            parts.append(partial(self._cast, name, cast, buffer, look))
        ticket = Ticket(parts, before)
        self._workers.submit(ticket)
        return ticket

    def _read(self, name: str, run: ByteRun, memory: memoryview, look: Callable[[], None] | None) -> None:
        try:
            with self._trace.span("read", name, nbytes=run.nbytes):
                self._file(run.file).read(memory, run.slot_offset, run.offset, run.nbytes, run.alone)
        except OSError as error:
            raise _failure(error, run.file, run.offset, run.nbytes) from error
        with self._lock:
            self.bytes_read += run.nbytes
        if look is not None:  # in the thread that read, because it mostly waits for the disk and training goes on
            look()

    def _cast(self, name: str, cast: Cast, buffer: Tensor, look: Callable[[Tensor], None] | None) -> None:
        placed, (ranges, move) = cast.placed, cast.ranges()
        place = buffer[placed.offset : placed.offset + placed.nbytes].view(placed.dtype)
        stored = DTYPES[cast.record.dtype]
        nbytes = sum(size for _, size in ranges)
        in_order = stored == placed.dtype and (move is None or move.joined().is_contiguous)
        first = move.write * placed.dtype.itemsize if move is not None and in_order else 0
        aside = place.view(torch.uint8)[first : first + nbytes] if in_order else torch.empty(nbytes, dtype=torch.uint8)
        memory, done, path = _bytes(aside), 0, cast.record.file
        try:
            descriptor = self._file(path).descriptor
            with self._trace.span("read", name, nbytes=nbytes):
                for offset, size in ranges:
                    _read_fully(descriptor, [memory[done : done + size]], offset, size, path)
                    done += size
        except OSError as error:
            raise _failure(error, path, offset, nbytes) from error
        with self._lock:
            self.bytes_read += nbytes
        if in_order:
            target = aside.view(stored)
        elif move is None:
            target = place.copy_(aside.view(stored))
        else:
            target = move_elements(aside.view(stored), move, place)
        if look is not None:
            look(target)

    def _file(self, path: Path) -> _File:
        with self._lock:
            if path not in self._files:
                self._files[path] = _File(path, self._direct)
            return self._files[path]

    def close(self) -> None:
        """Wait for the reads under way and close the files."""
        self._workers.close()
        for file in self._files.values():
            file.close()
        self._files.clear()


def _failure(error: OSError, path: Path, offset: int, nbytes: int) -> ReadError:
    return ReadError(
        f"reading {nbytes:,} bytes at {offset:,} failed: {error.strerror or error}",
        where=str(path),
        how="check that the file is whole and the disk healthy",
    )


def _bytes(buffer: Tensor) -> memoryview:
    return memoryview(buffer.numpy())  # type: ignore[arg-type] # numpy's stubs lack the buffer protocol before 3.12


def _segments(layer: LayerBytes) -> Iterator[ByteRun]:
    """Cut the runs of a layer at pages of the file into what one read takes."""
    for run in layer.runs:
        offset, end = run.offset, run.offset + run.nbytes
        while offset < end:
            stop = min(end, (offset // PAGE) * PAGE + SEGMENT)
            yield replace(run, offset=offset, nbytes=stop - offset, slot_offset=run.slot_offset + offset - run.offset)
            offset = stop


def _read_fully(descriptor: int, views: list[memoryview], offset: int, needed: int, path: Path) -> None:
    """Fill `views` until `needed` bytes are there; a file that ends earlier was truncated since it was opened."""
    done = 0
    while done < needed:
        left, skipped = [], done
        for view in views:
            left += [view[skipped:]] if skipped < len(view) else []
            skipped = max(0, skipped - len(view))
        count = os.preadv(descriptor, left, offset + done)
        if count == 0:
            raise OSError(errno.EIO, f"the file ends {needed - done:,} bytes early", str(path))
        done += count
