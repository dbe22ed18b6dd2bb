"""The placement of a layer's tensors: where each lies in its file, and in the slot it is read into.

Bytes of a layer that follow each other in one file are one *run*, which keeps its offset modulo a
page, so that one read of whole pages puts every tensor where it belongs. A tensor whose bytes
cannot be used in place (another dtype than the model's, an offset that its dtype cannot be viewed
at) is read aside and cast, and so is a piece of an assembled tensor that does not keep its order. A
quantised parameter has its stored tensors in the slot, and a place in a second buffer, which it is
expanded into; so has a weight that is stored in a narrower type than it is computed with, where
that is asked for. With `shard_weights` a layer is cut into equal parts, one for each process; all
of them, one after the other, are the slot, with some padding at the end.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from lema.backend import SlotLayout, Span
from lema.errors import ConfigError
from lema.storage.header import TensorRecord
from lema.storage.quantized.records import CUT, NARROW, STORED, QuantizedRecord, Stored
from lema.storage.slices import AssembledRecord, Move, Piece
from lema.storage.verify import DTYPES
from lema.stream.slotlayout import SLOT_ALIGNMENT, VECTOR, Packed, identity_layout, lay_out, part_of

__all__ = ["DTYPES", "PAGE", "ByteRun", "LayerBytes", "lay_out_tensors", "part_bytes"]

T = TypeVar("T")
PAGE = 4096


@dataclass(frozen=True)
class SlotTensor:
    """A tensor in its slot: `offset` in bytes from the slot's start."""

    name: str
    offset: int
    dtype: torch.dtype
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the slot."""
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class ByteRun:
    """Bytes that follow each other in one file, and where the first of them goes in the slot."""

    file: Path
    offset: int
    nbytes: int
    slot_offset: int
    # The slot's pages that it begins and ends in hold no other tensor, so whole pages may be read
    # into them.
    alone: bool = True


@dataclass(frozen=True)
class Cast:
    """A tensor that is read aside, then cast into its place; or a piece of one, which is moved
    as well.
    """

    record: TensorRecord
    target: SlotTensor  # the place of the whole tensor
    # from the stored tensor to the place; None: the whole tensor, in its order
    move: Move | None = None

    def ranges(self) -> tuple[list[tuple[int, int]], Move | None]:
        """Return the `(offset, bytes)` of the file to read, and the move from these bytes, laid
        end to end.
        """
        if self.move is None:
            return [(self.record.offset, self.record.nbytes)], None
        return Piece(self.record, self.move).ranges()


@dataclass(frozen=True)
class Expansion:
    """A quantised parameter, or one that is stored in a narrower type than it computes with: its
    stored tensors in the slot, and the place of its expansion, in another buffer."""

    library: str  # whose format it is; `NARROW`: it is not quantised
    # what the library calls each stored tensor -> its place in the slot
    parts: Mapping[str, SlotTensor]
    about: Mapping[str, Any]  # the library's description of the parameter, besides its tensors
    target: SlotTensor  # the parameter's place in the buffer of expanded weights


@dataclass(frozen=True)
class LayerBytes:
    """One layer as bytes: its tensors' places, the runs to read, the casts to make, the slot it
    needs.
    """

    tensors: tuple[SlotTensor, ...]  # the parameters that are used where they lie in the slot
    runs: tuple[ByteRun, ...]  # what is read straight into the slot
    casts: tuple[Cast, ...]  # what is read aside, then cast into its place
    nbytes: int  # of the slot, and of the host buffer
    expansions: tuple[Expansion, ...] = ()  # the parameters that lie in the slot quantised
    # by which messages name a part of a layer; empty: it is a layer, and has its number
    name: str = ""

    def called(self, number: int) -> str:
        """Return how messages name what is leased by this number."""
        return self.name or f"layer {number}"

    @property
    def expanded_bytes(self) -> int:
        """Bytes of the device buffer that quantised weights are expanded into; 0: none is
        quantised.
        """
        weight_bytes = max(
            (_round_up(e.target.offset + e.target.nbytes) for e in self.expansions), default=0
        )
        return weight_bytes + self.scratch_bytes

    @property
    def scratch_bytes(self) -> int:
        """Bytes at the end of that buffer, in which a weight is whole before a part of it is
        taken.
        """
        cut = ((e.about[CUT][2], e.target.dtype) for e in self.expansions if CUT in e.about)
        return max((_round_up(prod(shape) * dtype.itemsize) for shape, dtype in cut), default=0)

    @property
    def upload_bytes(self) -> int:
        """Bytes that are copied to the slot of a device with memory of its own."""
        return slot_layout(self).copied

    @property
    def read_bytes(self) -> int:
        """Bytes that are read from disk for one lease of this layer."""
        aside = sum(nbytes for cast in self.casts for _, nbytes in cast.ranges()[0])
        return sum(run.nbytes for run in self.runs) + aside


def slot_layout(layer: LayerBytes) -> SlotLayout:
    """Return where a layer's bytes go in a slot of a device with memory of its own: weights begin
    at multiples of `SLOT_ALIGNMENT`, parts of quantised ones at multiples of `VECTOR`. Of a layer
    without tensors, all as it is."""
    packed = [Packed(tensor.offset, tensor.nbytes) for tensor in layer.tensors]
    packed += [
        Packed(part.offset, part.nbytes, VECTOR)
        for expansion in layer.expansions
        for part in expansion.parts.values()
    ]
    return lay_out(packed) if packed else identity_layout(0, layer.nbytes)


def in_slot(layer: LayerBytes, layout: SlotLayout) -> LayerBytes:
    """Return a layer whose tensors lie in their slot where a layout puts them; what is read, and
    to where, stays.
    """
    starts = [span.start for span in layout.spans]

    def laid(tensor: SlotTensor) -> SlotTensor:
        # The last span that begins there or before: one that is empty may begin where another does.
        span = layout.spans[bisect_right(starts, tensor.offset) - 1]
        return replace(tensor, offset=span.slot + tensor.offset - span.start)

    return replace(
        layer,
        tensors=tuple(map(laid, layer.tensors)),
        expansions=tuple(
            replace(expansion, parts={name: laid(part) for name, part in expansion.parts.items()})
            for expansion in layer.expansions
        ),
    )


def vector_aligned(layer: LayerBytes) -> LayerBytes:
    """Return a layer for an accelerator that computes in host memory: what is read goes to
    multiples of `VECTOR`, and then not by whole pages, unless the file has all tensors at such
    places already."""
    packed = [Packed(tensor.offset, tensor.nbytes, VECTOR) for tensor in _slot_tensors(layer)]
    if not any(tensor.start % VECTOR for tensor in packed):
        return layer
    layout = lay_out(packed)
    runs = [
        replace(
            run,
            offset=run.offset + first - run.slot_offset,
            nbytes=last - first,
            slot_offset=at + first,
        )
        for run in layer.runs
        for span in layout.spans
        for first, last, at in [_shared(run, span)]
        if first < last
    ]
    moved = in_slot(
        replace(layer, tensors=tuple(cast.target for cast in layer.casts), expansions=()), layout
    )
    casts = [
        replace(cast, target=target)
        for cast, target in zip(layer.casts, moved.tensors, strict=True)
    ]
    nbytes = max(layer.nbytes, _round_up(layout.nbytes))
    return replace(in_slot(layer, layout), runs=tuple(runs), casts=tuple(casts), nbytes=nbytes)


def _shared(run: ByteRun, span: Span) -> tuple[int, int, int]:
    """Return the bytes of a run that are in a span, by their places in the host buffer, and how
    far those move.
    """
    first = max(run.slot_offset, span.start)
    return (
        first,
        min(run.slot_offset + run.nbytes, span.start + span.nbytes),
        span.slot - span.start,
    )


def _slot_tensors(layer: LayerBytes) -> list[SlotTensor]:
    return [
        *layer.tensors,
        *(part for expansion in layer.expansions for part in expansion.parts.values()),
    ]


def misaligned(layer: LayerBytes) -> str | None:
    """Name a weight that a kernel of a device with memory of its own could refuse where it lies in
    the slot, or in the buffer of expanded weights; None: there is none."""
    requirements = [(tensor, SLOT_ALIGNMENT) for tensor in layer.tensors]
    requirements += [(expansion.target, SLOT_ALIGNMENT) for expansion in layer.expansions]
    requirements += [
        (part, VECTOR) for expansion in layer.expansions for part in expansion.parts.values()
    ]
    return next(
        (tensor.name for tensor, alignment in requirements if tensor.offset % alignment), None
    )


def lay_out_tensors(
    tensors: Mapping[str, tuple[Stored, torch.dtype]], *, narrow: bool = False
) -> LayerBytes:
    """Lay out a layer: parameter name -> (where it is on disk, the dtype the model wants it in).
    `narrow`: what is stored in a narrower floating type lies in the slot as it is stored, and is
    widened by an expansion."""
    plain: dict[str, tuple[TensorRecord | AssembledRecord, torch.dtype]] = {}
    quantized: dict[str, tuple[QuantizedRecord, torch.dtype]] = {}
    for name, (record, dtype) in tensors.items():
        if isinstance(record, QuantizedRecord):
            quantized[name] = (record, dtype)
        elif (
            narrow
            and (stored := DTYPES[record.dtype]).is_floating_point
            and stored.itemsize < dtype.itemsize
        ):
            quantized[name] = (
                QuantizedRecord(name, NARROW, {STORED: record}, record.shape, {}),
                dtype,
            )
        else:
            plain[name] = (record, dtype)
    parts = {
        f"{name}: {part}": (stored, DTYPES[stored.dtype])
        for name, (record, _) in quantized.items()
        for part, stored in record.parts.items()
    }
    # The parts of quantised weights are placed like any tensor, because they too are read straight
    # into the slot.
    slot_tensors, runs, casts, end = _lay_out_plain(plain | parts)
    expansions = []
    size = 0
    for name, (record, dtype) in quantized.items():
        part_tensors = {part: slot_tensors[f"{name}: {part}"] for part in record.parts}
        expanded = SlotTensor(
            name, _round_up(size, SLOT_ALIGNMENT), dtype, torch.Size(record.shape)
        )
        expansions.append(Expansion(record.library, part_tensors, record.about, expanded))
        size = expanded.offset + expanded.nbytes
    layer = LayerBytes(
        tuple(slot_tensors[name] for name in plain), runs, casts, end, tuple(expansions)
    )
    # One number of bytes for host buffer and slot: in the slot, pages are not kept, but many small
    # tensors may have more padding between them.
    return replace(layer, nbytes=max(end, _round_up(slot_layout(layer).nbytes)))


def _lay_out_plain(
    tensors: Mapping[str, tuple[TensorRecord | AssembledRecord, torch.dtype]],
) -> tuple[dict[str, SlotTensor], tuple[ByteRun, ...], tuple[Cast, ...], int]:
    """Return each tensor's place, the runs and casts that fill them, and the bytes of the slot."""
    slot_tensors: dict[str, SlotTensor] = {}
    runs: list[ByteRun] = []
    casts: list[Cast] = []
    end = 0
    direct = {
        name: record
        for name, (record, dtype) in tensors.items()
        if isinstance(record, TensorRecord)
        and DTYPES[record.dtype] == dtype
        and record.offset % dtype.itemsize == 0
    }
    ordered = sorted(direct.items(), key=lambda item: (str(item[1].file), item[1].offset))
    for group in grouped(ordered, _follows):
        first = group[0][1]
        last = group[-1][1]
        # As far into its page as it lies in the file's, because reads past the page cache copy
        # whole aligned pages.
        start = _round_up(end) + first.offset % PAGE
        runs.append(
            ByteRun(first.file, first.offset, last.offset + last.nbytes - first.offset, start)
        )
        for name, plain in group:
            slot_tensors[name] = SlotTensor(
                name, start + plain.offset - first.offset, tensors[name][1], torch.Size(plain.shape)
            )
        end = start + runs[-1].nbytes
    for name, (record, dtype) in tensors.items():
        if name in direct:
            continue
        begin = _round_up(end)
        if isinstance(record, AssembledRecord):
            slot_tensors[name] = SlotTensor(
                name, begin + _lead(record, dtype), dtype, torch.Size(record.shape)
            )
            of_pieces, moved_pieces = _assemble(record, slot_tensors[name])
            runs += of_pieces
            casts += moved_pieces
        else:
            slot_tensors[name] = SlotTensor(name, begin, dtype, torch.Size(record.shape))
            casts.append(Cast(record, slot_tensors[name]))
        end = slot_tensors[name].offset + slot_tensors[name].nbytes
    return slot_tensors, tuple(runs), tuple(casts), _round_up(end)


def _follows(group: Sequence[tuple[str, TensorRecord]], item: tuple[str, TensorRecord]) -> bool:
    last = group[-1][1]
    return (item[1].file, item[1].offset) == (last.file, last.offset + last.nbytes)


def _lead(record: AssembledRecord, dtype: torch.dtype) -> int:
    """Return how far into its page an assembled tensor begins, so that its first piece is as far as
    in its file. Pieces are commonly whole pages long, and then the others lie as they do in the
    file, too. Where it would begin at an odd address it begins a page, because the last bit of a
    product may depend on the address, and `from_pretrained` assembles in memory that is aligned."""
    width = dtype.itemsize
    lead = next(
        (
            (piece.record.offset + (piece.move.read - piece.move.write) * width) % PAGE
            for piece in record.pieces
        ),
        0,
    )
    return lead if DTYPES[record.dtype] == dtype and lead % VECTOR == 0 else 0


def _assemble(record: AssembledRecord, target: SlotTensor) -> tuple[list[ByteRun], list[Cast]]:
    """Return the runs and casts that fill an assembled tensor; pieces that follow each other
    twice over are one run.
    """
    runs: list[ByteRun] = []
    casts: list[Cast] = []
    width = target.dtype.itemsize
    for piece in sorted(record.pieces, key=lambda piece: piece.move.write):
        move = piece.move
        if DTYPES[piece.record.dtype] != target.dtype or not move.is_contiguous:
            casts.append(Cast(piece.record, target, move))
            continue
        start = piece.record.offset + move.read * width
        run = ByteRun(
            piece.record.file,
            start,
            move.count * width,
            target.offset + move.write * width,
            alone=False,
        )
        last = runs[-1] if runs else run
        last_end = (last.file, last.offset + last.nbytes, last.slot_offset + last.nbytes)
        if runs and last_end == (run.file, run.offset, run.slot_offset):
            runs[-1] = replace(runs[-1], nbytes=runs[-1].nbytes + run.nbytes)
        else:
            runs.append(run)
    return runs, casts


def extent(layer: LayerBytes) -> tuple[int, int]:
    """Return where in its slot a layer's first tensor begins, and where its last ends."""
    tensors = _slot_tensors(layer)
    stops = (tensor.offset + tensor.nbytes for tensor in tensors)
    return min((tensor.offset for tensor in tensors), default=0), max(stops, default=0)


def views(slot: Tensor, layer: LayerBytes, expanded: Tensor | None = None) -> dict[str, Tensor]:
    """Return the layer's tensors as views of `slot`, uint8 `[at least layer.nbytes]`; expanded
    ones, of `expanded`.
    """
    weights = {tensor.name: view(slot, tensor) for tensor in layer.tensors}
    return (
        weights
        if expanded is None
        else weights | {e.target.name: view(expanded, e.target) for e in layer.expansions}
    )


def view(buffer: Tensor, tensor: SlotTensor) -> Tensor:
    """Return one tensor as a view of the buffer, uint8, that it is placed in."""
    return (
        buffer[tensor.offset : tensor.offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    )


def grouped(items: Iterable[T], continues: Callable[[Sequence[T], T], bool]) -> Iterator[list[T]]:
    """Yield lists of neighbours: an item that `continues` the list before it is in that, another
    begins one.
    """
    group: list[T] = []
    for item in items:
        if group and not continues(group, item):
            yield group
            group = []
        group.append(item)
    if group:
        yield group


def _round_up(nbytes: int, to: int = PAGE) -> int:
    return -(-nbytes // to) * to


def part_bytes(nbytes: int, size: int) -> int:
    """Return the bytes of each of `size` parts of a slot of `nbytes`: whole pages, so that reads
    stay aligned.
    """
    return -(-nbytes // (size * PAGE)) * PAGE


def rank_share(layer: LayerBytes, rank: int, size: int) -> LayerBytes:
    """Return the share of a layer that process `rank` of `size` reads, as bytes in a slot of their
    own. It has no tensors, because there are none before all shares are together. Bytes beyond the
    layer's end are not read."""
    nbytes = part_bytes(layer.nbytes, size)
    return _share(layer, rank * nbytes, (rank + 1) * nbytes, nbytes)


def slot_share(
    layer: LayerBytes, layout: SlotLayout, rank: int, size: int
) -> tuple[LayerBytes, SlotLayout]:
    """Return the same where slots have a layout of their own: the parts of all processes, one after
    the other, are the slot as that lays it out. Returns the layout of this process's part, from its
    host buffer, too."""
    nbytes = part_bytes(layer.nbytes, size)
    begin, end, part = part_of(layout, rank * nbytes, (rank + 1) * nbytes)
    origin = begin // PAGE * PAGE
    share = _share(layer, begin, end, max(nbytes, _round_up(end - origin)))
    spans = tuple(replace(span, start=span.start - origin) for span in part.spans)
    return share, replace(part, spans=spans)


def _share(layer: LayerBytes, begin: int, end: int, nbytes: int) -> LayerBytes:
    """Return what is read of a layer's slot from byte `begin` to `end`, into a buffer that
    begins with their page.
    """
    return LayerBytes(
        (),
        tuple(_runs(layer, begin, end)),
        tuple(_casts(layer, begin, end)),
        nbytes,
        name=layer.name,
    )


def _runs(layer: LayerBytes, begin: int, end: int) -> Iterator[ByteRun]:
    origin = begin // PAGE * PAGE
    for run in layer.runs:
        first = max(run.slot_offset, begin)
        last = min(run.slot_offset + run.nbytes, end)
        if first < last:
            yield replace(
                run,
                offset=run.offset + first - run.slot_offset,
                nbytes=last - first,
                slot_offset=first - origin,
            )


def _casts(layer: LayerBytes, begin: int, end: int) -> Iterator[Cast]:
    """Cut tensors that are cast between elements: they begin at a multiple of `SLOT_ALIGNMENT` in
    the slot, which holds whole elements, and so does a page. `ConfigError`: a tensor is put
    together from pieces that change their order or their type."""
    origin = begin // PAGE * PAGE
    for cast in layer.casts:
        record = cast.record
        target = cast.target
        if cast.move is not None:
            what = (
                f"{record.name} is rearranged when it is read, so it cannot be divided among "
                "processes"
            )
            how = (
                "convert once with `lema prepare MODEL OUT` and use OUT, or set shard_weights "
                "to false"
            )
            raise ConfigError(what, where="shard_weights", how=how)
        first = max(target.offset, begin)
        last = min(target.offset + target.nbytes, end)
        if first >= last:
            continue
        skipped = (first - target.offset) // target.dtype.itemsize
        count = (last - first) // target.dtype.itemsize
        width = record.nbytes // target.shape.numel()  # of one element on disk
        stored = replace(
            record, offset=record.offset + skipped * width, nbytes=count * width, shape=(count,)
        )
        yield Cast(stored, replace(target, offset=first - origin, shape=torch.Size((count,))))
