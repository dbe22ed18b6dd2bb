"""The ring of host buffers and device slots that layers pass through, read and uploaded in the
order of their leases.

Buffers and slots are refilled by Belady's rule: the one whose layer is wanted last. Until it is
refilled each keeps its layer, so a layer that is still there is neither read nor uploaded again.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lema.backend import Backend, DeviceSlots, SlotLayout, Upload
from lema.stream.counters import StreamMeter
from lema.stream.placement import LayerBytes
from lema.stream.reader import LayerReader
from lema.stream.schedule import Order, index_to_refill
from lema.stream.slotlayout import upload_to
from lema.stream.workers import Ticket

__all__ = ["DeviceSlot", "HostBuffer", "LayerRing", "ring_bytes"]


@dataclass
class HostBuffer:
    """A host buffer, and the layer that is in it or on its way into it."""

    memory: Tensor
    layer: int | None = None
    ticket: Ticket | None = None  # None: the layer is whole
    leased: bool = False  # since it was read
    # The last upload from here into each slot, by its `id`: it may read from this buffer until it
    # is drained.
    uploads: dict[int, Upload] = field(default_factory=dict)

    def assign(self, layer: int, ticket: Ticket) -> None:
        """Hold a layer from now on, whose read has this ticket."""
        self.ticket = ticket
        self.layer = layer
        self.leased = False

    def lease(self) -> None:
        """Let the layer be leased."""
        self.leased = True

    def drain(self) -> Callable[[], None] | None:
        """Return what blocks until the buffer may be overwritten; None: it may."""
        uploads = tuple(self.uploads.values())

        def drained() -> None:
            for upload in uploads:
                upload.drained()

        return drained if uploads else None

    @property
    def is_complete(self) -> bool:
        """Whether the layer is whole."""
        return self.ticket is None or (self.ticket.done() and not self.ticket.failed())

    def wait(self) -> None:
        """Block until the layer is whole; raise what a read raised."""
        if self.ticket is not None:
            self.ticket.wait()
            self.ticket = None
            self.uploads.clear()  # the reads have waited for them

    def empty(self) -> None:
        """Give up the layer, and wait until no read touches the buffer."""
        if self.ticket is not None:
            # The uploads stay: reads that never began have not waited for them.
            self.ticket.cancel()
        self.layer = self.ticket = None


@dataclass
class DeviceSlot:
    """A slot on the device, and the layer that was uploaded to it. It holds the layer until it
    is refilled.
    """

    ring: DeviceSlots
    layer: int | None = None
    upload: Upload | None = None
    _released: bool = True

    def fill(self, layer: int, source: Tensor, layout: SlotLayout) -> Upload:
        """Start copying a layer into the slot, which is not on lease."""
        self.empty()
        self.upload = upload_to(self.ring, source, layout)
        self.layer = layer
        self._released = False
        return self.upload

    def lease(self) -> Tensor:
        """Return the slot with its layer."""
        assert self.upload is not None
        self._released = False
        return self.upload.wait()

    def release(self) -> None:
        """End the lease: from now on the slot may be refilled once the compute queued so far has
        finished.
        """
        if not self._released:
            assert self.upload is not None
            self._released = True
            self.upload.release()

    def empty(self) -> None:
        """Give up the layer; an upload that was not waited for is released too."""
        self.release()
        self.layer = None


class LayerRing:
    """Host buffers and device slots, `num_slots` of each at most, that the layers `passing` through
    them are leased from. `host` is the memory of those that stay in host memory, `layouts` say
    where the bytes of each go in a slot, and `in_use` returns the layers that may not be
    overwritten now."""

    def __init__(
        self,
        layers: Sequence[LayerBytes],
        passing: Collection[int],
        host: Mapping[int, Tensor],
        backend: Backend,
        *,
        num_slots: int,
        layouts: Sequence[SlotLayout],
        reader: LayerReader,
        in_use: Callable[[], Collection[int]],
        meter: StreamMeter,
    ) -> None:
        self._layers = layers
        self._host = host
        self._backend = backend
        self._reader = reader
        self._layouts = layouts
        self._in_use = in_use
        self._meter = meter
        self._order = Order()
        # by layer being written to, the function that waits for it
        self._changing: dict[int, Callable[[], None]] = {}
        on_disk = [layer for layer in passing if layer not in host]
        self.slot_bytes = self._largest(passing)  # of one slot
        # Rings of one slot each, because the slot to refill is chosen here, where it is known what
        # is wanted next.
        self.slots = [
            DeviceSlot(backend.device_slots(self.slot_bytes, 1))
            for _ in range(min(num_slots, len(passing)))
        ]
        self.buffers = [
            HostBuffer(backend.host_buffer(self._largest(on_disk)))
            for _ in range(min(num_slots, len(on_disk)))
        ]

    @property
    def announced(self) -> int:
        """How many announced leases are still to come."""
        return len(self._order)

    @property
    def first(self) -> int | None:
        """The layer to be taken next; None: none is announced."""
        return self._order.first

    @property
    def reading(self) -> list[int]:
        """The layers whose reads were requested and have not arrived in full."""
        pairs = [(buffer.layer, buffer.ticket) for buffer in list(self.buffers)]
        return [
            layer
            for layer, ticket in pairs
            if layer is not None and ticket is not None and not ticket.done()
        ]

    def announce(self, order: Iterable[int]) -> None:
        """Say which layers will be taken next, after those announced before; reading starts at
        once.
        """
        self._order.extend(order)
        self.pump()

    def take(self, layer: int) -> Upload:
        """Return a layer on its way into a slot, to be waited for and released, or raise
        `ReadError`. An order that was not announced starts afresh."""
        assert len(self._in_use()) < len(self.slots), (
            "more layers are on lease at once than there are slots"
        )
        if self._order.first != layer:
            self.cancel()
            self._order.extend([layer])
        if layer in self._changing:
            self._changing[layer]()
            self._changing.pop(layer, None)
        self.pump()  # again, because the layer may be fetched from now on
        try:
            if (buffer := self._buffer_of(layer)) is not None:
                self._wait_for_read(buffer)
                if buffer.leased:
                    self._meter.counters.count_layer_without_read()
                buffer.lease()
            slot = next((slot for slot in self.slots if slot.layer == layer), None)
            if slot is None:
                number = self._to_refill(self.slots, next(iter(self._order))[0])
                assert number is not None, "the next layer finds no slot"
                slot = self._upload(layer, number)
        except BaseException:
            self.cancel()
            raise
        self._order.begin()
        return _Taken(self, slot)

    def cancel(self) -> None:
        """Forget announced leases, and wait for running reads. Layers that are whole are kept."""
        self._order.clear()
        self._meter.forget_reads()
        for buffer in self.buffers:
            if buffer.ticket is not None and (not buffer.ticket.done() or buffer.ticket.failed()):
                buffer.empty()

    def shrink(self) -> bool:
        """Give up the slot whose layer is wanted last, and a host buffer; return whether there was
        one to give up. One on lease is not, nor is the last. What was on its way there is fetched
        again in its turn."""
        number = self._to_refill(self.slots, -1) if len(self.slots) > 1 else None
        if number is None:
            return False
        # because a copy may still be writing to the slot that goes, or reading from it
        self._backend.synchronize()
        slot = self.slots.pop(number)
        if len(self.buffers) > len(self.slots):
            # they may be one memory
            layers = [
                None if buffer.layer == slot.layer else buffer.layer for buffer in self.buffers
            ]
            index = index_to_refill(layers, self._order, -1, self._in_use())
            if index is not None:
                self.buffers.pop(index).empty()
        for buffer in self.buffers:
            buffer.uploads.pop(id(slot), None)
        slot.empty()
        return True

    def forget(self, layer: int, written: Callable[[], None] | None = None) -> None:
        """Let no slot hold a layer, nor anything be copied from its host memory, because that is
        about to change. `written` blocks until it has changed; None: it changes before the ring is
        asked for anything else."""
        if written is not None:
            self._changing[layer] = written
        for slot in self.slots:
            if slot.layer == layer:
                if slot.upload is not None:
                    slot.upload.drained()
                slot.empty()

    def flush(self) -> None:
        """Wait until every layer that was being written to has changed."""
        changing = self._changing
        self._changing = {}
        for written in changing.values():
            written()
        self.pump()

    def close(self) -> None:
        """Drop every buffer; the reader has been closed."""
        for slot in self.slots:
            slot.empty()
        if self.slots:
            self._backend.synchronize()  # no copy may still be reading a buffer that goes
        self.slots = []
        self.buffers = []

    def raise_failures(self) -> None:
        """Raise the error of a read that failed ahead of time now, not when its layer is leased."""
        for buffer in self.buffers:
            if buffer.ticket is not None and (error := buffer.ticket.failed()) is not None:
                self.cancel()
                raise error

    def pump(self) -> None:
        """Start every read there is a buffer for, and every upload whose bytes have arrived and
        which has a slot.
        """
        for number, layer in self._order:
            if layer in self._host or self._buffer_of(layer) is not None:
                continue
            if (index := self._to_refill(self.buffers, number)) is None:
                # Later leases are not looked at, because a layer wanted later must not take a
                # buffer from this one.
                self._meter.buffers_are_full()
                break
            self._meter.buffer_is_free()
            self._read(layer, self.buffers[index])
        for number, layer in self._order:
            if any(slot.layer == layer for slot in self.slots):
                continue
            if layer in self._changing:
                break  # because its host memory is being written to
            buffer = self._buffer_of(layer)
            is_loaded = layer in self._host or (buffer is not None and buffer.is_complete)
            if not is_loaded or (index := self._to_refill(self.slots, number)) is None:
                break
            self._upload(layer, index)

    def _to_refill(self, candidates: Sequence[HostBuffer | DeviceSlot], number: int) -> int | None:
        return index_to_refill(
            [candidate.layer for candidate in candidates], self._order, number, self._in_use()
        )

    def _buffer_of(self, layer: int) -> HostBuffer | None:
        return next((buffer for buffer in self.buffers if buffer.layer == layer), None)

    def _read(self, layer: int, buffer: HostBuffer) -> None:
        """Start reading `layer` into a buffer, whose layer leaves its slot too: the slot may be
        the buffer itself.
        """
        for slot in self.slots:
            if buffer.layer is not None and slot.layer == buffer.layer:
                slot.empty()
        buffer.empty()
        stored = self._layers[layer]
        ticket = self._reader.submit(
            stored, buffer.memory, buffer.drain(), name=stored.called(layer)
        )
        buffer.assign(layer, ticket)
        self._meter.counters.count_read()

    def _wait_for_read(self, buffer: HostBuffer) -> None:
        if buffer.ticket is None or buffer.ticket.done():
            buffer.wait()  # raises what a read raised
            return
        with self._meter.waiting_for_disk(self._name_of(buffer.layer)):
            buffer.wait()

    def _upload(self, layer: int, number: int) -> DeviceSlot:
        """Start copying `layer`, which has arrived, into slot `number`."""
        buffer = self._buffer_of(layer)
        slot = self.slots[number]
        layout = self._layouts[layer]
        if buffer is not None:
            buffer.wait()
        source = self._host[layer] if buffer is None else buffer.memory
        with self._meter.trace.span("upload", self._name_of(layer), nbytes=layout.copied):
            upload = slot.fill(layer, source, layout)
        if buffer is not None:
            buffer.uploads[id(slot)] = upload
        self._meter.counters.count_upload(layout.copied)
        return slot

    def _name_of(self, layer: int | None) -> str:
        return "" if layer is None else self._layers[layer].called(layer)

    def _largest(self, layers: Iterable[int]) -> int:
        return max((self._layers[layer].nbytes for layer in layers), default=0)


class _Taken:
    """A layer in its slot, or on its way into it, as an `Upload`."""

    def __init__(self, ring: LayerRing, slot: DeviceSlot) -> None:
        self._ring = ring
        self._slot = slot

    def wait(self) -> Tensor:
        name = self._ring._name_of(self._slot.layer)
        with self._ring._meter.waiting_for_upload(name):
            return self._slot.lease()

    def release(self) -> None:
        self._slot.release()
        # Of empty slots the first is refilled: the one that was computed with longest ago.
        self._ring.slots.sort(key=lambda slot: slot is self._slot)
        self._ring.pump()

    def drained(self) -> None:
        if self._slot.upload is not None:
            self._slot.upload.drained()


def ring_bytes(num_slots: int, layers: Sequence[int]) -> int:
    """Return the bytes of a ring's slots, or of its host buffers, as a plan counts them.

    Args:
        num_slots: how many there may be; there are no more than layers.
        layers: bytes of each layer that passes through.
    """
    return min(num_slots, len(layers)) * max(layers, default=0)
