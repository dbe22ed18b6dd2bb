"""Layers on disk, a reader that goes on only when it is told to, and a device that works as late
as it may.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from lema.backend import DeviceSlots, Download, MemoryStats, SlotLayout, Span
from lema.errors import ReadError
from lema.storage.header import TensorRecord
from lema.stream.placement import LayerBytes, lay_out_tensors, rank_share, slot_layout, slot_share
from lema.stream.reader import LayerReader
from lema.stream.workers import Ticket
from lema_cpu import CpuBackend

STORED = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True)
class Stored:
    """Layers in one file, and what their tensors are."""

    file: Path
    layers: list[LayerBytes] = field(repr=False)
    contents: list[dict[str, Tensor]] = field(repr=False)

    def __len__(self) -> int:
        return len(self.layers)


def write_layers(directory: Path, num_layers: int = 6) -> Stored:
    """Write layers of different sizes, each two tensors behind each other, beginning anywhere in
    a page.
    """
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "layers.bin"
    generator = torch.Generator().manual_seed(1)
    data = bytearray(52)
    layers = []
    contents = []
    for index in range(num_layers):
        tensors = {
            "weight": torch.randn(24, 20 + 7 * index, generator=generator),
            "bias": torch.randn(18 + 2 * index, generator=generator).bfloat16(),
        }
        records = {}
        for name, tensor in tensors.items():
            raw = raw_bytes(tensor)
            records[name] = (
                TensorRecord(
                    f"{index}.{name}",
                    file,
                    len(data),
                    len(raw),
                    STORED[tensor.dtype],
                    tuple(tensor.shape),
                ),
                tensor.dtype,
            )
            data += raw
        layers.append(lay_out_tensors(records))
        contents.append(tensors)
    file.write_bytes(data)
    return Stored(file, layers, contents)


def raw_bytes(tensor: Tensor) -> bytes:
    """Return a tensor's bytes as a file holds them."""
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def share_of(layer: LayerBytes, rank: int, size: int, *, packed: bool) -> tuple[LayerBytes, int]:
    """Return one process's share of a layer, and the bytes of it that are copied to a slot, which
    on a device with memory of its own is packed."""
    if packed:
        share, layout = slot_share(layer, slot_layout(layer), rank, size)
        return share, layout.copied
    share = rank_share(layer, rank, size)
    return share, share.nbytes


def same(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    """Whether the weights are the expected ones, bit for bit."""
    return weights.keys() == expected.keys() and all(
        torch.equal(weights[name], expected[name]) for name in expected
    )


class SteppedReader(LayerReader):
    """Reads in a random order, each in two steps: first the buffer is rubbish, then it holds the
    layer.

    Nothing happens but when the stream asks: a look at a ticket lets some reads go on, waiting for
    one lets all go on that chance puts before it. The same seed gives the same course of events.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(threads=1)
        self.chance = Random(seed)
        self.pending = list[SteppedTicket]()

    def submit(
        self,
        layer: LayerBytes,
        buffer: Tensor,
        before: Callable[[], None] | None = None,
        *,
        name: str = "weights",
    ) -> Ticket:
        ticket = SteppedTicket(self, layer, buffer, before)
        self.pending.append(ticket)
        return ticket

    def read_now(self, layer: LayerBytes, buffer: Tensor) -> None:
        super().submit(layer, buffer).wait()

    def some_steps(self) -> None:
        while self.pending and self.chance.random() < 0.6:
            self.chance.choice(self.pending).step()


class SteppedTicket(Ticket):
    def __init__(
        self,
        reader: SteppedReader,
        layer: LayerBytes,
        buffer: Tensor,
        before: Callable[[], None] | None,
    ) -> None:
        super().__init__([])
        self.reader = reader
        self.layer = layer
        self.buffer = buffer
        self.before = before
        self.begun = False
        self.error: ReadError | None = None

    def step(self) -> None:
        if not self.begun:
            self.begun = True
            if self.before:
                self.before()
            self.buffer.fill_(0xA5)
        else:
            try:
                self.reader.read_now(self.layer, self.buffer)
            except ReadError as error:
                self.error = error
            self.reader.pending.remove(self)

    def done(self) -> bool:
        self.reader.some_steps()
        return self not in self.reader.pending

    def wait(self) -> None:
        while self in self.reader.pending:
            self.reader.chance.choice(self.reader.pending).step()
        if self.error is not None:
            raise self.error

    def failed(self) -> BaseException | None:
        return self.error

    def settle(self) -> None:
        if self.begun:
            with suppress(ReadError):
                self.wait()
        elif self in self.reader.pending:
            self.reader.pending.remove(self)


class RecordingReader(LayerReader):
    """The reader itself; it remembers its tickets."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.tickets: list[tuple[LayerBytes, Tensor, Ticket]] = []

    def submit(
        self,
        layer: LayerBytes,
        buffer: Tensor,
        before: Callable[[], None] | None = None,
        *,
        name: str = "weights",
    ) -> Ticket:
        ticket = super().submit(layer, buffer, before, name=name)
        self.tickets.append((layer, buffer, ticket))
        return ticket

    def settle_all(self) -> None:
        """Wait until every read so far has ended, well or badly."""
        for _, _, ticket in self.tickets:
            ticket._over.wait()


class LateBackend(CpuBackend):
    """A device with a queue, which copies and computes only when somebody must wait for it.

    That is the latest a device may: what the core overwrites too early is overwritten before it was
    used.
    """

    def __init__(self) -> None:
        super().__init__()
        self._queue: deque[tuple[object, Callable[[], None]]] = deque()
        self._lock = threading.RLock()

    def compute(self, work: Callable[[], None]) -> None:
        """Queue work."""
        self._enqueue(None, work)

    def device_slots(self, nbytes: int, count: int) -> DeviceSlots:
        return _LateSlots(self, nbytes, count)

    def download(self, source: Tensor, target: Tensor) -> Download:
        return _LateDownload(self, source, target)

    def synchronize(self) -> None:
        self.run_through(None)

    def memory(self) -> MemoryStats:
        return replace(super().memory(), shared=False)

    def run_through(self, last: object) -> None:
        """Do what is queued, up to the piece of work given (None: all)."""
        with self._lock:
            while self._queue and (last is None or any(mark is last for mark, _ in self._queue)):
                self._queue.popleft()[1]()

    def _enqueue(self, mark: object, work: Callable[[], None]) -> None:
        with self._lock:
            self._queue.append((mark, work))


class _LateSlots:
    def __init__(self, backend: LateBackend, nbytes: int, count: int) -> None:
        self.backend = backend
        self.free = {i: torch.zeros(nbytes, dtype=torch.uint8) for i in range(count)}

    def upload(self, source: Tensor, layout: SlotLayout | None = None) -> _LateUpload:
        layout = layout or SlotLayout(len(source), (Span(0, len(source), 0),))
        return _LateUpload(self, *self.free.popitem(), source, layout)


class _LateDownload:
    def __init__(self, backend: LateBackend, source: Tensor, target: Tensor) -> None:
        self.backend = backend
        backend._enqueue(self, lambda: target.copy_(source))

    def release(self) -> None:
        # what tests compute with torch is done at once, and may overwrite the source
        self.backend.run_through(self)

    def landed(self) -> None:
        self.backend.run_through(self)


class _LateUpload:
    def __init__(
        self, slots: _LateSlots, number: int, slot: Tensor, source: Tensor, layout: SlotLayout
    ) -> None:
        self.slots = slots
        self.number = number
        self.slot = slot
        self.nbytes = layout.nbytes

        def copy() -> None:
            for span in layout.spans:
                piece = source[span.start : span.start + span.nbytes]
                slot[span.slot : span.slot + span.nbytes].copy_(piece)

        slots.backend._enqueue(self, copy)

    def wait(self) -> Tensor:
        self.slots.free.pop(self.number, None)  # it may have been released before
        return self.slot[: self.nbytes]

    def release(self) -> None:
        # what is copied into it comes behind the work queued so far
        self.slots.free[self.number] = self.slot

    def drained(self) -> None:
        self.slots.backend.run_through(self)
