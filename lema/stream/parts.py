"""A layer cut into equal parts, one for each process: what of its bytes a process reads, keeps and uploads.

The parts of all processes, one behind the other, are the layer's slot as `lema.stream.placement` lays it out, with some
padding at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from lema.header import TensorRecord
from lema.stream.placement import PAGE, Cast, LayerBytes, Run

__all__ = ["part_bytes", "part_of"]


def part_bytes(nbytes: int, size: int) -> int:
    """Return the bytes of each of `size` parts of a slot of `nbytes`: whole pages, so that reads stay aligned."""
    return -(-nbytes // (size * PAGE)) * PAGE


def part_of(layer: LayerBytes, rank: int, size: int) -> LayerBytes:
    """Return process `rank`'s part of a layer: bytes to read into a slot of their own, tensors only once whole.

    What lies beyond the layer's end, in the last parts, is read by nobody and looked at by nobody.
    """
    nbytes = part_bytes(layer.nbytes, size)
    begin, end = rank * nbytes, (rank + 1) * nbytes
    return LayerBytes((), tuple(_runs(layer, begin, end)), tuple(_casts(layer, begin, end)), nbytes)


def _runs(layer: LayerBytes, begin: int, end: int) -> Iterator[Run]:
    for run in layer.runs:
        first, last = max(run.slot_offset, begin), min(run.slot_offset + run.nbytes, end)
        if first < last:
            yield Run(run.file, run.offset + first - run.slot_offset, last - first, first - begin)


def _casts(layer: LayerBytes, begin: int, end: int) -> Iterator[Cast]:
    """Cut tensors that are cast between elements: they begin at a page, and a page holds whole elements."""
    for cast in layer.casts:
        record, placed = cast.record, cast.placed
        assert isinstance(record, TensorRecord), "a layer is cut in one way only"
        first, last = max(placed.offset, begin), min(placed.offset + placed.nbytes, end)
        if first >= last:
            continue
        skipped, count = (first - placed.offset) // placed.dtype.itemsize, (last - first) // placed.dtype.itemsize
        width = record.nbytes // placed.shape.numel()  # of one element on disk
        stored = replace(record, offset=record.offset + skipped * width, nbytes=count * width, shape=(count,))
        yield Cast(stored, replace(placed, offset=first - begin, shape=torch.Size((count,))))
