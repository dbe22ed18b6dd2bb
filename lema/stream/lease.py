"""Layers on lease: prefetched in the order announced, held while they compute, then given back.

A lease is a promise: its weights are views into one device slot, and the slot is refilled only after every computation
queued under the lease has finished. Residents are uploaded once and leased for nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lema.backend import Backend, DeviceSlots, Upload
from lema.stream.placement import LayerBytes, views
from lema.stream.reader import LayerReader, Ticket

__all__ = ["LayerStream", "Lease", "StreamCounters", "WeightReference"]


@dataclass(frozen=True)
class StreamCounters:
    """What streaming has cost so far: layers and bytes read from disk, bytes uploaded, leases, seconds blocked."""

    layers_read: int = 0
    bytes_read: int = 0
    bytes_uploaded: int = 0
    leases: int = 0
    seconds_blocked: float = 0.0


@dataclass(frozen=True)
class WeightReference:
    """A view of a leased weight as data: where it lies in its layer's slot. It pins nothing."""

    layer: int
    offset: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Lease:
    """One layer's weights, by parameter name, valid until the lease ends."""

    layer: int
    slot: Tensor
    weights: dict[str, Tensor]

    def refer(self, tensor: Tensor) -> WeightReference | None:
        """Return where `tensor` lies in the slot; None: it lies elsewhere, or has no elements and so no place."""
        if tensor.untyped_storage().data_ptr() != self.slot.untyped_storage().data_ptr():
            return None
        start = tensor.data_ptr() - self.slot.data_ptr()
        if not 0 <= start < self.slot.numel():  # slots may share one storage; a tensor without elements is at 0
            return None
        return WeightReference(self.layer, start, tensor.dtype, tensor.shape, tensor.stride())

    def resolve(self, reference: WeightReference) -> Tensor:
        """Return the view that `reference` names, in this lease's slot."""
        assert reference.layer == self.layer, "a weight reference was resolved against another layer's lease"
        spans = zip(reference.shape, reference.stride, strict=True)
        extent = 1 + sum((size - 1) * stride for size, stride in spans)
        nbytes = extent * reference.dtype.itemsize
        flat = self.slot[reference.offset : reference.offset + nbytes].view(reference.dtype)
        return flat.as_strided(reference.shape, reference.stride, flat.storage_offset())


class _HostRing:
    """Host buffers that take turns; each remembers the upload that must drain before it is refilled."""

    def __init__(self, backend: Backend, nbytes: int, count: int) -> None:
        self._free: deque[tuple[Tensor, Upload | None]] = deque(
            (backend.host_buffer(nbytes), None) for _ in range(count)
        )

    def take(self) -> tuple[Tensor, Upload | None] | None:
        return self._free.popleft() if self._free else None

    def give(self, buffer: Tensor, upload: Upload | None) -> None:
        self._free.append((buffer, upload))


@dataclass
class _Fetch:
    """One layer between disk and device."""

    layer: int
    buffer: Tensor
    ticket: Ticket | None  # None: the bytes are in host memory already
    draining: Upload | None = None  # what the buffer held before; the read waits for it, if it begins at all
    upload: Upload | None = None


class LayerStream:
    """Leases the layers of one model, prefetching in the order announced.

    Args:
        layers: each layer as bytes.
        backend: the device.
        prefetch_depth: how many layers are under way beside the one on lease.
        residents: layers that stay on the device.
        in_host_memory: read every layer once, at the start, and upload from host memory ever after.
        reader: who reads; closed with the stream.
    """

    def __init__(
        self,
        layers: Sequence[LayerBytes],
        backend: Backend,
        *,
        prefetch_depth: int = 2,
        residents: Collection[int] = (),
        in_host_memory: bool = False,
        reader: LayerReader | None = None,
    ) -> None:
        self.layers = tuple(layers)
        self.residents = frozenset(residents)
        self.num_slots = prefetch_depth + 1
        self._backend = backend
        self._reader = reader or LayerReader()
        self._counters = StreamCounters()
        self._order: deque[int] = deque()
        self._fetches: deque[_Fetch] = deque()
        self._held: dict[int, Lease] = {}
        streamed = [layer for index, layer in enumerate(self.layers) if index not in self.residents]
        self._slot_bytes = max((layer.nbytes for layer in streamed), default=0)
        self._slots: DeviceSlots | None = None
        self._ring: _HostRing | None = None
        if streamed:
            self._slots = backend.device_slots(self._slot_bytes, self.num_slots)
        self._host: dict[int, Tensor] = {}
        self._resident: dict[int, Tensor] = {}
        self._fill(self.residents, keep_in_host=False)
        if in_host_memory:
            self._fill(set(range(len(self.layers))) - self.residents, keep_in_host=True)
        elif streamed:
            self._ring = _HostRing(backend, self._slot_bytes, self.num_slots)

    @property
    def counters(self) -> StreamCounters:
        """What streaming has cost so far."""
        return replace(self._counters, bytes_read=self._reader.bytes_read)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: the largest streamed layer."""
        return self._slot_bytes

    def announce(self, order: Iterable[int]) -> None:
        """Say which layers will be leased next, after those announced before; reading starts at once."""
        self._order.extend(layer for layer in order if layer not in self.residents)
        self._pump()

    @property
    def announced(self) -> int:
        """How many announced leases of streamed layers are still to come."""
        return len(self._order) + len(self._fetches)

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
        self._counters = replace(self._counters, leases=self._counters.leases + 1)
        if layer in self.residents:
            slot = self._resident[layer]
            self._held[layer] = Lease(layer, slot, views(slot, self.layers[layer]))
            try:
                yield self._held[layer]
            finally:
                del self._held[layer]
            return
        fetch = self._next(layer)
        try:
            assert fetch.upload is not None
            slot = fetch.upload.wait()
            self._held[layer] = Lease(layer, slot, views(slot, self.layers[layer]))
            yield self._held[layer]
        finally:
            self._held.pop(layer, None)
            self._give_back(fetch)
            self._pump()

    def cancel(self) -> None:
        """Forget what was announced; wait for the reads under way and give their buffers back."""
        self._order.clear()
        while self._fetches:
            self._settle(self._fetches.popleft())

    def _settle(self, fetch: _Fetch) -> None:
        """Wait until no read touches the fetch's buffer, then give it back."""
        if fetch.ticket is not None:
            fetch.ticket.settle()
        self._give_back(fetch)

    def close(self) -> None:
        """Stop reading and drop every buffer."""
        self.cancel()
        self._reader.close()
        if self._slots is not None:
            self._backend.synchronize()  # no copy may still be reading a buffer that goes
        self._ring = self._slots = None
        self._host.clear()
        self._resident.clear()

    def _next(self, layer: int) -> _Fetch:
        """Return the fetch of `layer`, uploaded; an order other than the one announced starts afresh."""
        assert self._slots_held < self.num_slots, "more layers are on lease at once than there are slots"
        expected = self._fetches[0].layer if self._fetches else (self._order[0] if self._order else None)
        if expected != layer:
            self.cancel()
            self._order.append(layer)
        self._pump()
        fetch = self._fetches.popleft()
        started = time.perf_counter()
        try:
            if fetch.upload is None:
                self._upload(fetch)
        except BaseException:
            self._settle(fetch)
            self.cancel()
            raise
        blocked = self._counters.seconds_blocked + time.perf_counter() - started
        self._counters = replace(self._counters, seconds_blocked=blocked)
        return fetch

    @property
    def _slots_held(self) -> int:
        return len(self._held.keys() - self.residents)

    def _pump(self) -> None:
        """Start every read there is a buffer for, and every upload whose bytes have arrived and which has a slot."""
        while self._order and len(self._fetches) + self._slots_held < self.num_slots:
            layer = self._order.popleft()
            self._fetches.append(self._fetch(layer))
        for fetch in self._fetches:
            if fetch.ticket is not None and (not fetch.ticket.done() or fetch.ticket.failed()):
                break
            if fetch.upload is None:
                self._upload(fetch)

    def _fetch(self, layer: int) -> _Fetch:
        if layer in self._host:
            return _Fetch(layer, self._host[layer], None)
        assert self._ring is not None
        taken = self._ring.take()
        assert taken is not None, "more layers are under way than there are host buffers"
        buffer, upload = taken
        before = upload.drained if upload is not None else None
        ticket = self._reader.submit(self.layers[layer], buffer, before)
        self._counters = replace(self._counters, layers_read=self._counters.layers_read + 1)
        return _Fetch(layer, buffer, ticket, draining=upload)

    def _upload(self, fetch: _Fetch) -> None:
        if fetch.ticket is not None:
            fetch.ticket.wait()
        assert self._slots is not None
        nbytes = self.layers[fetch.layer].nbytes
        fetch.upload = self._slots.upload(fetch.buffer[:nbytes])
        self._counters = replace(self._counters, bytes_uploaded=self._counters.bytes_uploaded + nbytes)

    def _give_back(self, fetch: _Fetch) -> None:
        if fetch.upload is not None:
            fetch.upload.release()
        if fetch.ticket is not None:
            assert self._ring is not None
            # A cancelled read may never have waited for what the buffer held before.
            self._ring.give(fetch.buffer, fetch.draining if fetch.upload is None else fetch.upload)

    def _raise_failures(self) -> None:
        """A read that failed ahead of time stops training now, not when its layer's turn comes."""
        for fetch in self._fetches:
            if fetch.ticket is not None and (error := fetch.ticket.failed()) is not None:
                self.cancel()
                raise error

    def _fill(self, wanted: Collection[int], *, keep_in_host: bool) -> None:
        """Read layers for good: into host memory, or through it onto the device."""
        for layer in sorted(wanted):
            buffer = self._backend.host_buffer(self.layers[layer].nbytes)
            self._reader.submit(self.layers[layer], buffer).wait()
            if keep_in_host:
                self._host[layer] = buffer
            else:
                upload = self._backend.device_slots(buffer.numel(), 1).upload(buffer)
                self._resident[layer] = upload.wait()
                self._backend.synchronize()  # the buffer goes here, and the copy may still be reading it
