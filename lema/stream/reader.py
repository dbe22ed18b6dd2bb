"""Bytes from files into host buffers: a few large reads by several threads, past the page cache where it can be.

A read that fails is never lost: the ticket carries the error to the training thread.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path

import torch
from torch import Tensor

from lema.errors import ReadError
from lema.stream.placement import DTYPES, PAGE, LayerBytes
from lema.trace import NO_TRACE, NoTrace

__all__ = ["LayerReader", "Ticket"]

SEGMENT = 4 << 20  # bytes of one read: large enough for any disk, small enough for several threads to share a layer


class Ticket:
    """The reads of one layer into one buffer, under way."""

    def __init__(self, futures: list[Future[None]]) -> None:
        self._futures = futures

    def done(self) -> bool:
        """Whether every read has ended, well or badly."""
        return all(future.done() for future in self._futures)

    def failed(self) -> BaseException | None:
        """Return the first failure among the reads that have ended; None: none so far."""
        for future in self._futures:
            if future.done() and not future.cancelled() and (error := future.exception()) is not None:
                return error
        return None

    def wait(self) -> None:
        """Block until the buffer is filled; raise what a read raised."""
        for future in self._futures:
            future.result()

    def settle(self) -> None:
        """Block until no read touches the buffer any more, however the reads end; what has not begun never will."""
        # A cancelled future counts as ended only when a thread comes by it, which may be busy with other layers.
        wait_for([future for future in self._futures if not future.cancel()])


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

    def read(self, buffer: Tensor, start: int, offset: int, nbytes: int) -> None:
        """Fill `buffer[start : start + nbytes]` from `offset` on; `start` and `offset` are equal modulo a page."""
        if self.direct is not None and self._read_pages(self.direct, buffer, start, offset, nbytes):
            return
        _read_fully(self.descriptor, _bytes(buffer[start : start + nbytes]), offset, nbytes, self.path)

    def _read_pages(self, descriptor: int, buffer: Tensor, start: int, offset: int, nbytes: int) -> bool:
        """Read whole pages around the bytes wanted; False: this file system refuses after all."""
        lead = offset % PAGE
        span = -(-(lead + nbytes) // PAGE) * PAGE
        view = _bytes(buffer[start - lead : start - lead + span])
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
    """

    THREADS = 4

    def __init__(self, threads: int = THREADS, direct: bool = True, trace: NoTrace = NO_TRACE) -> None:
        self._trace = trace
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="lema-read")
        self._direct = direct
        self._files: dict[Path, _File] = {}
        self._lock = threading.Lock()
        self.bytes_read = 0

    def submit(
        self, layer: LayerBytes, buffer: Tensor, before: Callable[[], None] | None = None, *, name: str = "weights"
    ) -> Ticket:
        """Start reading `layer` into `buffer`, uint8 `[at least layer.nbytes]`, page-aligned.

        `before` is called in a reader thread ahead of the first byte; it blocks until the buffer may be overwritten.
        `name` is what a trace calls the reads.
        """
        gate = self._pool.submit(before) if before else None
        futures: list[Future[None]] = [gate] if gate else []
        for file, start, offset, nbytes in _segments(layer):
            futures.append(self._pool.submit(self._read, gate, name, file, buffer, start, offset, nbytes))
        casts = range(len(layer.casts))
        futures.extend(self._pool.submit(self._cast, gate, name, layer, buffer, index) for index in casts)
        return Ticket(futures)

    def _read(
        self, gate: Future[None] | None, name: str, path: Path, buffer: Tensor, start: int, offset: int, nbytes: int
    ) -> None:
        if gate is not None:
            gate.result()
        try:
            with self._trace.span("read", name, nbytes=nbytes):
                self._file(path).read(buffer, start, offset, nbytes)
        except OSError as error:
            raise ReadError(
                f"reading {nbytes:,} bytes at {offset:,} failed: {error.strerror or error}",
                where=str(path),
                how="check that the file is whole and the disk healthy",
            ) from error
        with self._lock:
            self.bytes_read += nbytes

    def _cast(self, gate: Future[None] | None, name: str, layer: LayerBytes, buffer: Tensor, index: int) -> None:
        record, placed = layer.casts[index].record, layer.casts[index].placed
        aside = torch.empty(record.nbytes, dtype=torch.uint8)
        self._read_aside(gate, name, record.file, aside, record.offset)
        target = buffer[placed.offset : placed.offset + placed.nbytes].view(placed.dtype)
        target.copy_(aside.view(DTYPES[record.dtype]))

    def _read_aside(self, gate: Future[None] | None, name: str, path: Path, aside: Tensor, offset: int) -> None:
        if gate is not None:
            gate.result()
        try:
            descriptor = self._file(path).descriptor
            with self._trace.span("read", name, nbytes=aside.numel()):
                _read_fully(descriptor, _bytes(aside), offset, aside.numel(), path)
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
        self._pool.shutdown(wait=True, cancel_futures=True)
        for file in self._files.values():
            file.close()
        self._files.clear()


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
