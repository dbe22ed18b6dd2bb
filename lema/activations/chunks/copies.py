"""Copies of chunks between a hidden state in host memory and the device.

The copy of a chunk to the device is queued before the compute of the chunk in front of it, and
that of a result to host memory behind the compute that makes it, so both go on beside compute. A
device that computes in host memory copies nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lema.activations.boundaries import view_like
from lema.activations.chunks.cuts import Cut
from lema.backend import Carrier, DeviceSlots, Download, SlotLayout, Span, Upload

__all__ = [
    "NUM_LEAVING",
    "NUM_SLOTS",
    "ChunkDownloads",
    "ChunkUploads",
    "ResidentChunks",
    "chunks_on_device",
]

NUM_SLOTS = 2  # chunks of a hidden state on the device: one in use, and the next on its way
NUM_LEAVING = 2  # results that the device holds until their copy to host memory has ended


class ResidentChunks:
    """The chunks of a hidden state that is on the device, or in memory in which it computes.

    Args:
        state: `[rows, sequence, hidden]`.
        cuts: the chunks.
        device: where they are wanted.
    """

    def __init__(self, state: Tensor, cuts: Sequence[Cut], device: torch.device) -> None:
        self._state = state
        self._cuts = cuts
        self._device = device

    @contextmanager
    def chunk(self, number: int) -> Iterator[Tensor]:
        """Yield a chunk; see `ChunkInputs`."""
        yield self._cuts[number].of(self._state).to(self._device)


class ChunkUploads:
    """The chunks of a hidden state in host memory, each on the device while it is computed with.

    Args:
        slots: on the device, each for the largest chunk; they are free.
        state: `[rows, sequence, hidden]`, contiguous in host memory.
        cuts: its chunks.
        order: the numbers of the chunks, as they will be asked for.
        note: is given each copy, before which the host must not write to the state.
    """

    def __init__(
        self,
        slots: Sequence[DeviceSlots],
        state: Tensor,
        cuts: Sequence[Cut],
        order: Iterable[int],
        note: Callable[[Callable[[], None]], None],
    ) -> None:
        assert state.is_contiguous(), "a hidden state in host memory has holes"
        self._free = deque(slots)
        self._state = state
        self._bytes = state.detach().view(-1).view(torch.uint8)
        self._cuts = cuts
        self._order = deque(order)
        self._note = note
        self._coming: deque[tuple[int, DeviceSlots, Upload]] = deque()

    @contextmanager
    def chunk(self, number: int) -> Iterator[Tensor]:
        """Yield a chunk; see `ChunkInputs`. The copy of the next one has been queued then."""
        if not self._coming:
            self._begin()
        expected, slot, upload = self._coming.popleft()
        assert expected == number, "chunks were asked for in another order than was announced"
        try:
            memory = upload.wait()
            if self._order:
                self._begin()
            yield view_like(memory, self._cuts[number].like(self._state))
        finally:
            upload.release()
            self._free.append(slot)

    def end(self) -> Iterable[DeviceSlots]:
        """Return the slots, which are free: what is still on its way is given up."""
        while self._coming:
            _, slot, upload = self._coming.popleft()
            upload.release()
            self._free.append(slot)
        return self._free

    def _begin(self) -> None:
        """Begin to copy the next chunk."""
        number = self._order.popleft()
        slot = self._free.popleft()
        upload = self._upload(slot, self._cuts[number])
        self._coming.append((number, slot, upload))
        self._note(upload.drained)

    def _upload(self, slot: DeviceSlots, cut: Cut) -> Upload:
        num_rows, length = self._state.shape[:2]
        row_bytes = self._state.nbytes // num_rows
        start, stop, _ = cut.tokens.indices(length)
        first = row_bytes // length * start
        nbytes = row_bytes // length * (stop - start)
        rows = range(num_rows)[cut.rows]
        if len(rows) == 1:
            begin = rows[0] * row_bytes + first
            return slot.upload(self._bytes[begin : begin + nbytes])
        spans = (Span(row * row_bytes + first, nbytes, at * nbytes) for at, row in enumerate(rows))
        return slot.upload(self._bytes, SlotLayout(len(rows) * nbytes, tuple(spans)))


class ChunkDownloads:
    """Results of chunks on their way to a hidden state in host memory.

    Args:
        carrier: of the device.
        state: `[rows, sequence, hidden]`.
        note: is given each copy, before which the host sees nothing there.
    """

    def __init__(
        self, carrier: Carrier, state: Tensor, note: Callable[[Callable[[], None]], None]
    ) -> None:
        self._carrier = carrier
        self._state = state
        self._note = note
        self._leaving: deque[list[Download]] = deque()

    def put(self, cut: Cut, result: Tensor) -> None:
        """Begin to copy a result to its place; the device holds it meanwhile. One row may stand for
        all."""
        if len(self._leaving) == NUM_LEAVING:
            self._release()
        targets = cut.of(self._state)
        sources = result.detach().contiguous().expand(targets.shape)
        downloads = [
            self._carrier.download(source, target)
            for source, target in zip(sources, targets, strict=True)
        ]
        self._leaving.append(downloads)
        for download in downloads[-1:]:  # copies end in their order
            self._note(download.landed)

    def end(self) -> None:
        """Hold nothing on the device any more: compute that is queued from now on sees all."""
        while self._leaving:
            self._release()

    def _release(self) -> None:
        for download in self._leaving.popleft():
            download.release()


def chunks_on_device(chunk_bytes: int) -> int:
    """Return the bytes of chunks of hidden states and their gradients on the device, as a plan
    counts them: those on their way there, of both at the top of a step, and the results that leave.

    Args:
        chunk_bytes: of a hidden state's largest chunk.
    """
    return (2 * NUM_SLOTS + NUM_LEAVING) * chunk_bytes
