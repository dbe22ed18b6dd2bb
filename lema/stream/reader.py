"""A reader of layers into host buffers: a few large reads by several threads, past the page cache where possible.

A read that fails is never lost: the ticket carries the error to the training thread.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lema.backend.trace import NO_TRACE, NoTrace
from lema.errors import ReadError
from lema.storage.header import TensorRecord
from lema.storage.slices import PartRecord, pieces_of
from lema.stream.placement import DTYPES, PAGE, Cast, LayerBytes
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

    def read(self, memory: memoryview, start: int, offset: int, nbytes: int) -> None:
        """Fill `memory[start : start + nbytes]` from `offset` on; `start` and `offset` are equal modulo a page."""
        if self.direct is not None and self._read_pages(self.direct, memory, start, offset, nbytes):
            return
        _read_fully(self.descriptor, memory[start : start + nbytes], offset, nbytes, self.path)

    def _read_pages(self, descriptor: int, memory: memoryview, start: int, offset: int, nbytes: int) -> bool:
        """Read whole pages around the bytes wanted; False: this file system refuses after all."""
        lead = offset % PAGE
        span = -(-(lead + nbytes) // PAGE) * PAGE
        view = memory[start - lead : start - lead + span]
        try:
            _read_fully(descriptor, view, offset - lead, lead + nbytes, self.path)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.direct = None  # not closed yet: other threads may be reading through it
            return False
        return True

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
        parts: list[Callable[[], None]] = [
            partial(self._read, name, file, memory, start, offset, nbytes)
            for file, start, offset, nbytes in _segments(layer)
        ]
        parts += [partial(self._cast, name, cast, buffer) for cast in layer.casts]
        if (guard := self._guard) is not None:
            # In the threads that read, because these mostly wait for the disk and training goes on beside them.
            looks: list[Callable[[], None] | None] = [
                partial(guard.look, buffer[start : start + nbytes], file, offset)
                if guard.new(file, offset, nbytes)
                else None
                for file, start, offset, nbytes in _segments(layer)
            ]
            for cast in layer.casts:
                target = buffer[cast.placed.offset : cast.placed.offset + cast.placed.nbytes]
                looks.append(partial(guard.look_at_cast, cast, target) if guard.new_cast(cast) else None)
            parts = [
                part if look is None else partial(_both, part, look) for part, look in zip(parts, looks, strict=True)
            ]
        ticket = Ticket(parts, before)
        self._workers.submit(ticket)
        return ticket

    def _read(self, name: str, path: Path, memory: memoryview, start: int, offset: int, nbytes: int) -> None:
        try:
            with self._trace.span("read", name, nbytes=nbytes):
                self._file(path).read(memory, start, offset, nbytes)
        except OSError as error:
            raise ReadError(
                f"reading {nbytes:,} bytes at {offset:,} failed: {error.strerror or error}",
                where=str(path),
                how="check that the file is whole and the disk healthy",
            ) from error
        with self._lock:
            self.bytes_read += nbytes

    def _cast(self, name: str, cast: Cast, buffer: Tensor) -> None:
        record, placed = cast.record, cast.placed
        target = buffer[placed.offset : placed.offset + placed.nbytes]
        if DTYPES[record.dtype] == placed.dtype:
            self._read_pieces(name, record, target)
            return
        aside = torch.empty(record.nbytes, dtype=torch.uint8)
        self._read_pieces(name, record, aside)
        target.view(placed.dtype).copy_(aside.view(DTYPES[record.dtype]))

    def _read_pieces(self, name: str, record: TensorRecord | PartRecord, aside: Tensor) -> None:
        path, memory, done = record.file, _bytes(aside), 0
        try:
            descriptor = self._file(path).descriptor
            with self._trace.span("read", name, nbytes=aside.numel()):
                for offset, nbytes in pieces_of(record):
                    _read_fully(descriptor, memory[done : done + nbytes], offset, nbytes, path)
                    done += nbytes
        except OSError as error:
            raise ReadError(
                f"reading {aside.numel():,} bytes at {offset:,} failed: {error.strerror or error}", where=str(path)
            ) from error
        with self._lock:
            self.bytes_read += aside.numel()

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


def _both(read: Callable[[], None], look: Callable[[], None]) -> None:
    read()
    look()


def _bytes(buffer: Tensor) -> memoryview:
    return memoryview(buffer.numpy())  # type: ignore[arg-type] # numpy's stubs lack the buffer protocol before 3.12


def _segments(layer: LayerBytes) -> list[tuple[Path, int, int, int]]:
    """Cut the runs of a layer at file pages into (file, slot offset, file offset, bytes)."""
    segments = []
    for run in layer.runs:
        offset, end = run.offset, run.offset + run.nbytes
        while offset < end:
            stop = min(end, (offset // PAGE) * PAGE + SEGMENT)
            segments.append((run.file, run.slot_offset + offset - run.offset, offset, stop - offset))
            offset = stop
    return segments


def _read_fully(descriptor: int, view: memoryview, offset: int, needed: int, path: Path) -> None:
    """Read into `view` until `needed` bytes are there; a file that ends earlier was truncated since it was opened."""
    done = 0
    while done < needed:
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            raise OSError(errno.EIO, f"the file ends {needed - done:,} bytes early", str(path))
        done += count
