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
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from lema.backend import Backend, Upload
from lema.backend.registry import in_host_memory
from lema.backend.trace import NO_TRACE, NoTrace
from lema.stream.counters import StreamCounters, StreamMeter
from lema.stream.gather import GatheredBuffers
from lema.stream.layouts import stream_layout
from lema.stream.lease import Lease, OpenLeases
from lema.stream.placement import (
    LayerBytes,
    vector_aligned,
    views,
)
from lema.stream.preload import fill
from lema.stream.reader import LayerReader
from lema.stream.residents import ResidentLayers, begin_reading
from lema.stream.ring import LayerRing
from lema.stream.schedule import ExpertGroup, forward_order, in_parts, training_order, with_parts

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
        self._backend = backend
        self._meter = StreamMeter(trace, clock)
        self._reader = reader or LayerReader(trace=trace)
        self.num_slots = prefetch_depth + 1
        replicas = backend.replicas
        sharded = sharded and replicas.size > 1
        layout = stream_layout(self.layers, backend, sharded=sharded)
        self._lazy = layout.lazy
        self._leases = OpenLeases(
            layout.in_slots, self.num_visited, backend, self._meter, aligned=layout.packed
        )
        self._gathered: GatheredBuffers | None = None
        if sharded:
            parts_of = [part.nbytes for part in layout.layouts]
            self._gathered = GatheredBuffers(parts_of, backend, self._part, self._meter)
        stay = with_parts(residents, self.parts)
        late = replicas.size == 1 and backend.memory().shared and not layout.lazy
        arriving = begin_reading(sorted(stay), self.layers, backend, self._reader) if late else {}
        uploads, self._host = fill(
            stay - arriving.keys(),
            with_parts(host_cached, self.parts) - stay,
            layout.stored,
            backend,
            self._reader,
            shared=not sharded,
            layouts=layout.layouts,
            loaded_layers=loaded_layers,
        )
        self._resident = ResidentLayers(
            arriving,
            uploads,
            released=sharded or layout.lazy,
            backend=backend,
            meter=self._meter,
        )
        # the slots that the layers which are not residents take turns in
        self._ring = LayerRing(
            layout.stored,
            [layer for layer in range(len(self.layers)) if layer not in stay],
            self._host,
            backend,
            num_slots=self.num_slots,
            layouts=layout.layouts,
            reader=self._reader,
            in_use=self._in_use,
            meter=self._meter,
        )

    @property
    def num_visited(self) -> int:
        """How many are visited: layers, and pieces of the head."""
        return len(self.layers) - sum(map(len, self.groups.values()))

    @property
    def residents(self) -> frozenset[int]:
        """The layers that stay on the device."""
        return self._resident.numbers

    @property
    def host_cached(self) -> frozenset[int]:
        """The layers that stay in host memory."""
        return frozenset(self._host)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: the largest streamed layer; sharded, its part."""
        return self._ring.slot_bytes

    @property
    def sharded(self) -> bool:
        """Whether this process has but a part of every layer."""
        return self._gathered is not None

    @property
    def trace(self) -> NoTrace:
        """Has every read, upload and computation with its time."""
        return self._meter.trace

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
        return replace(self._meter.counters, bytes_read=self._reader.bytes_read)

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

    def calling(self, before_lease: Callable[[], None]) -> AbstractContextManager[None]:
        """Call a function in a `with` block before a layer is leased that is not on lease already;
        what it raises, the lease does.
        """
        return self._leases.calling(before_lease)

    @contextmanager
    def lease(self, layer: int) -> Iterator[Lease]:
        """Hold a layer's weights on the device for the length of a `with` block; one on lease is
        leased again for nothing. `ReadError`: reading this layer, or any layer being prefetched,
        failed."""
        if layer in self._leases.by_layer:
            yield self._leases.by_layer[layer]
            return
        self._leases.prepare()
        # of any layer, because training should stop now and not when its turn comes
        self._ring.raise_failures()
        self._meter.counters.count_lease()
        if self._gathered is not None:
            assert not self._leases.by_layer, "more than one layer is on lease at once"
            # an order other than the one announced starts afresh
            if not self._gathered.begin(layer):
                self.cancel()
                self.announce([layer])
                self._gathered.begin(layer)
            with self._gathered.lease(layer) as slot, self._leases.hold(layer, slot) as lease:
                yield lease
        elif layer in self.residents and not self._lazy:
            with self._leases.hold(layer, self._resident.slot(layer)) as lease:
                yield lease
        else:
            upload = self._part(layer)
            try:
                with self._leases.hold(layer, upload.wait()) as lease:
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

    def _part(self, layer: int) -> Upload:
        """Return a layer, or this process's part of it, on the device or on its way there."""
        return self._resident.upload(layer) if layer in self.residents else self._ring.take(layer)

    def _in_use(self) -> Collection[int]:
        """Return the layers in the ring that may not be overwritten: those on lease, or whose
        parts are being sent.
        """
        if self._gathered is None:
            return self._leases.by_layer.keys() - self.residents
        return self._gathered.in_flight - self.residents

    def name_of(self, number: int) -> str:
        """Return how messages name what is leased by this number: a layer, or a part of one."""
        return self.layers[number].called(number)

    def activity(self) -> tuple[list[int], int | None, list[int]]:
        """Return the layers on lease, the one announced next, and those being read; any thread
        may ask.
        """
        return list(self._leases.by_layer), self._ring.first, self._ring.reading

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
        assert layer not in self._leases.by_layer, "a layer was written to while it was on lease"
        self._ring.forget(layer)
        yield
        self._ring.pump()

    def rewrite(self, layer: int, written: Callable[[], None]) -> None:
        """Let what `stored` returns of a layer be written to, by another thread, until `flush`. The
        layer is not on lease. A lease of it before then begins with `written`, which blocks until
        it has changed, or raises."""
        assert layer not in self._leases.by_layer, "a layer was written to while it was on lease"
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
        self._resident.load()

    def leave(self) -> None:
        """Stop reading, also layers that stay on the device. The stream is not used afterwards;
        its reader may be.
        """
        self.cancel()
        self._resident.cancel()

    def close(self) -> None:
        """Stop reading and drop every buffer."""
        self.leave()
        self._reader.close()
        if self._gathered is not None:
            self._gathered.close()
        self._ring.close()
        self._leases.clear()
        self._host.clear()
        self._resident.clear()
