"""A writer of one safetensors file, tensor by tensor: the header first, then each tensor at its place, in any order.

The `safetensors` library writes a file from a whole state dict in memory; a model larger than memory needs this. The
file appears under its name only when it is complete and on disk, so a kill or a full disk leaves what was there before.
What a killed run left, the next run to the same place removes.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self

from lema.errors import ReadError
from lema.storage.atomic import flush, open_partial
from lema.storage.directio import BlockFile
from lema.storage.diskspace import disk_error
from lema.storage.header import DTYPE_BITS, TensorRecord

__all__ = ["ALIGNMENT", "TensorFile", "TensorSpec", "read_into", "read_pieces"]

ALIGNMENT = 4096  # of the data section: a reader past the page cache needs whole pages
PIECE_BYTES = 1 << 20  # a multiple of every dtype's size; small enough that its memory is used again, not mapped anew
TensorSpec = tuple[str, str, tuple[int, ...]]  # name, safetensors dtype, shape


class TensorFile:
    """A safetensors file being written; use it in a `with` block, at whose end the file appears.

    Args:
        file: where the file shall lie; replaced if it exists, in one step.
        tensors: name, dtype and shape of every tensor, in the order their bytes shall have.
        metadata: strings for the header.
        progress: called as bytes are given, with how many were, and how many there are in all.

    Raises:
        DiskError: the disk is full, read-only or failing; the partial file is removed, `file` is as it was.
    """

    def __init__(
        self,
        file: Path,
        tensors: Iterable[TensorSpec],
        metadata: Mapping[str, str] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.file = file
        header, self._records, self._size = _layout(file, list(tensors), metadata or {})
        self._unwritten = set(self._records)
        self._given, self._progress = 0, progress
        self._fd, self._partial = -1, file
        self._blocks: BlockFile | None = None
        with self._discarded_on_failure():
            self._fd, self._partial = open_partial(file)
            self._blocks = BlockFile(self._fd, self._partial, self._size)
            self._put(header)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._discard()
            return
        with self._discarded_on_failure():
            self._publish()

    @property
    def records(self) -> dict[str, TensorRecord]:
        """Where each tensor lies in the file."""
        return dict(self._records)

    def space(self, name: str) -> Iterator[memoryview]:
        """Yield the place of one tensor, a bounded piece at a time; fill each before the next is asked for.

        Bytes given before that could not be written are a `DiskError`.
        """
        assert name in self._unwritten, f"{name} is not announced, or was written before"
        record = self._records[name]
        try:
            for place in self._views(record.offset, record.nbytes):
                yield place
                self._given += len(place)
                if self._progress is not None:
                    self._progress(self._given, self._size)
        except OSError as error:
            raise disk_error(error, self.file) from error
        self._unwritten.remove(name)

    def write(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Write the bytes of one tensor, C-contiguous and little-endian, at its place; a piece may be reused after.

        Bytes that could not be written are a `DiskError`.
        """
        places, place = self.space(name), memoryview(b"")
        for piece in pieces:
            view = memoryview(piece)
            assert view.itemsize == 1, f"{name}: pieces are bytes, not items of {view.itemsize}"
            while view:
                place = place or next(places, place)
                assert place, f"{name}: more bytes given than the {self._records[name].nbytes} announced"
                count = min(len(place), len(view))
                place[:count] = view[:count]
                place, view = place[count:], view[count:]
        assert not place and next(places, None) is None, f"{name}: fewer bytes given than announced"

    def _put(self, header: bytes) -> None:
        done = 0
        for place in self._views(0, len(header)):
            place[:] = header[done : done + len(place)]
            done += len(place)
        self._given += done

    def _views(self, offset: int, nbytes: int) -> Iterator[memoryview]:
        assert self._blocks is not None, "the file is written already, or was given up"
        return self._blocks.views(offset, nbytes)

    def _publish(self) -> None:
        assert not self._unwritten, f"announced but never written: {sorted(self._unwritten)}"
        assert self._blocks is not None
        self._blocks.finish()
        self._partial.replace(self.file)
        self._close()  # after renaming: what is not locked may be swept
        flush(self.file.parent)  # the name is on disk only after its directory is

    @contextmanager
    def _discarded_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._discard()
            if isinstance(error, OSError):
                raise disk_error(error, self.file) from error
            raise

    def _discard(self) -> None:
        made = self._fd >= 0
        self._close()
        if made:
            with suppress(OSError):  # the error that brought us here is the one to report
                self._partial.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._blocks is not None:
            self._blocks.close()
            self._blocks = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_into(record: TensorRecord, buffer: memoryview, start: int = 0) -> None:
    """Fill `buffer` with the bytes of a tensor that begin at its byte `start`.

    `ReadError`: the file is gone, failing, or was cut short after its header was read.
    """
    try:
        with record.file.open("rb", buffering=0) as stream:
            stream.seek(record.offset + start)
            while buffer:
                count = stream.readinto(buffer)
                if not count:
                    what = f"{record.file.name} ended inside tensor {record.name!r}"
                    how = "it was cut short after its header was read; download or save it again"
                    raise ReadError(what, where=str(record.file), how=how)
                buffer = buffer[count:]
    except OSError as error:
        what = f"tensor {record.name!r} could not be read: {error.strerror or error}"
        how = "check that the file is there and its disk is sound"
        raise ReadError(what, where=str(record.file), how=how) from error


def read_pieces(record: TensorRecord) -> Iterator[memoryview]:
    """The bytes of a tensor, a bounded piece at a time; each piece is valid until the next is asked for."""
    buffer = memoryview(bytearray(min(PIECE_BYTES, record.nbytes)))
    for start in range(0, record.nbytes, PIECE_BYTES):
        piece = buffer[: record.nbytes - start]
        read_into(record, piece, start)
        yield piece


def _layout(
    file: Path, specs: list[TensorSpec], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, TensorRecord], int]:
    """The header's bytes, where each tensor goes, and the size of the whole file."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    sizes, position = [], 0
    for name, dtype, shape in specs:
        assert name not in header, f"{name} is announced twice"
        nbytes = prod(shape) * DTYPE_BITS[dtype] // 8
        sizes.append((position, nbytes))
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + nbytes]}
        position += nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    start = -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT
    records = {
        name: TensorRecord(name, file, start + offset, nbytes, dtype, shape)
        for (name, dtype, shape), (offset, nbytes) in zip(specs, sizes, strict=True)
    }
    return (start - 8).to_bytes(8, "little") + text.ljust(start - 8), records, start + position
