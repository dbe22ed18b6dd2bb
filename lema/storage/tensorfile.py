"""A writer of one safetensors file, tensor by tensor: the header first, then each tensor at its
place, in any order.

The `safetensors` library writes a file from a whole state dict in memory; a model larger than
memory needs this. The file appears under its name only when it is complete and on disk, so a kill
or a full disk leaves what was there before. What a killed run left, the next run to the same place
removes.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from math import prod
from pathlib import Path

from lema.errors import ReadError
from lema.storage.atomic import partial_file
from lema.storage.directio import BlockFile
from lema.storage.diskspace import disk_errors
from lema.storage.header import DTYPE_BITS, TensorRecord

__all__ = [
    "ALIGNMENT",
    "TensorFile",
    "TensorSpec",
    "is_unaligned",
    "read_into",
    "read_pieces",
    "run_order",
    "tensor_file",
]

ALIGNMENT = 4096  # of the data section: a reader past the page cache needs whole pages
VECTOR = 16  # bytes that kernels load at once
# a multiple of every dtype's size; small enough that its memory is used again, not mapped again
PIECE_BYTES = 1 << 20
TensorSpec = tuple[str, str, tuple[int, ...]]  # name, safetensors dtype, shape


def is_unaligned(spec: TensorSpec) -> bool:
    """Return whether a tensor's bytes are no whole number of vectors, so that what follows it
    begins within one.
    """
    _, dtype, shape = spec
    return bool(prod(shape) * DTYPE_BITS[dtype] // 8 % VECTOR)


def run_order(spec: TensorSpec) -> tuple[bool, int]:
    """Return by what tensors are sorted that shall be one run of bytes: those that are whole
    vectors long come before others, so that they begin at whole vectors, because a file has no
    padding between tensors; and wide dtypes come first."""
    return is_unaligned(spec), -DTYPE_BITS[spec[1]]


@contextmanager
def tensor_file(
    file: Path,
    tensors: Iterable[TensorSpec],
    metadata: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> "Iterator[TensorFile]":
    """Give a safetensors file to write, which appears at the end of the `with` block, replacing one
    that was there. `DiskError`: the disk is full, read-only or failing; nothing is left behind,
    `file` is as it was. `tensors`: name, dtype and shape of every tensor, in the order their bytes
    shall have. `metadata`: strings for the header. `progress`: called as bytes are given, with how
    many were, and how many there are in all."""
    out = TensorFile(file, list(tensors), metadata or {}, progress)
    with ExitStack() as stack:
        with disk_errors(file):
            descriptor, partial = stack.enter_context(partial_file(file))
            out.begin(stack.enter_context(closing(BlockFile(descriptor, partial, out.size))))
        yield out
        with disk_errors(file):
            out.finish()
            stack.close()  # here, because it gives the file its name


class TensorFile:
    """A safetensors file being written; see `tensor_file`. `records` says where each tensor lies
    in it.
    """

    def __init__(
        self,
        file: Path,
        specs: list[TensorSpec],
        metadata: Mapping[str, str],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.file = file
        self._progress = progress
        header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        sizes = []
        position = 0
        for name, dtype, shape in specs:
            assert name not in header, f"{name} is announced twice"
            nbytes = prod(shape) * DTYPE_BITS[dtype] // 8
            sizes.append((position, nbytes))
            header[name] = {
                "dtype": dtype,
                "shape": list(shape),
                "data_offsets": [position, position + nbytes],
            }
            position += nbytes
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        start = -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT
        self.records: Mapping[str, TensorRecord] = {
            name: TensorRecord(name, file, start + offset, nbytes, dtype, shape)
            for (name, dtype, shape), (offset, nbytes) in zip(specs, sizes, strict=True)
        }
        self.size = start + position  # of the whole file
        self._header = (start - 8).to_bytes(8, "little") + text.ljust(start - 8)
        self._written_bytes = 0
        self._unwritten = set(self.records)

    def begin(self, blocks: BlockFile) -> None:
        """Write the header to a file of that size, and what follows to the same."""
        self._blocks = blocks
        for view in blocks.views(0, len(self._header)):
            view[:] = self._header[self._written_bytes : self._written_bytes + len(view)]
            self._written_bytes += len(view)

    def space(self, name: str) -> Iterator[memoryview]:
        """Yield the place of one tensor, a bounded piece at a time; fill each before the next is
        asked for. Bytes given before that could not be written are a `DiskError`."""
        assert name in self._unwritten, f"{name} is not announced, or was written before"
        record = self.records[name]
        with disk_errors(self.file):
            for view in self._blocks.views(record.offset, record.nbytes):
                yield view
                self._written_bytes += len(view)
                if self._progress is not None:
                    self._progress(self._written_bytes, self.size)
        self._unwritten.remove(name)

    def write(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Write the bytes of one tensor, C-contiguous and little-endian, at its place; a piece may
        be reused after. Bytes that could not be written are a `DiskError`."""
        targets = self.space(name)
        target = memoryview(b"")
        for piece in pieces:
            view = memoryview(piece)
            assert view.itemsize == 1, f"{name}: pieces are bytes, not items of {view.itemsize}"
            while view:
                target = target or next(targets, target)
                assert target, (
                    f"{name}: more bytes given than the {self.records[name].nbytes} announced"
                )
                count = min(len(target), len(view))
                target[:count] = view[:count]
                target = target[count:]
                view = view[count:]
        assert not target and next(targets, None) is None, (
            f"{name}: fewer bytes given than announced"
        )

    def finish(self) -> None:
        """Block until every byte is on the disk."""
        assert not self._unwritten, f"announced but never written: {sorted(self._unwritten)}"
        self._blocks.finish()


def read_into(record: TensorRecord, buffer: memoryview, start: int = 0) -> None:
    """Fill `buffer` with a tensor's bytes from its byte `start` on. `ReadError`: the file is
    gone, failing or cut.
    """
    try:
        with record.file.open("rb", buffering=0) as stream:
            stream.seek(record.offset + start)
            while buffer:
                count = stream.readinto(buffer)
                if not count:
                    what = (
                        f"{record.file.name} ended inside tensor {record.name!r}, at byte "
                        f"{stream.tell():,}"
                    )
                    how = "it was cut short after its header was read; download or save it again"
                    raise ReadError(what, where=str(record.file), how=how)
                buffer = buffer[count:]
    except OSError as error:
        what = (
            f"tensor {record.name!r}, {record.nbytes:,} bytes at {record.offset:,}, could not "
            "be read: "
        )
        what += str(error.strerror or error)
        how = "check that the file exists and its disk works"
        raise ReadError(what, where=str(record.file), how=how) from error


def read_pieces(record: TensorRecord) -> Iterator[memoryview]:
    """The bytes of a tensor, a bounded piece at a time; each piece is valid until the next is
    asked for.
    """
    buffer = memoryview(bytearray(min(PIECE_BYTES, record.nbytes)))
    for start in range(0, record.nbytes, PIECE_BYTES):
        piece = buffer[: record.nbytes - start]
        read_into(record, piece, start)
        yield piece
