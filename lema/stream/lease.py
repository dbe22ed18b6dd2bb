"""Layers on lease: prefetched in the order announced, held while they compute, then given back.

A lease is a promise: its weights are views into one device slot, and the slot is refilled only after every computation
queued under the lease has finished. Until it is refilled, a slot keeps its layer, and a lease of it costs nothing: that
is how a training pass turns without reading again what it has just left. Residents are uploaded once and leased for
nothing; layers cached in host memory are read once. What is stored quantised stays so in every buffer and slot, and is
expanded when a lease begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from lema.backend import Backend
from lema.stream.counters import StreamCounters
from lema.stream.expand import ExpandedBuffers, expand_into, weights_in
from lema.stream.leased import Lease, WeightReference
from lema.stream.order import Order, place_to_refill
from lema.stream.placement import LayerBytes
from lema.stream.places import DeviceSlot, HostBuffer
from lema.stream.reader import LayerReader
from lema.trace import NO_TRACE, NoTrace

__all__ = ["LayerStream", "Lease", "StreamCounters", "WeightReference"]


class LayerStream:
    """Leases the layers of one model, prefetching in the order announced.

    Args:
        layers: each layer as bytes.
        backend: the device.
        prefetch_depth: how many layers are under way, or kept, beside the one on lease.
        residents: layers that stay on the device.
        host_cached: layers that are read once, at the start, and uploaded from host memory ever after.
        reader: who reads; closed with the stream.
        trace: records uploads and stalls.
        clock: seconds, for the counters.
    """

    def __init__(
        self,
        layers: Sequence[LayerBytes],
        backend: Backend,
        *,
        prefetch_depth: int = 2,
        residents: Collection[int] = (),
        host_cached: Collection[int] = (),
        reader: LayerReader | None = None,
        trace: NoTrace = NO_TRACE,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.layers = tuple(layers)
        self.residents = frozenset(residents)
        self.host_cached = frozenset(host_cached) - self.residents
        self.num_slots = prefetch_depth + 1
        self.trace = trace
        self._clock = clock
        self._backend = backend
        self._reader = reader or LayerReader(trace=trace)
        self._counters = StreamCounters()
        self._order = Order()
        self._held: dict[int, Lease] = {}
        self._full_since: float | None = None  # from when on a read has been waiting for a buffer
        streamed = [layer for layer in range(len(self.layers)) if layer not in self.residents]
        on_disk = [layer for layer in streamed if layer not in self.host_cached]
        self._slot_bytes = self._largest(streamed)
        # Rings of one slot each: which slot to refill is chosen here, where it is known what is wanted next.
        self._slots = [
            DeviceSlot(backend.device_slots(self._slot_bytes, 1)) for _ in range(min(self.num_slots, len(streamed)))
        ]
        self._expanded = ExpandedBuffers(self.layers, backend)
        self._host: dict[int, Tensor] = {}
        self._resident: dict[int, Tensor] = {}
        self._fill(self.residents, keep_in_host=False)
        self._fill(self.host_cached, keep_in_host=True)
        self._ring = [
            HostBuffer(backend.host_buffer(self._largest(on_disk))) for _ in range(min(self.num_slots, len(on_disk)))
        ]

    @property
    def counters(self) -> StreamCounters:
        """What streaming has cost so far."""
        return replace(self._counters, bytes_read=self._reader.bytes_read)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: the largest streamed layer."""
        return self._slot_bytes

    def announce(self, order: Iterable[int]) -> None:
        """Say which layers will be leased next, after those announced before; reading starts at once.

        The further ahead it is known what comes, the better is the choice of what to keep: what follows a turn is best
        announced before the turn.
        """
        self._order.extend(layer for layer in order if layer not in self.residents)
        self._pump()

    @property
    def announced(self) -> int:
        """How many announced leases of streamed layers are still to come."""
        return len(self._order)

    @contextmanager
    def lease(self, layer: int) -> Iterator[Lease]:
        """Hold a layer's weights on the device for the length of a `with` block.

        A layer that is on lease already is leased again for nothing.

        Raises:
            ReadError: reading this layer, or any layer being prefetched, failed.
        """
        if layer in self._held:
            yield self._held[layer]
            return
        self._raise_failures()
        self._count(leases=1)
        if layer in self.residents:
            with self._open(layer, self._resident[layer]) as lease:
                yield lease
            return
        place = self._next(layer)
        try:
            self._order.begin()
            began = self._clock()
            with self.trace.span("stall: upload", f"layer {layer}"):
                slot = place.lease()
            self._count(seconds_blocked_upload=self._clock() - began)
            with self._open(layer, slot) as lease:
                yield lease
        finally:
            place.release()
            # Of empty slots the first is refilled: the one that was computed with longest ago.
            self._slots.sort(key=lambda other: other is place)
            self._pump()

    @contextmanager
    def _open(self, layer: int, slot: Tensor) -> Iterator[Lease]:
        """Hold a layer that is in `slot`, what is quantised in it expanded."""
        stored = self.layers[layer]
        expanded = self._expanded.take() if stored.expansions else None
        try:
            if expanded is not None:
                began = self._clock()
                with self.trace.span("expand", f"layer {layer}", nbytes=stored.expanded_bytes):
                    expand_into(expanded, slot, stored)
                self._count(seconds_expanding=self._clock() - began)
            self._held[layer] = Lease(layer, slot, weights_in(slot, stored, expanded), expanded)
            yield self._held[layer]
        finally:
            self._held.pop(layer, None)
            if expanded is not None:
                self._expanded.give_back(expanded)

    def cancel(self) -> None:
        """Forget what was announced, and wait for the reads under way. Layers that are whole are kept."""
        self._order.clear()
        self._full_since = None
        for buffer in self._ring:
            if buffer.ticket is not None and (not buffer.ticket.done() or buffer.ticket.failed()):
                buffer.empty()

    def close(self) -> None:
        """Stop reading and drop every buffer."""
        self.cancel()
        self._reader.close()
        for place in self._slots:
            place.empty()
        if self._slots:
            self._backend.synchronize()  # no copy may still be reading a buffer that goes
        self._slots, self._ring = [], []
        self._expanded.clear()
        self._host.clear()
        self._resident.clear()

    def _next(self, layer: int) -> DeviceSlot:
        """Return the slot that holds `layer`; an order other than the one announced starts afresh."""
        assert len(self._held.keys() - self.residents) < len(self._slots), (
            "more layers are on lease at once than there are slots"
        )
        if self._order.first != layer:
            self.cancel()
            self._order.extend([layer])
        self._pump()
        try:
            if (buffer := self._buffer_of(layer)) is not None:
                self._arrive(buffer)
                self._count(layers_kept=int(buffer.leased))
                buffer.leased = True
            place = next((place for place in self._slots if place.layer == layer), None)
            if place is None:
                number = self._to_refill(self._slots, next(iter(self._order))[0])
                assert number is not None, "the next layer finds no slot"
                place = self._upload(layer, number)
        except BaseException:
            self.cancel()
            raise
        return place

    def _pump(self) -> None:
        """Start every read there is a buffer for, and every upload whose bytes have arrived and which has a slot."""
        for number, layer in self._order:
            if layer in self._host or self._buffer_of(layer) is not None:
                continue
            if (place := self._to_refill(self._ring, number)) is None:
                self._full_since = self._clock() if self._full_since is None else self._full_since
                break
            if self._full_since is not None:
                self._count(seconds_blocked_compute=self._clock() - self._full_since)
                self._full_since = None
            self._read(layer, self._ring[place])
        for number, layer in self._order:
            if any(place.layer == layer for place in self._slots):
                continue
            buffer = self._buffer_of(layer)
            arrived = layer in self._host or (buffer is not None and _arrived(buffer))
            if not arrived or (place := self._to_refill(self._slots, number)) is None:
                break
            self._upload(layer, place)

    def _to_refill(self, places: Sequence[HostBuffer | DeviceSlot], number: int) -> int | None:
        return place_to_refill([place.layer for place in places], self._order, number, self._held.keys())

    def _buffer_of(self, layer: int) -> HostBuffer | None:
        """Return the buffer of the ring that holds `layer`, or is being filled with it."""
        return next((buffer for buffer in self._ring if buffer.layer == layer), None)

    def _read(self, layer: int, buffer: HostBuffer) -> None:
        """Start reading `layer` into a buffer, whose layer leaves its slot too: the slot may be the buffer itself."""
        for place in self._slots:
            if buffer.layer is not None and place.layer == buffer.layer:
                place.empty()
        buffer.empty()
        buffer.ticket = self._reader.submit(self.layers[layer], buffer.memory, buffer.drain(), name=f"layer {layer}")
        buffer.layer, buffer.leased = layer, False
        self._count(layers_read=1)

    def _arrive(self, buffer: HostBuffer) -> None:
        """Wait for a layer's last byte."""
        if buffer.ticket is None or buffer.ticket.done():
            buffer.arrive()  # raises what a read raised
            return
        began = self._clock()
        with self.trace.span("stall: disk", f"layer {buffer.layer}"):
            buffer.arrive()
        self._count(seconds_blocked_disk=self._clock() - began)

    def _upload(self, layer: int, number: int) -> DeviceSlot:
        """Start copying `layer`, which has arrived, into slot `number`."""
        buffer, place, nbytes = self._buffer_of(layer), self._slots[number], self.layers[layer].nbytes
        if buffer is not None:
            buffer.arrive()
        source = self._host[layer] if buffer is None else buffer.memory
        with self.trace.span("upload", f"layer {layer}", nbytes=nbytes):
            upload = place.fill(layer, source[:nbytes])
        if buffer is not None:
            buffer.uploaded(id(place), upload)
        self._count(bytes_uploaded=nbytes)
        return place

    def _raise_failures(self) -> None:
        """A read that failed ahead of time stops training now, not when its layer's turn comes."""
        for buffer in self._ring:
            if buffer.ticket is not None and (error := buffer.ticket.failed()) is not None:
                self.cancel()
                raise error

    def _fill(self, wanted: Collection[int], *, keep_in_host: bool) -> None:
        """Read layers for good: into host memory, or through it onto the device."""
        for layer in sorted(wanted):
            buffer = self._backend.host_buffer(self.layers[layer].nbytes)
            self._reader.submit(self.layers[layer], buffer, name=f"layer {layer}").wait()
            if keep_in_host:
                self._host[layer] = buffer
            else:
                upload = self._backend.device_slots(buffer.numel(), 1).upload(buffer)
                self._resident[layer] = upload.wait()
                self._backend.synchronize()  # the buffer goes here, and the copy may still be reading it

    def _largest(self, layers: Iterable[int]) -> int:
        return max((self.layers[layer].nbytes for layer in layers), default=0)

    def _count(self, **more: float) -> None:
        counters = self._counters
        self._counters = replace(counters, **{name: getattr(counters, name) + by for name, by in more.items()})


def _arrived(buffer: HostBuffer) -> bool:
    return buffer.ticket is None or (buffer.ticket.done() and not buffer.ticket.failed())
