"""A tensor put together from parts of stored tensors: experts stored one by one and stacked in
memory, or a slice.

Such a tensor is a list of pieces. A piece moves elements of one stored tensor to places of the
assembled one, without arithmetic. Where both lie side by side, a piece is one range of bytes of a
file, which is read straight to its place.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod
from pathlib import Path

from lema.storage.header import DTYPE_BITS, TensorRecord

# bytes; shorter ranges, as many as elements, are read together with the bytes between them
LEAST_READ = 8


@dataclass(frozen=True, slots=True)
class Move:
    """Elements of one flat array that go to places of another; every number counts elements."""

    read: int  # where the first is read
    write: int  # where it goes
    # size, read stride and write stride of each, the outermost first
    dims: tuple[tuple[int, int, int], ...]

    @property
    def count(self) -> int:
        """How many elements go."""
        return prod(size for size, _, _ in self.dims)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie side by side, in the same order, in both arrays."""
        return not self.dims or (len(self.dims) == 1 and self.dims[0][1:] == (1, 1))

    def joined(self) -> "Move":
        """Return the same move in as few dimensions as can be."""
        dims: list[tuple[int, int, int]] = []
        for size, read, write in self.dims:
            if size == 1:
                continue
            if dims and dims[-1][1:] == (size * read, size * write):
                dims[-1] = (dims[-1][0] * size, read, write)
            else:
                dims.append((size, read, write))
        return Move(self.read, self.write, tuple(dims))


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a stored tensor, and the places in the assembled tensor that it goes to."""

    record: TensorRecord
    move: Move

    def ranges(self) -> tuple[list[tuple[int, int]], Move]:
        """Return the `(offset, bytes)` of the file to read, and the move from these bytes, laid
        end to end.
        """
        width = DTYPE_BITS[self.record.dtype] // 8
        dims = sorted(self.move.dims, key=lambda dim: -dim[1])
        block = 1
        outer = len(dims)
        while outer and dims[outer - 1][1] == block:
            outer -= 1
            block *= dims[outer][0]
        begin = self.record.offset + self.move.read * width
        if block * width < LEAST_READ:
            span = 1 + sum((size - 1) * read for size, read, _ in dims)
            return [(begin, span * width)], replace(self.move, read=0)
        steps = product(*(range(0, size * read, read) for size, read, _ in dims[:outer]))
        strides = contiguous([size for size, _, _ in dims])
        packed = tuple(
            (size, stride, write) for (size, _, write), stride in zip(dims, strides, strict=True)
        )
        ranges: list[tuple[int, int]] = []
        for step in steps:
            offset = begin + sum(step) * width
            if ranges and sum(ranges[-1]) == offset:
                ranges[-1] = (ranges[-1][0], ranges[-1][1] + block * width)
            else:
                ranges.append((offset, block * width))
        return ranges, Move(0, self.move.write, packed)


@dataclass(frozen=True)
class AssembledRecord:
    """One tensor that several stored tensors, or parts of them, make together."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]  # which fill every element once; all are stored as the same type

    @property
    def file(self) -> Path:
        """The file of its first piece."""
        return self.pieces[0].record.file

    @property
    def dtype(self) -> str:
        """The type on disk."""
        return self.pieces[0].record.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the assembled tensor, as its type on disk."""
        return prod(self.shape) * DTYPE_BITS[self.dtype] // 8

    @cached_property
    def boxes(self) -> list[tuple[list[int], list[tuple[int, int, int, int]]]]:
        """The first index of each piece along each axis, and its dimensions: size, axis, step, and
        stride in the file. `ValueError`: a piece does not lie along the axes."""
        inverse_moves = (
            Move(
                piece.move.write,
                piece.move.read,
                tuple((size, write, read) for size, read, write in piece.move.dims),
            )
            for piece in self.pieces
        )
        return [_along_axes(move, self.shape) for move in inverse_moves]


def part_of(
    record: TensorRecord | AssembledRecord, axis: int, ranges: Sequence[tuple[int, int]]
) -> TensorRecord | AssembledRecord:
    """Return ranges of a tensor along an axis as a record: a plain one where its bytes follow each
    other in one file. `ValueError`: a piece that the tensor is put together from does not lie along
    its axes."""
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        elif start < stop:
            joined.append((start, stop))
    length = sum(stop - start for start, stop in ranges)
    shape = (*record.shape[:axis], length, *record.shape[axis + 1 :])
    if isinstance(record, TensorRecord):
        if not joined:
            return replace(record, nbytes=0, shape=shape)
        record = AssembledRecord(
            record.name, record.shape, (Piece(record, Move(0, 0, ((prod(record.shape), 1, 1),))),)
        )
    strides = contiguous(shape)
    pieces = []
    done = 0
    for start, stop in joined:
        for piece, (low, dims) in zip(record.pieces, record.boxes, strict=True):
            move = _cut(piece.move.read, low, dims, axis, (start, stop), strides, done)
            pieces += [] if move is None else [Piece(piece.record, move.joined())]
        done += stop - start
    return simplest(record.name, shape, tuple(pieces))


def rows_of(
    record: TensorRecord | AssembledRecord, first: int, end: int
) -> TensorRecord | AssembledRecord:
    """Return the rows `first` to `end - 1` of a tensor, as `part_of` does."""
    return part_of(record, 0, [(first, end)])


def _cut(
    read: int,
    low: Sequence[int],
    dims: Sequence[tuple[int, int, int, int]],
    axis: int,
    span: tuple[int, int],
    strides: Sequence[int],
    done: int,
) -> Move | None:
    """Return the part of a piece whose index along an axis is in a span; it goes to the index
    `done` there, in an array with these strides. None: the piece has no part in it."""
    along = [dim for dim in dims if dim[1] == axis]
    if len(along) > 1:
        raise ValueError("two dimensions of a piece run along one axis")
    first = low[axis]
    cut_dims = [
        (size, by, step * strides[dim_axis])
        for size, dim_axis, step, by in dims
        if dim_axis != axis
    ]
    if along:
        size, _, step, by = along[0]
        begin = max(0, -(-(span[0] - first) // step))
        end = min(size, -(-(span[1] - first) // step))
        if begin >= end:
            return None
        cut_dims.append((end - begin, by, step * strides[axis]))
        first = first + begin * step
        read = read + begin * by
    elif not span[0] <= first < span[1]:
        return None
    index = (*low[:axis], first - span[0] + done, *low[axis + 1 :])
    write = sum(coordinate * stride for coordinate, stride in zip(index, strides, strict=True))
    return Move(read, write, tuple(sorted(cut_dims, key=lambda dim: -dim[1])))


def simplest(
    name: str, shape: tuple[int, ...], pieces: tuple[Piece, ...]
) -> TensorRecord | AssembledRecord:
    """Return what pieces make: a plain record where they are one range of bytes."""
    if len(pieces) != 1 or not pieces[0].move.is_contiguous:
        return AssembledRecord(name, shape, pieces)
    record = pieces[0].record
    width = DTYPE_BITS[pieces[0].record.dtype] // 8
    begin = record.offset + pieces[0].move.read * width
    return replace(record, offset=begin, nbytes=prod(shape) * width, shape=shape)


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows of a table that lie side by side in one file."""

    first: int  # the number in the table of the first of them
    record: TensorRecord  # the stored tensor they are rows of
    offset: int  # where in the file the first begins


def row_ranges(record: TensorRecord | AssembledRecord) -> list[RowRange] | None:
    """Return where the rows of a table `[rows, width]` are, from the first on; None: some row is
    in several places.
    """
    if isinstance(record, TensorRecord):
        return [RowRange(0, record, record.offset)]
    row = prod(record.shape[1:])
    width = DTYPE_BITS[record.dtype] // 8
    ranges = []
    for piece in sorted(record.pieces, key=lambda piece: piece.move.write):
        move = piece.move.joined()
        if not move.is_contiguous or move.write % row or move.count % row:
            return None
        ranges.append(
            RowRange(move.write // row, piece.record, piece.record.offset + move.read * width)
        )
    return ranges


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a contiguous array that was filled from another array."""

    source: int  # the number of the other array
    low: tuple[int, ...]  # the first index along each axis
    size: tuple[int, ...]  # of the box along each axis
    read: int  # where its first element came from in the source
    strides: tuple[int, ...]  # elements of the source from one index to the next, along each axis


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous array."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def follow(move: Move, shape: Sequence[int], boxes: Iterable[Box]) -> Iterator[tuple[int, Move]]:
    """Follow a move that reads an array back to where that array's elements, which fill `boxes` of
    it, had come from. Yield the number of a source, and the move from there. The array is
    contiguous, and `shape` is its own. `ValueError`: the elements cannot be cut along the edges of
    the boxes."""
    base, dims = _along_axes(move, shape)
    for box in boxes:
        if (source_move := _within(move.write, base, dims, box, shape)) is not None:
            yield box.source, source_move.joined()


def _along_axes(
    move: Move, shape: Sequence[int]
) -> tuple[list[int], list[tuple[int, int, int, int]]]:
    """Write what a move reads as an index along each axis, and dimensions `(size, axis, step,
    write stride)`.
    """
    strides = contiguous(shape)
    base = [move.read // stride % size for stride, size in zip(strides, shape, strict=True)]
    axis_dims: list[tuple[int, int, int, int]] = []
    waiting = list(move.dims)
    while waiting:
        size, read, write = waiting.pop()
        if size == 1:
            continue
        axis = next(
            (axis for axis, stride in enumerate(strides) if shape[axis] > 1 and stride <= read),
            None,
        )
        if axis is None or read % strides[axis]:
            raise ValueError("a dimension runs across the axes of the array")
        step = read // strides[axis]
        if base[axis] + (size - 1) * step < shape[axis]:
            axis_dims.append((size, axis, step, write))
            continue
        period = shape[axis] // step  # steps until the next axis moves on
        if shape[axis] % step or size % period or base[axis] or period == 1:
            raise ValueError("a dimension leaves its axis in the middle")
        waiting += [(size // period, read * period, write * period), (period, read, write)]
    return base, sorted(axis_dims, key=lambda dim: -dim[3])


def _within(
    write: int,
    base: list[int],
    dims: list[tuple[int, int, int, int]],
    box: Box,
    shape: Sequence[int],
) -> Move | None:
    """Return the part of a move that reads from a box, as a move from the box's source; None: no
    part does.
    """
    read = box.read
    clipped = list(dims)
    for axis, low in enumerate(box.low):
        high = low + box.size[axis] - 1
        first = base[axis]
        moving = [number for number, dim in enumerate(dims) if dim[1] == axis]
        if not moving:
            if not low <= first <= high:
                return None
        elif box.size[axis] < shape[axis]:
            if len(moving) > 1:
                raise ValueError("an axis that two dimensions run along is filled in parts")
            size, _, step, target = dims[moving[0]]
            begin = max(0, -(-(low - first) // step))
            end = min(size - 1, (high - first) // step)
            if begin > end:
                return None
            clipped[moving[0]] = (end - begin + 1, axis, step, target)
            write = write + begin * target
            first = first + begin * step
        read += (first - low) * box.strides[axis]
    return Move(
        read,
        write,
        tuple((size, step * box.strides[axis], target) for size, axis, step, target in clipped),
    )
