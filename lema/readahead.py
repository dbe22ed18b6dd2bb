"""Asks the system to read what will be needed next, so that the disk is not idle while something else is done.

The bytes go to the page cache, which the system takes back when memory is short, and not to memory of this process.
"""

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from lema.header import TensorRecord

__all__ = ["WINDOW_BYTES", "ReadAhead"]

WINDOW_BYTES = 256 << 20  # asked for and not read yet, at most
STEP_BYTES = 128 << 10  # of one request: of a longer one some systems read only so much


class ReadAhead:
    """Requests the bytes of tensors in the order they will be read, a bounded way ahead; use it in a `with` block.

    A wish, which changes no result: a file that cannot be opened here is an error where it is read.

    Args:
        records: the tensors, in order.
    """

    def __init__(self, records: Iterable[TensorRecord]) -> None:
        self._records = list(records)
        self._allowed, self._closed = WINDOW_BYTES, False
        self._moved = threading.Condition()
        self._thread = threading.Thread(target=self._request, name="lema-read-ahead", daemon=True)

    def advance(self, nbytes: int) -> None:
        """`nbytes` more were read."""
        with self._moved:
            self._allowed += nbytes
            self._moved.notify()

    def __enter__(self) -> Self:
        if hasattr(os, "posix_fadvise"):  # macOS has none
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._moved:
            self._closed = True
            self._moved.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _request(self) -> None:
        asked = 0
        with ExitStack() as files:
            descriptors: dict[Path, int | None] = {}
            for record in self._records:
                if record.file not in descriptors:
                    descriptors[record.file] = _opened(record.file, files)
                descriptor = descriptors[record.file]
                for offset, nbytes in _steps(record):
                    asked += nbytes
                    if not self._may_ask_for(asked):
                        return
                    if descriptor is not None:
                        os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_WILLNEED)

    def _may_ask_for(self, nbytes: int) -> bool:
        """Wait until the reading is near; False: it has ended."""
        with self._moved:
            while nbytes > self._allowed and not self._closed:
                self._moved.wait()
            return not self._closed


def _opened(file: Path, files: ExitStack) -> int | None:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    files.callback(os.close, descriptor)
    return descriptor


def _steps(record: TensorRecord) -> Iterator[tuple[int, int]]:
    end = record.offset + record.nbytes
    for offset in range(record.offset, end, STEP_BYTES):
        yield offset, min(STEP_BYTES, end - offset)
