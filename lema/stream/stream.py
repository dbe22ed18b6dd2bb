"""The stream of layers on lease: prefetched in the announced order, held while they compute, then
given back.

A lease is a promise: its weights are views into one device slot, and the slot is refilled only
after every computation queued under the lease has finished. Until then it keeps its layer, and a
lease of that layer costs nothing: that is how a training pass turns without reading the last layers
again. Quantised weights stay quantised in every buffer and slot, and are expanded when a lease
begins. With `shard_weights` a lease begins by gathering the parts of all processes.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from lema.backend import Backend, SlotLayout, Upload
from lema.backend.registry import has_addresses, in_host_memory
from lema.backend.trace import NO_TRACE, NoTrace
from lema.stream.gather import GatheredBuffers
from lema.stream.lease import ExpandedBuffers, Lease, expand_into
from lema.stream.placement import (
    LayerBytes,
    extent,
    in_slot,
    misaligned,
    rank_share,
    slot_layout,
    slot_share,
    vector_aligned,
    views,
)
from lema.stream.preload import fill
from lema.stream.reader import LayerReader
from lema.stream.ring import LayerRing, StreamCounters
from lema.stream.schedule import ExpertGroup, forward_order, in_parts, training_order, with_parts
from lema.stream.slotlayout import VECTOR, identity_layout
from lema.stream.workers import Ticket

__all__ = ["LayerStream"]


class LayerStream:
    """Leases the layers of one model, prefetching in the order announced. `ReadError`: a layer that
    is read at the start could not be, here or in another process.

    With several processes, all make streams of the same layers with the same arguments; sharded,
    they also announce, lease and cancel the same, in the same order. Only announcements may come
    earlier in one than in another.

    `prefetch_depth`: how many layers are under way, or kept, besides the one on lease. `residents`:
    layers that stay on the device; if it computes in host memory, they are read while those before
    them compute. `host_cached`: layers that are read once, at the start, and uploaded from host
    memory from then on; processes of one machine share that memory. `sharded`: of several
    processes, let each have its part of every layer; one layer is then on lease at a time.
    `groups`: of layers whose experts are leased in groups, these groups, whose numbers come after
    those of all layers; the rest of such a layer has the layer's own. `reader`: the threads that
    read; closed with the stream.
    `loaded_layers`: memory of `host_cached` layers that have been read, if there is one process.
    """

    def __init__(
        self,
        layers: Sequence[LayerBytes],
        backend: Backend,
        *,
        prefetch_depth: int = 2,
        residents: Collection[int] = (),
        host_cached: Collection[int] = (),
        sharded: bool = False,
        groups: Mapping[int, Sequence[ExpertGroup]] = {},
        reader: LayerReader | None = None,
        loaded_layers: Mapping[int, Tensor] = {},
        trace: NoTrace = NO_TRACE,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.layers = (
            tuple(layers) if not in_host_memory(backend) else tuple(map(vector_aligned, layers))
        )
        self.groups = groups
        self.residents = with_parts(residents, self.parts)
        self.host_cached = with_parts(host_cached, self.parts) - self.residents
        # layers, and pieces of the head
        self.num_visited = len(self.layers) - sum(map(len, self.parts.values()))
        self.trace = trace
        self._backend = backend
        self._clock = clock
        self._reader = reader or LayerReader(trace=trace)
        self._counters = StreamCounters()
        self._open_leases: dict[int, Lease] = {}
        # Of a layer and of its parts one buffer each, because both are on lease at once.
        layer_groups = self.layers[: self.num_visited], self.layers[self.num_visited :]
        self._expanded = tuple(ExpandedBuffers(group, backend) for group in layer_groups)
        self._gathered: GatheredBuffers | None = None
        replicas = backend.replicas
        self._lazy = not has_addresses(backend.device)
        self._sharded = sharded and replicas.size > 1
        # Only a device with memory of its own has weights elsewhere than where they were read to.
        self._packed = not self._lazy and not backend.memory().shared
        stored = self.layers
        layouts = [self._layout(layer) for layer in self.layers]
        self._in_slots = tuple(map(in_slot, self.layers, layouts))
        if self._packed:
            wrong = next(filter(None, map(misaligned, self._in_slots)), None)
            assert wrong is None, f"{wrong} would begin at an address that kernels refuse"
        if self._sharded:
            stored, layouts = self._divided(layouts)
            parts_of = [layout.nbytes for layout in layouts]
            self._gathered = GatheredBuffers(
                parts_of, backend, self._part, self._counters, trace=trace, clock=clock
            )
        late = replicas.size == 1 and backend.memory().shared and not self._lazy
        self._arriving = self._begun(sorted(self.residents)) if late else {}
        uploads, self._host = fill(
            self.residents - self._arriving.keys(),
            self.host_cached,
            stored,
            backend,
            self._reader,
            shared=self._gathered is None,
            layouts=layouts,
            loaded_layers=loaded_layers,
        )
        self._resident = {layer: upload.wait() for layer, upload in uploads.items()}
        # A lazy device waits for and releases residents as other layers, because its graphs end
        # there.
        self._uploads = uploads if self._gathered is not None or self._lazy else {}
        self.num_slots = prefetch_depth + 1
        self._before_lease: Callable[[], None] = lambda: None
        self._ring = self._ring_of(stored, layouts)
        # of one slot: the largest streamed layer; sharded, its part
        self.slot_bytes = self._ring.slot_bytes
        # whether this process has but a part of every layer
        self.sharded = self._gathered is not None

    def _ring_of(self, stored: Sequence[LayerBytes], layouts: Sequence[SlotLayout]) -> LayerRing:
        """Return the slots that the layers which are not residents take turns in."""
        return LayerRing(
            stored,
            [layer for layer in range(len(self.layers)) if layer not in self.residents],
            self._host,
            self._backend,
            num_slots=self.num_slots,
            layouts=layouts,
            reader=self._reader,
            in_use=self._in_use,
            counters=self._counters,
            trace=self.trace,
            clock=self._clock,
        )

    def _layout(self, layer: LayerBytes) -> SlotLayout:
        """Return where a layer's bytes go in its slot: with memory of the device's own, to aligned
        places; to a lazy device those from the first tensor to the last, because a tensor's place
        in its slot is part of a graph that layers share, and layers begin anywhere in a page.
        Otherwise, and where they are gathered there, as they are."""
        if self._packed:
            return slot_layout(layer)
        return (
            identity_layout(*extent(layer))
            if self._lazy and not self._sharded
            else identity_layout(0, layer.nbytes)
        )

    def _divided(
        self, layouts: Sequence[SlotLayout]
    ) -> tuple[tuple[LayerBytes, ...], list[SlotLayout]]:
        """Return this process's part of each layer, and where it goes in a slot."""
        rank = self._backend.replicas.rank
        size = self._backend.replicas.size
        if self._packed:
            pairs = [
                slot_share(*pair, rank, size) for pair in zip(self.layers, layouts, strict=True)
            ]
            return tuple(share for share, _ in pairs), [layout for _, layout in pairs]
        shares = tuple(rank_share(layer, rank, size) for layer in self.layers)
        return shares, [identity_layout(0, share.nbytes) for share in shares]

    def unchanged(self, files: Collection[Path]) -> bool:
        """Whether these files have what was read of them, where their reader remembers it.
        `ReadError`: one cannot be read."""
        return self._reader.first_reads is None or self._reader.first_reads.still_in(files)

    @property
    def parts(self) -> dict[int, list[int]]:
        """The numbers of the groups of experts of each layer that is leased in groups."""
        return {at: [group.number for group in groups] for at, groups in self.groups.items()}

    @property
    def counters(self) -> StreamCounters:
        """What streaming has cost so far."""
        return replace(self._counters, bytes_read=self._reader.bytes_read)

    def announce(self, order: Iterable[int]) -> None:
        """Say which layers will be leased next, after those announced before; reading starts at
        once. The further ahead leases are known, the better it chooses which layers to keep:
        announce those after a turn before it."""
        upcoming = order if self._gathered is None else self._gathered.announce(order)
        self._ring.announce(layer for layer in upcoming if layer not in self.residents)

    def forward_order(self) -> tuple[int, ...]:
        """Return the leases of an evaluation."""
        return in_parts(forward_order(self.num_visited), self.parts)

    def training_order(self, lowest_trained: int, first: int = 0) -> tuple[int, ...]:
        """Return the leases of one optimizer step that begins at the layer `first`."""
        order = training_order(self.num_visited, lowest_trained)[first:]
        return in_parts(order, self.parts, top_layer=self.num_visited - 1)

    @property
    def announced(self) -> int:
        """How many announced leases of streamed layers are still to come; sharded, all are
        streamed.
        """
        return self._ring.announced if self._gathered is None else self._gathered.announced

    @contextmanager
    def calling(self, before_lease: Callable[[], None]) -> Iterator[None]:
        """Call a function in a `with` block before a layer is leased that is not on lease already;
        what it raises, the lease does.
        """
        before = self._before_lease
        self._before_lease = before_lease
        try:
            yield
        finally:
            self._before_lease = before

    @contextmanager
    def lease(self, layer: int) -> Iterator[Lease]:
        """Hold a layer's weights on the device for the length of a `with` block; one on lease is
        leased again for nothing. `ReadError`: reading this layer, or any layer being prefetched,
        failed."""
        if layer in self._open_leases:
            yield self._open_leases[layer]
            return
        self._before_lease()
        # of any layer, because training should stop now and not when its turn comes
        self._ring.raise_failures()
        self._counters.leases += 1
        if self._gathered is not None:
            assert not self._open_leases, "more than one layer is on lease at once"
            # an order other than the one announced starts afresh
            if not self._gathered.begin(layer):
                self.cancel()
                self.announce([layer])
                self._gathered.begin(layer)
            with self._gathered.lease(layer) as slot, self._open(layer, slot) as lease:
                yield lease
        elif layer in self.residents and not self._lazy:
            with self._open(layer, self._stays(layer)) as lease:
                yield lease
        else:
            upload = self._part(layer)
            try:
                with self._open(layer, upload.wait()) as lease:
                    yield lease
            finally:
                upload.release()

    def join_idle(self, order: Iterable[int]) -> None:
        """Lease the layers of an order and compute nothing, so that processes that compute get this
        one's parts. What others cancel is cancelled here too. A stream that is not sharded does
        nothing, because no other needs it."""
        if self._gathered is None:
            return
        order = tuple(order)
        if not self.announced:
            self.announce(order)
        for layer in order:
            with self.lease(layer):
                pass

    @contextmanager
    def _open(self, layer: int, slot: Tensor) -> Iterator[Lease]:
        """Hold the layer that lies in `slot`, with its quantised weights expanded."""
        stored = self._in_slots[layer]
        assert not self._packed or slot.data_ptr() % VECTOR == 0, (
            "a slot begins at an address that kernels refuse"
        )
        buffers = self._expanded[layer >= self.num_visited]
        expanded = buffers.take() if stored.expansions else None
        try:
            if expanded is not None:
                began = self._clock()
                with self.trace.span("expand", stored.called(layer), nbytes=stored.expanded_bytes):
                    expand_into(expanded, slot, stored)
                self._counters.seconds_expanding += self._clock() - began
            self._open_leases[layer] = Lease(layer, slot, views(slot, stored, expanded), expanded)
            yield self._open_leases[layer]
        finally:
            if (ended := self._open_leases.pop(layer, None)) is not None and not ended.has_address:
                # because a lazy device would make a copy of each view that is still there
                ended.weights.clear()
            if expanded is not None:
                buffers.give_back(expanded)

    def _part(self, layer: int) -> Upload:
        """Return a layer, or this process's part of it, on the device or on its way there."""
        return self._uploads[layer] if layer in self.residents else self._ring.take(layer)

    def _begun(self, layers: Sequence[int]) -> dict[int, tuple[Ticket, Tensor]]:
        """Start reading layers that stay on the device; return a ticket and the memory of each,
        by its number.
        """
        # all of it before any read
        memory = [self._backend.host_buffer(self.layers[layer].nbytes) for layer in layers]
        return {
            layer: (
                self._reader.submit(self.layers[layer], buffer, name=self.name_of(layer)),
                buffer,
            )
            for layer, buffer in zip(layers, memory, strict=True)
        }

    def _stays(self, layer: int) -> Tensor:
        """Return the slot of a layer that stays on the device, once the layer has been read."""
        if layer in self._arriving:
            ticket, buffer = self._arriving[layer]
            began = self._clock()
            with self.trace.span("stall: disk", self.name_of(layer)):
                ticket.wait()
            self._counters.seconds_blocked_disk += self._clock() - began
            self._resident[layer] = (
                self._backend.device_slots(buffer.numel(), 1).upload(buffer).wait()
            )
            del self._arriving[layer]
        return self._resident[layer]

    def _in_use(self) -> Collection[int]:
        """Return the layers in the ring that may not be overwritten: those on lease, or whose
        parts are being sent.
        """
        in_use = self._open_leases.keys() if self._gathered is None else self._gathered.in_flight
        return in_use - self.residents

    def name_of(self, number: int) -> str:
        """Return how messages name what is leased by this number: a layer, or a part of one."""
        return self.layers[number].called(number)

    def activity(self) -> tuple[list[int], int | None, list[int]]:
        """Return the layers on lease, the one announced next, and those being read; any thread
        may ask.
        """
        return list(self._open_leases), self._ring.first, self._ring.reading

    def stored(self, layer: int) -> dict[str, Tensor]:
        """Return the weights of a layer that is kept in host memory, as views of that memory, by
        parameter name.
        """
        assert layer in self.host_cached and not self.layers[layer].expansions, (
            "a layer is not in memory as it is used"
        )
        return views(self._host[layer], self.layers[layer])

    @contextmanager
    def rewritten(self, layer: int) -> Iterator[None]:
        """Let what `stored` returns of a layer be written to in a `with` block; leases after it
        have what was written. The layer is not on lease."""
        assert layer not in self._open_leases, "a layer was written to while it was on lease"
        self._ring.forget(layer)
        yield
        self._ring.pump()

    def rewrite(self, layer: int, written: Callable[[], None]) -> None:
        """Let what `stored` returns of a layer be written to, by another thread, until `flush`. The
        layer is not on lease. A lease of it before then begins with `written`, which blocks until
        it has changed, or raises."""
        assert layer not in self._open_leases, "a layer was written to while it was on lease"
        self._ring.forget(layer, written)

    def flush(self) -> None:
        """Wait until all is written that `rewrite` was told of; leases from now on have it."""
        self._ring.flush()

    def make_private(self, layers: Iterable[int]) -> None:
        """Keep layers of host memory in memory of this process alone from now on, where it may
        write to them.
        """
        for layer in layers:
            memory = self._backend.host_buffer(self.layers[layer].nbytes)
            with self.rewritten(layer):
                self._host[layer] = memory.copy_(self._host[layer])

    def cancel(self) -> None:
        """Forget what was announced, and wait for the reads under way. Layers that are whole are
        kept.
        """
        self._ring.cancel()
        if self._gathered is not None:
            self._gathered.cancel()

    def shrink(self) -> bool:
        """Give up the slot whose layer is wanted last, and a host buffer; return whether there was
        one to give up. One on lease is not, nor is the last. What was on its way there is fetched
        again in its turn."""
        if len(self._ring.slots) <= 2 and self.parts:  # which are on lease two at a time
            return False
        shrunk = self._ring.shrink()
        self.num_slots = len(self._ring.slots) if shrunk else self.num_slots
        return shrunk

    def load_residents(self) -> None:
        """Wait until all layers that stay on the device are there."""
        for layer in list(self._arriving):
            self._stays(layer)

    def leave(self) -> None:
        """Stop reading, also layers that stay on the device. The stream is not used afterwards;
        its reader may be.
        """
        self.cancel()
        for ticket, _ in self._arriving.values():
            ticket.cancel()

    def close(self) -> None:
        """Stop reading and drop every buffer."""
        self.leave()
        self._reader.close()
        if self._gathered is not None:
            self._gathered.close()
        self._ring.close()
        for buffers in self._expanded:
            buffers.clear()
        self._host.clear()
        self._resident.clear()
        self._arriving.clear()
        self._uploads.clear()
