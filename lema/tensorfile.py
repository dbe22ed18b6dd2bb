"""Writes one safetensors file tensor by tensor: the header first, then each tensor at its place, in any order.

The `safetensors` library writes a file from a whole state dict in memory; a model larger than memory needs this. The
file appears under its name only when it is complete and on disk, so a kill or a full disk leaves what was there before.
"""

import errno
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self

from lema.errors import DiskError, ReadError
from lema.header import DTYPE_BITS, TensorRecord

__all__ = ["ALIGNMENT", "TensorFile", "TensorSpec", "disk_error", "read_into", "read_pieces"]

ALIGNMENT = 4096  # of the data section: a reader past the page cache needs whole pages
PIECE_BYTES = 8 << 20  # a multiple of every dtype's size

TensorSpec = tuple[str, str, tuple[int, ...]]  # name, safetensors dtype, shape


class TensorFile:
    """A safetensors file being written; use it in a `with` block, at whose end the file appears.

    Args:
        file: where the file shall lie; replaced if it exists, in one step.
        tensors: name, dtype and shape of every tensor, in the order their bytes shall have.
        metadata: strings for the header.

    Raises:
        DiskError: the disk is full, read-only or failing; the partial file is removed, `file` is as it was.
    """

    def __init__(self, file: Path, tensors: Iterable[TensorSpec], metadata: Mapping[str, str] | None = None) -> None:
        self.file = file
        self._specs = list(tensors)
        header, self._records, self._size = _layout(file, self._specs, metadata or {})
        self._unwritten = set(self._records)
        self._partial = file.with_name(f".{file.name}.{secrets.token_hex(4)}.partial")
        self._fd = -1
        try:
            # 0o666 and not mkstemp's 0o600: the file gets the permissions the umask gives any other.
            self._fd = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            self._reserve()
            self._put(header, 0)
        except BaseException as error:
            self._discard()
            if isinstance(error, OSError):
                raise disk_error(error, file) from error
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._discard()
            return
        try:
            self._publish()
        except BaseException as failure:
            self._discard()
            if isinstance(failure, OSError):
                raise disk_error(failure, self.file) from failure
            raise

    @property
    def records(self) -> dict[str, TensorRecord]:
        """Where each tensor lies in the file."""
        return dict(self._records)

    def write(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Write the bytes of one tensor, C-contiguous and little-endian, at its place; a piece may be reused after.

        Raises:
            DiskError: the bytes could not be written.
        """
        assert name in self._unwritten, f"{name} is not announced, or was written before"
        self._unwritten.remove(name)
        record = self._records[name]
        position = record.offset
        for piece in pieces:
            view = memoryview(piece)
            assert view.itemsize == 1, f"{name}: pieces are bytes, not items of {view.itemsize}"
            try:
                self._put(view, position)
            except OSError as error:
                raise disk_error(error, self.file) from error
            position += len(view)
        written = position - record.offset
        assert written == record.nbytes, f"{name}: {written} bytes given, {record.nbytes} announced"

    def _reserve(self) -> None:
        """Take the whole space at once: a full disk is noticed before the work, and the bytes lie together."""
        os.ftruncate(self._fd, self._size)
        if not hasattr(os, "posix_fallocate"):  # macOS
            return
        try:
            os.posix_fallocate(self._fd, 0, self._size)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise  # the others say that this file system cannot reserve; then writing finds out

    def _put(self, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data)
        while view:
            count = os.pwrite(self._fd, view, offset)
            view, offset = view[count:], offset + count

    def _publish(self) -> None:
        assert not self._unwritten, f"announced but never written: {sorted(self._unwritten)}"
        os.fsync(self._fd)
        os.close(self._fd)
        self._fd = -1
        self._partial.replace(self.file)
        # The name is on disk only after its directory is.
        directory = os.open(self.file.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _discard(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        with suppress(OSError):  # the error that brought us here is the one to report
            self._partial.unlink(missing_ok=True)


def disk_error(error: OSError, file: Path) -> DiskError:
    """Say what an `OSError` met while reading or writing `file` means, and how to mend it."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    what = f"the disk is full: {file.name} could not be written" if full else f"{file.name}: {error.strerror or error}"
    how = "free space, or choose another place" if full else "check that the place exists and may be written"
    return DiskError(what, where=str(file), how=how)


def read_into(record: TensorRecord, buffer: memoryview, start: int = 0) -> None:
    """Fill `buffer` with the bytes of a tensor that begin at its byte `start`.

    Raises:
        ReadError: the file is gone, failing, or was cut short after its header was read.
    """
    try:
        with record.file.open("rb", buffering=0) as stream:
            stream.seek(record.offset + start)
            while buffer:
                count = stream.readinto(buffer)
                if not count:
                    raise ReadError(
                        f"{record.file.name} ended inside tensor {record.name!r}",
                        where=str(record.file),
                        how="it was cut short after its header was read; download or save it again",
                    )
                buffer = buffer[count:]
    except OSError as error:
        raise ReadError(
            f"tensor {record.name!r} could not be read: {error.strerror or error}",
            where=str(record.file),
            how="check that the file is there and its disk is sound",
        ) from error


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
