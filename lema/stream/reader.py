"""A reader of layers into host buffers: a few large reads by several threads, past the page cache
where possible.

A read that fails is never lost: the ticket carries the error to the training thread. Single rows of
a table are read too, many small reads through the page cache, which keeps the rows of common
tokens.
"""

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lema.backend.host.files import BINARY
from lema.backend.hostmemory import anonymous
from lema.backend.trace import NO_TRACE, NoTrace
from lema.storage.directio import open_direct, read_all, read_errors
from lema.storage.quantized.formats import move_elements
from lema.storage.slices import RowRange
from lema.storage.spillfile import as_bytes
from lema.stream.firstreads import FirstReads
from lema.stream.placement import DTYPES, PAGE, ByteRun, Cast, LayerBytes, grouped
from lema.stream.weightcheck import BaseGuard, first_non_finite, refusal
from lema.stream.workers import Ticket, Workers

__all__ = ["LayerReader", "StoredRows"]

MOST_PIECES = 256  # of one read; systems allow 1,024 places in memory, and a piece has up to three
# bytes of one read: a few fill any disk's queue, and between two of them there is little to do
SEGMENT = 16 << 20
ROWS_AT_ONCE = 256  # runs of rows that one thread reads one after the other


class _File:
    """One open file: a descriptor past the page cache if the file system allows it, and an
    ordinary one.
    """

    def __init__(self, path: Path, direct: bool) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | BINARY)
        try:
            self.direct = open_direct(path, os.O_RDONLY) if direct else None
        except OSError:
            os.close(self.descriptor)
            raise
        self._opened = [
            descriptor for descriptor in (self.descriptor, self.direct) if descriptor is not None
        ]

    def read(self, memory: memoryview, runs: Sequence[ByteRun]) -> None:
        """Read runs that follow each other in the file, each to its place in `memory`, by one
        request.
        """
        begin = runs[0].offset
        nbytes = sum(run.nbytes for run in runs)
        if self.direct is not None and _in_pages(runs[0]):
            try:
                self._read_pages(self.direct, memory, runs)
                return
            except OSError as error:
                # EINVAL: this file system refuses direct reads after all
                if error.errno != errno.EINVAL:
                    raise
                self.direct = None  # not closed yet: other threads may be reading through it
        views = [memory[run.slot_offset : run.slot_offset + run.nbytes] for run in runs]
        read_all(self.descriptor, views, begin, nbytes)

    def _read_pages(self, descriptor: int, memory: memoryview, runs: Sequence[ByteRun]) -> None:
        """Read the whole pages that runs lie in; pages that hold bytes of two runs go aside, and
        are divided then.
        """
        views: list[memoryview] = []
        aside: dict[int, memoryview] = {}  # by page of the file
        spare = (
            as_bytes(anonymous((len(runs) + 1) * PAGE)) if not runs[0].alone else memoryview(b"")
        )
        for run in runs:
            first = run.offset // PAGE
            last = -(-(run.offset + run.nbytes) // PAGE)
            shift = run.slot_offset - run.offset
            for page in _shared_pages(run):
                if page not in aside:
                    aside[page] = spare[len(aside) * PAGE : (len(aside) + 1) * PAGE]
            begin = first + (first in aside)
            end = last - (last - 1 in aside)  # pages that are this run's alone
            if first in aside and (not views or views[-1] is not aside[first]):
                views.append(aside[first])
            if begin < end:
                views.append(memory[begin * PAGE + shift : end * PAGE + shift])
            if last - 1 in aside and last - 1 != first:
                views.append(aside[last - 1])
        start = runs[0].offset // PAGE * PAGE
        read_all(descriptor, views, start, runs[-1].offset + runs[-1].nbytes - start)
        for run in runs:
            for page in _shared_pages(run):
                start = max(run.offset, page * PAGE)
                stop = min(run.offset + run.nbytes, (page + 1) * PAGE)
                slot_start = run.slot_offset + start - run.offset
                memory[slot_start : slot_start + stop - start] = aside[page][
                    start - page * PAGE : stop - page * PAGE
                ]

    def close(self) -> None:
        for descriptor in self._opened:
            os.close(descriptor)


class LayerReader:
    """A pool of threads that read layers, `threads` at once, past the page cache if `direct` and
    the file system allows it. `guard` checks the weights that are read for the first time; None:
    they are not checked. `first_reads` remembers checksums of them; None: nothing is remembered."""

    # most of them wait for the disk: that it always has the next read costs no processor time
    THREADS = 8

    def __init__(
        self,
        threads: int = THREADS,
        direct: bool = True,
        trace: NoTrace = NO_TRACE,
        guard: BaseGuard | None = None,
        first_reads: FirstReads | None = None,
    ) -> None:
        self._trace = trace
        self.guard = guard
        self.first_reads = first_reads
        self._workers = Workers(threads, "lema-read")
        # Others, because layers that are read ahead may wait at their gate for what is computed
        # with these rows.
        self._row_workers = Workers(threads, "lema-rows")
        self._direct = direct
        self._files: dict[Path, _File] = {}
        self._lock = threading.Lock()
        self.bytes_read = 0

    def submit(
        self,
        layer: LayerBytes,
        buffer: Tensor,
        before: Callable[[], None] | None = None,
        *,
        name: str = "weights",
    ) -> Ticket:
        """Start reading `layer` into `buffer`, uint8 `[at least layer.nbytes]`, page-aligned.
        `before` is called in a reader thread ahead of the first byte; it blocks until the buffer
        may be overwritten. A trace says `name`."""
        # What follows each other in a file, as the pieces of experts commonly do, is what one read
        # takes.
        requests = grouped(
            sorted(_segments(layer), key=lambda run: (str(run.file), run.offset)), _continues
        )
        parts: list[Callable[[], None]] = [
            partial(self._read, name, runs, buffer) for runs in requests
        ]
        parts += [partial(self._cast, name, cast, buffer) for cast in layer.casts]
        ticket = Ticket(parts, before)
        self._workers.submit(ticket)
        return ticket

    def gather(self, runs: Sequence[ByteRun], buffer: Tensor, *, name: str) -> None:
        """Read many small runs into `buffer`, uint8, and wait for them, or raise `ReadError`. A
        trace says `name`.
        """
        memory = as_bytes(buffer)
        shares = [runs[start : start + ROWS_AT_ONCE] for start in range(0, len(runs), ROWS_AT_ONCE)]
        ticket = Ticket([partial(self._gather, name, share, memory) for share in shares])
        if ticket.size > 1:
            self._row_workers.submit(ticket)
            ticket.wait()
        elif shares:
            self._gather(name, shares[0], memory)

    def _gather(self, name: str, runs: Sequence[ByteRun], memory: memoryview) -> None:
        nbytes = sum(run.nbytes for run in runs)
        with self._reading(name, nbytes):
            for run in runs:
                view = memory[run.slot_offset : run.slot_offset + run.nbytes]
                with read_errors(run.file, run.offset, run.nbytes):
                    read_all(self._file(run.file).descriptor, [view], run.offset, run.nbytes)

    def _read(self, name: str, runs: Sequence[ByteRun], buffer: Tensor) -> None:
        nbytes = sum(run.nbytes for run in runs)
        with self._reading(name, nbytes), read_errors(runs[0].file, runs[0].offset, nbytes):
            self._file(runs[0].file).read(as_bytes(buffer), runs)
        # in the thread that read, because it mostly waits for the disk and training goes on
        for run in runs:
            memory = buffer[run.slot_offset : run.slot_offset + run.nbytes]
            if self.first_reads is not None:
                self.first_reads.take(run.file, [(run.offset, run.nbytes)], as_bytes(memory))
            if self.guard is not None:
                self.guard.check(memory, run.file, run.offset)

    def _cast(self, name: str, cast: Cast, buffer: Tensor) -> None:
        slot_tensor = cast.target
        ranges, move = cast.ranges()
        destination = buffer[slot_tensor.offset : slot_tensor.offset + slot_tensor.nbytes].view(
            slot_tensor.dtype
        )
        stored = DTYPES[cast.record.dtype]
        nbytes = sum(size for _, size in ranges)
        in_order = stored == slot_tensor.dtype and (move is None or move.joined().is_contiguous)
        first = move.write * slot_tensor.dtype.itemsize if move is not None and in_order else 0
        aside = (
            destination.view(torch.uint8)[first : first + nbytes]
            if in_order
            else torch.empty(nbytes, dtype=torch.uint8)
        )
        memory = as_bytes(aside)
        done = 0
        path = cast.record.file
        with self._reading(name, nbytes):
            for offset, size in ranges:
                with read_errors(path, offset, nbytes):
                    read_all(
                        self._file(path).descriptor, [memory[done : done + size]], offset, size
                    )
                done += size
        if self.first_reads is not None:
            self.first_reads.take(path, ranges, memory)
        if in_order:
            target = aside.view(stored)
        elif move is None:
            target = destination.copy_(aside.view(stored))
        else:
            target = move_elements(aside.view(stored), move, destination)
        if self.guard is not None:
            self.guard.check_cast(cast, target)

    @contextmanager
    def _reading(self, name: str, nbytes: int) -> Iterator[None]:
        with self._trace.span("read", name, nbytes=nbytes):
            yield
        with self._lock:
            self.bytes_read += nbytes

    def _file(self, path: Path) -> _File:
        with self._lock:
            if path not in self._files:
                self._files[path] = _File(path, self._direct)
            return self._files[path]

    def close(self) -> None:
        """Wait for the reads under way and close the files."""
        self._workers.close()
        self._row_workers.close()
        for file in self._files.values():
            file.close()
        self._files.clear()


class StoredRows:
    """The rows of a table `[rows, width]` that is not loaded, read when they are asked for and cast
    to `dtype`. `name` is the table's in the model; `ranges` say where its rows are, in order."""

    def __init__(
        self,
        reader: LayerReader,
        name: str,
        ranges: Sequence[RowRange],
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        self._reader = reader
        self._name = name
        self._ranges = ranges
        self._dtype = dtype
        self._num_rows, self._width = shape
        self._stored = DTYPES[ranges[0].record.dtype]
        self._firsts = np.array([row_range.first for row_range in ranges])

    def read(self, ids: Tensor) -> Tensor:
        """Return the rows of `ids`, int64, sorted, each there once: `[ids, width]` in host memory.
        `IndexError`: there is no such row; as torch says it. `ReadError`: they could not be read.
        `NonFiniteError`: an element of them is NaN or infinite."""
        row_ids = ids.numpy()
        if len(row_ids) and not 0 <= row_ids[0] <= row_ids[-1] < self._num_rows:
            raise IndexError("index out of range in self")
        rows = torch.empty(len(row_ids), self._width, dtype=self._stored)
        self._reader.gather(self._runs(row_ids), rows.view(-1).view(torch.uint8), name=self._name)
        cast = rows.to(self._dtype)
        if self._reader.guard is not None:
            self._check(row_ids, cast)
        return cast

    def _runs(self, ids: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[ByteRun]:
        """Return what to read: neighbours in one file are one run."""
        nbytes = self._width * self._stored.itemsize
        parts = np.searchsorted(self._firsts, ids, side="right") - 1
        breaks = (np.diff(ids) != 1) | (np.diff(parts) != 0)
        cuts = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(ids)] if len(ids) else []
        runs = []
        for begin, end in pairwise(cuts):
            part = self._ranges[parts[begin]]
            offset = part.offset + (int(ids[begin]) - part.first) * nbytes
            runs.append(
                ByteRun(
                    part.record.file, offset, (end - begin) * nbytes, begin * nbytes, alone=False
                )
            )
        return runs

    def _check(self, ids: np.ndarray[tuple[int], np.dtype[np.int64]], rows: Tensor) -> None:
        index = first_non_finite(rows.view(-1).view(torch.uint8), rows.dtype)
        if index is None:
            return
        row, column = divmod(index, self._width)
        part = self._ranges[int(np.searchsorted(self._firsts, ids[row], side="right")) - 1]
        skipped = (part.offset - part.record.offset) // (self._width * self._stored.itemsize)
        cast = None if self._stored == self._dtype else self._dtype
        raise refusal(self._name, part.record, [int(ids[row]) - part.first + skipped, column], cast)


def _segments(layer: LayerBytes) -> Iterator[ByteRun]:
    """Cut the runs of a layer at pages of the file into what one read takes."""
    for run in layer.runs:
        offset = run.offset
        end = run.offset + run.nbytes
        while offset < end:
            stop = min(end, (offset // PAGE) * PAGE + SEGMENT)
            yield replace(
                run,
                offset=offset,
                nbytes=stop - offset,
                slot_offset=run.slot_offset + offset - run.offset,
            )
            offset = stop


def _continues(group: Sequence[ByteRun], run: ByteRun) -> bool:
    last = group[-1]
    follows = (run.file, run.offset) == (last.file, last.offset + last.nbytes)
    fits = run.offset + run.nbytes - group[0].offset <= SEGMENT and len(group) < MOST_PIECES
    return follows and fits and not (last.alone or run.alone) and _in_pages(last) == _in_pages(run)


def _in_pages(run: ByteRun) -> bool:
    """Whether a run lies in memory as far into its page as in its file, as a read past the page
    cache needs it.
    """
    return (run.slot_offset - run.offset) % PAGE == 0


def _shared_pages(run: ByteRun) -> list[int]:
    """Return the pages of the file, the first or the last of a run, that have bytes of other
    pieces, too.
    """
    end = run.offset + run.nbytes
    edges = sorted({run.offset // PAGE, (end - 1) // PAGE})
    return (
        []
        if run.alone
        else [page for page in edges if page * PAGE < run.offset or end < (page + 1) * PAGE]
    )
