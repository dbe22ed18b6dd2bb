"""A slice of a stored tensor: ranges along one of its axes, read one after the other without the bytes between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from lema.storage.header import DTYPE_BITS, TensorRecord

__all__ = ["PartRecord", "part_of", "pieces_of"]


@dataclass(frozen=True)
class PartRecord:
    """What one process of several uses of a stored tensor.

    Attributes:
        whole: the tensor.
        axis: of its shape.
        ranges: along it, `(start, stop)` each, in the order in which they lie in the part.
    """

    whole: TensorRecord
    axis: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.whole.name

    @property
    def file(self) -> Path:
        """The file it lies in."""
        return self.whole.file

    @property
    def dtype(self) -> str:
        """Its type on disk."""
        return self.whole.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        before, after = self.whole.shape[: self.axis], self.whole.shape[self.axis + 1 :]
        return (*before, sum(stop - start for start, stop in self.ranges), *after)

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return prod(self.shape) * DTYPE_BITS[self.dtype] // 8

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Yield `(offset in the file, bytes)` of each piece, in the order of the part; neighbours are one."""
        begin = size = 0
        for offset, nbytes in self._each():
            if size and offset == begin + size:
                size += nbytes
                continue
            if size:
                yield begin, size
            begin, size = offset, nbytes
        if size:
            yield begin, size

    def _each(self) -> Iterator[tuple[int, int]]:
        shape = self.whole.shape
        inner = prod(shape[self.axis + 1 :]) * DTYPE_BITS[self.dtype] // 8
        for outer in range(prod(shape[: self.axis])):
            for start, stop in self.ranges:
                yield self.whole.offset + (outer * shape[self.axis] + start) * inner, (stop - start) * inner


def part_of(record: TensorRecord, axis: int, ranges: Sequence[tuple[int, int]]) -> TensorRecord | PartRecord:
    """Return ranges of a stored tensor along an axis as a record: a plain one where its bytes follow each other."""
    part = PartRecord(record, axis, tuple(ranges))
    pieces = part.pieces()
    first = next(pieces, None)
    if first is None or next(pieces, None) is not None:
        return part
    return replace(record, offset=first[0], nbytes=first[1], shape=part.shape)


def pieces_of(record: TensorRecord | PartRecord) -> Iterator[tuple[int, int]]:
    """Yield `(offset in the file, bytes)` of each piece that a record is read in."""
    if isinstance(record, PartRecord):
        yield from record.pieces()
    else:
        yield record.offset, record.nbytes
