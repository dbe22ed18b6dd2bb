"""The fastest a process reads files here: threads that do nothing but `preadv` with O_DIRECT into
buffers of their own.

Nothing is kept of what is read. The buffers are taken once and used again. In huge pages a disk
fills them in fewer, larger requests: it makes a plain reader up to twice as fast, so one without
them is no measure.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from lema.stream.placement import PAGE, LayerBytes

HUGE_PAGE = 2 << 20


@dataclass(frozen=True)
class Way:
    """How to read: by how many threads, how many bytes at once, into pages of which size."""

    threads: int = 4
    segment: int = 4 << 20
    huge_pages: bool = True

    def __str__(self) -> str:
        pages = "" if self.huge_pages else ", pages of 4 KiB"
        return f"{self.threads} x {self.segment >> 20} MiB{pages}"


WAYS = tuple(
    Way(threads, segment << 20) for threads, segment in itertools.product((2, 4, 8), (1, 4, 16))
)


def spans_of(layers: Sequence[LayerBytes], segment: int) -> list[tuple[Path, int, int]]:
    """Cut the whole pages that the layers lie in into (file, offset, bytes)."""
    return [
        (run.file, start, min(segment, -(-(run.offset + run.nbytes) // PAGE) * PAGE - start))
        for layer in layers
        for run in layer.runs
        for start in range(run.offset // PAGE * PAGE, run.offset + run.nbytes, segment)
    ]


class PlainReader:
    """Reads the same spans of files again and again; use it in a `with` block."""

    def __init__(self, layers: Sequence[LayerBytes], way: Way) -> None:
        self._spans = spans_of(layers, way.segment)
        self._way = way
        self._files = {
            file: os.open(file, os.O_RDONLY | os.O_DIRECT)
            for file in {span[0] for span in self._spans}
        }
        self._buffers = [_buffer(way) for _ in range(way.threads)]

    def read(self) -> None:
        """Read everything once."""
        lock = threading.Lock()
        ahead = iter(self._spans)

        def work(buffer: memoryview) -> None:
            while True:
                with lock:
                    span = next(ahead, None)
                if span is None:
                    return
                file, start, length = span
                done = 0
                while done < length:  # the last page of a file is not whole
                    count = os.preadv(self._files[file], [buffer[done:length]], start + done)
                    if count == 0 or count % PAGE:
                        break
                    done += count

        threads = [threading.Thread(target=work, args=(buffer,)) for buffer in self._buffers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._buffers.clear()
        for descriptor in self._files.values():
            os.close(descriptor)


def _buffer(way: Way) -> memoryview:
    """Return memory that has been touched, at the beginning of a (huge) page."""
    memory = mmap.mmap(-1, way.segment + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE if way.huge_pages else mmap.MADV_NOHUGEPAGE)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE_PAGE
    view = memoryview(memory)[start : start + way.segment]
    view[:] = bytes(way.segment)
    return view
