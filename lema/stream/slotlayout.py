"""The layout of a layer in the slot of a device with memory of its own: every weight at an aligned
address.

In its host buffer a tensor lies as far into a page as in its file, so that whole pages are read to
where they belong, and a file may begin it anywhere. Kernels ask for more: `grouped_mm` refuses an
address that is no multiple of 16, and matrix products are slower there. The copy to the device
costs the same wherever it goes, so it puts the bytes right.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from lema.backend import DeviceSlots, SlotLayout, Span, Upload

__all__ = [
    "SLOT_ALIGNMENT",
    "VECTOR",
    "Packed",
    "identity_layout",
    "lay_out",
    "part_of",
    "upload_to",
]

SLOT_ALIGNMENT = 256  # bytes; what memory of a tensor of its own begins at on most devices
VECTOR = 16  # bytes that kernels load at once: no address of theirs may be less aligned
# bytes between two tensors that are copied along, because a copy of their own would cost more
GAP = 2 * 4096


@dataclass(frozen=True)
class Packed:
    """Bytes of a host buffer that the device needs, and of what their address in the slot has to
    be a multiple.
    """

    start: int
    nbytes: int
    alignment: int = SLOT_ALIGNMENT


def lay_out(packed: Iterable[Packed]) -> SlotLayout:
    """Return where tensors of a host buffer go in a slot.

    Neighbours that are aligned relative to each other go together. So a layer whose tensors all
    begin at aligned places of one file is one copy, wherever in a page that file begins it.

    Args:
        packed: the tensors, in any order; none overlap.
    """
    spans: list[Span] = []
    end = 0  # of what is in the slot so far
    for tensor in sorted(packed, key=lambda tensor: (tensor.start, tensor.nbytes)):
        if spans:
            last = spans[-1]
            shift = tensor.start - last.start
            gap = shift - last.nbytes
            if 0 <= gap <= GAP and (last.slot + shift) % tensor.alignment == 0:
                spans[-1] = Span(last.start, shift + tensor.nbytes, last.slot)
                end = spans[-1].slot + spans[-1].nbytes
                continue
        slot = -(-end // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        spans.append(Span(tensor.start, tensor.nbytes, slot))
        end = slot + tensor.nbytes
    return SlotLayout(end, tuple(spans))


def identity_layout(start: int, end: int) -> SlotLayout:
    """Return the layout of bytes that go into the slot as they are."""
    return SlotLayout(end - start, (Span(start, end - start, 0),))


def part_of(layout: SlotLayout, begin: int, end: int) -> tuple[int, int, SlotLayout]:
    """Return one process's part of a slot, from byte `begin` to byte `end`.

    Spans come in the order of the host buffer, so the part needs bytes of it that follow each
    other.

    Returns:
        The first byte of the host buffer that the part needs, the one after the last, and the
        layout of the part: its spans begin in the host buffer where those of `layout` do.
    """
    spans = []
    for span in layout.spans:
        first = max(span.slot, begin)
        last = min(span.slot + span.nbytes, end)
        if first < last:
            spans.append(Span(span.start + first - span.slot, last - first, first - begin))
    if not spans:
        return 0, 0, SlotLayout(end - begin, ())
    return spans[0].start, spans[-1].start + spans[-1].nbytes, SlotLayout(end - begin, tuple(spans))


def upload_to(slots: DeviceSlots, source: Tensor, layout: SlotLayout) -> Upload:
    """Start copying what a layout says of a host buffer into the next free slot, in one copy
    where it is one.
    """
    if len(layout.spans) == 1:
        span = layout.spans[0]
        if span.slot == 0 and span.nbytes == layout.nbytes:
            return slots.upload(source[span.start : span.start + span.nbytes])
    return slots.upload(source, layout)
