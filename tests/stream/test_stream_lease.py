"""Leases: whatever is announced, nested, cancelled or read late, a lease holds its layer and
nothing is lost.
"""

from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_fakes import LateBackend, RecordingReader, SteppedReader, Stored, same, write_layers

from lema.stream import LayerStream
from lema.stream.placement import PAGE, LayerBytes
from lema.stream.reader import LayerReader
from lema.stream.schedule import fetched, forward_order, training_order
from lema.stream.workers import Ticket
from lema_cpu import CpuBackend

NUM_LAYERS = 6
LAYER = st.integers(0, NUM_LAYERS - 1)
ANNOUNCE = st.tuples(st.just("announce"), st.lists(LAYER, max_size=2 * NUM_LAYERS))
FOLLOW = st.tuples(st.just("follow"), st.integers(1, 2 * NUM_LAYERS))
LEASE = st.tuples(st.just("lease"), st.lists(LAYER, min_size=1, max_size=2))
FAIL = st.tuples(st.just("fail"), LAYER)
CANCEL = st.tuples(st.just("cancel"), st.none())
COURSES = st.lists(st.one_of(ANNOUNCE, FOLLOW, LEASE, FAIL, CANCEL), max_size=12)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    return write_layers(tmp_path_factory.mktemp("layers"), NUM_LAYERS)


class Caller:
    """Training code: leases layers, nested or not, and looks at the weights when they come and
    before they go.
    """

    def __init__(self, stored: Stored, stream: LayerStream, reader: SteppedReader) -> None:
        self.stored = stored
        self.stream = stream
        self.reader = reader
        self.ahead: list[int] = []

    def announce(self, order: list[int]) -> None:
        self.stream.announce(order)
        self.ahead += [layer for layer in order if layer not in self.stream.residents]

    def follow(self, steps: int) -> None:
        """Lease what was announced."""
        for layer in self.ahead[:steps]:
            self.lease([layer])

    def lease(self, layers: list[int]) -> None:
        with ExitStack() as stack:
            leases = [stack.enter_context(self.stream.lease(layer)) for layer in layers]
            for layer in dict.fromkeys(layers):  # what is on lease is leased again for nothing
                self.leased(layer)
            for _ in range(2):
                for lease in leases:
                    assert same(lease.weights, self.stored.contents[lease.layer])
                self.reader.some_steps()

    def leased(self, layer: int) -> None:
        if layer not in self.stream.residents:
            self.ahead = self.ahead[1:] if self.ahead[:1] == [layer] else []

    def fail(self, layer: int) -> None:
        """Raise while a layer is on lease."""
        with pytest.raises(ZeroDivisionError), self.stream.lease(layer):
            raise ZeroDivisionError
        self.leased(layer)

    def cancel(self, _: None) -> None:
        self.stream.cancel()
        self.ahead = []


@pytest.mark.slow
@settings(max_examples=150)
@given(
    course=COURSES,
    seed=st.integers(0, 1000),
    depth=st.integers(1, 4),
    residents=st.sets(LAYER),
    host_cached=st.one_of(st.just(set[int]()), st.sets(LAYER)),
    poison=st.booleans(),
)
def test_a_lease_holds_its_layer_whatever_went_before(
    stored: Stored,
    course: list[Any],
    seed: int,
    depth: int,
    residents: set[int],
    host_cached: set[int],
    poison: bool,
) -> None:
    reader = SteppedReader(seed)
    stream = LayerStream(
        stored.layers,
        CpuBackend(poison=poison),
        prefetch_depth=depth,
        residents=residents,
        host_cached=host_cached,
        reader=reader,
    )
    caller = Caller(stored, stream, reader)
    stay = [stored.layers[layer] for layer in residents]

    def ahead() -> list[Any]:
        return [ticket for ticket in reader.pending if ticket.layer not in stay]

    for action, argument in course:
        getattr(caller, action)(argument)
        assert len(ahead()) <= depth + 1
        assert stream.announced == len(caller.ahead)
    stream.cancel()
    assert stream.announced == 0 and not [ticket for ticket in ahead() if ticket.begun]
    # Nothing was lost on the way: as many layers can be held at once as there are slots.
    streamed = [layer for layer in range(NUM_LAYERS) if layer not in residents]
    caller.lease(streamed[: depth + 1] + sorted(residents))
    stream.close()


@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize(
    "host_cached", [set(), {1, 4}, set(range(NUM_LAYERS))], ids=["none", "two", "all"]
)
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_real_threads_bring_every_layer_of_many_passes(
    stored: Stored, depth: int, host_cached: set[int], poison: bool
) -> None:
    backend = CpuBackend(poison=poison)
    stream = LayerStream(
        stored.layers, backend, prefetch_depth=depth, residents={2}, host_cached=host_cached
    )
    order = training_order(NUM_LAYERS) * 8
    stream.announce(order)
    for layer in order:
        with stream.lease(layer) as lease:
            assert lease.layer == layer
            assert same(lease.weights, stored.contents[layer])
    assert stream.announced == 0
    stream.close()


def memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_nothing_is_read_into_a_slot_on_lease(stored: Stored, depth: int) -> None:
    """On this device the host buffer is the slot, so a read under way shows where it would
    refill.
    """
    reader = RecordingReader()
    stream = LayerStream(stored.layers, CpuBackend(), prefetch_depth=depth, reader=reader)
    order = training_order(NUM_LAYERS) * 2
    stream.announce(order)
    for layer in order:
        before = len(reader.tickets)
        with stream.lease(layer) as lease:
            begin, end = memory_of(lease.slot)
            reader.settle_all()
            assert same(lease.weights, stored.contents[layer])
            for _, buffer, _ in reader.tickets[before:]:
                start, stop = memory_of(buffer)
                assert stop <= begin or end <= start
    stream.close()


def test_released_weights_are_gone(stored: Stored) -> None:
    """The poisoned backend: a use after release reads NaN, and no lease sees another's."""
    stream = LayerStream(stored.layers, CpuBackend(poison=True), prefetch_depth=2)
    with stream.lease(1) as lease:
        kept = dict(lease.weights)
    assert all(bool(tensor.isnan().all()) for tensor in kept.values())
    stream.close()


# The order


def test_reading_is_as_far_ahead_as_the_prefetch_depth(stored: Stored) -> None:
    for depth in (1, 2, 4):
        reader = RecordingReader()
        stream = LayerStream(stored.layers, CpuBackend(), prefetch_depth=depth, reader=reader)
        stream.announce(forward_order(NUM_LAYERS))
        for layer in range(NUM_LAYERS):
            with stream.lease(layer):
                begun = [stored.layers.index(read) for read, _, _ in reader.tickets]
                assert begun == list(range(min(NUM_LAYERS, layer + depth + 1)))
            # the slot is not left idle
            assert len(reader.tickets) == min(NUM_LAYERS, layer + depth + 2)
        stream.close()


def test_orders_announced_one_after_the_other_are_one_order(stored: Stored) -> None:
    stream = LayerStream(stored.layers, CpuBackend(), prefetch_depth=2)
    stream.announce([0, 1])
    stream.announce([2])
    assert stream.announced == 3
    for layer in range(3):
        with stream.lease(layer) as lease:
            assert same(lease.weights, stored.contents[layer])
    assert stream.announced == 0
    assert stream.counters.layers_read == 3
    stream.close()


def test_another_order_than_the_announced_one_starts_afresh(stored: Stored) -> None:
    stream = LayerStream(stored.layers, CpuBackend(poison=True), prefetch_depth=2)
    stream.announce(forward_order(NUM_LAYERS))
    with stream.lease(4) as lease:
        assert same(lease.weights, stored.contents[4])
    assert stream.announced == 0
    stream.announce([4, 3])
    for layer in (4, 3):
        with stream.lease(layer) as lease:
            assert same(lease.weights, stored.contents[layer])
    stream.close()


def test_a_layer_on_lease_is_leased_again_for_nothing(stored: Stored) -> None:
    stream = LayerStream(stored.layers, CpuBackend(poison=True), prefetch_depth=1)
    stream.announce([0, 1])
    with stream.lease(0) as outer:
        counters = stream.counters
        with stream.lease(0) as inner:
            assert inner is outer
        assert same(outer.weights, stored.contents[0])  # the inner lease did not end the outer
        after = stream.counters
        assert (after.leases, after.layers_read) == (counters.leases, counters.layers_read)
    assert stream.announced == 1
    with stream.lease(1) as lease:
        assert same(lease.weights, stored.contents[1])
    stream.close()


def test_more_leases_than_slots_are_refused_and_none_is_lost(stored: Stored) -> None:
    stream = LayerStream(stored.layers, CpuBackend(), prefetch_depth=1, residents={5})
    with stream.lease(0) as first, stream.lease(1) as second:
        with pytest.raises(AssertionError, match="more layers are on lease"), stream.lease(2):
            pass
        with stream.lease(5) as resident:  # takes no slot
            assert same(resident.weights, stored.contents[5])
        assert same(first.weights, stored.contents[0]) and same(second.weights, stored.contents[1])
    with stream.lease(2) as lease:
        assert same(lease.weights, stored.contents[2])
    stream.close()


def test_cancelling_forgets_the_order_and_keeps_the_lease(stored: Stored) -> None:
    stream = LayerStream(stored.layers, CpuBackend(poison=True), prefetch_depth=2)
    stream.announce(forward_order(NUM_LAYERS))
    with stream.lease(0) as lease:
        stream.cancel()
        assert stream.announced == 0
        assert same(lease.weights, stored.contents[0])
        stream.announce([3])
    with stream.lease(3) as lease:
        assert same(lease.weights, stored.contents[3])
    stream.close()


# A device with a queue


@settings(max_examples=60)
@given(
    orders=st.lists(st.lists(LAYER, min_size=1, max_size=8), min_size=1, max_size=4),
    stray=st.lists(LAYER, max_size=3),
    seed=st.integers(0, 1000),
    depth=st.integers(1, 3),
    residents=st.sets(LAYER, max_size=3),
    host_cached=st.sets(LAYER, max_size=3),
)
def test_no_host_buffer_is_refilled_before_the_device_has_copied_it(
    stored: Stored,
    orders: list[list[int]],
    stray: list[int],
    seed: int,
    depth: int,
    residents: set[int],
    host_cached: set[int],
) -> None:
    """The device copies at the last moment, so a buffer overwritten early gives another layer's
    numbers.
    """
    backend = LateBackend()
    reader = SteppedReader(seed)
    stream = LayerStream(
        stored.layers,
        backend,
        prefetch_depth=depth,
        residents=residents,
        host_cached=host_cached,
        reader=reader,
    )
    computed: list[tuple[int, dict[str, torch.Tensor]]] = []

    def compute(layer: int, weights: dict[str, torch.Tensor]) -> None:
        backend.compute(
            lambda: computed.append(
                (layer, {name: value.clone() for name, value in weights.items()})
            )
        )

    leased = []
    for order in orders:
        stream.announce(order)
        for layer in (*order, *stray):
            leased.append(layer)
            with stream.lease(layer) as lease:
                compute(layer, lease.weights)
    stream.close()
    backend.synchronize()
    assert [layer for layer, _ in computed] == leased
    assert all(same(weights, stored.contents[layer]) for layer, weights in computed)


def test_a_read_cancelled_before_it_began_does_not_free_its_buffer(stored: Stored) -> None:
    """Its buffer still feeds a copy under way: whoever gets it next must wait for that copy."""
    backend = LateBackend()
    reader = SteppedReader(0)
    stream = LayerStream(stored.layers, backend, prefetch_depth=1, reader=reader)
    results = []
    with stream.lease(0) as first:
        backend.compute(lambda: results.append(first.weights["weight"].clone()))
    reader.chance.random = lambda: 1.0  # type: ignore[method-assign] # no read goes on by itself
    stream.announce([1, 2])
    assert [ticket.begun for ticket in reader.pending if ticket.before] == [False]
    stream.cancel()
    assert not reader.pending
    for layer in (3, 4):
        with stream.lease(layer):
            pass
    backend.synchronize()
    assert torch.equal(results[0], stored.contents[0]["weight"])
    stream.close()


class HeldReader(LayerReader):
    """Reads nothing of a layer before its turn comes, by the place of the layer in the order of
    reading.
    """

    def __init__(self, count: int) -> None:
        super().__init__(threads=count)
        self.turns = [Event() for _ in range(count)]
        self.submitted = 0

    def submit(
        self, layer: LayerBytes, buffer: torch.Tensor, before: Any = None, *, name: str = "weights"
    ) -> Ticket:
        assert before is None
        turn = self.turns[self.submitted]
        self.submitted += 1
        return super().submit(layer, buffer, turn.wait, name=name)


def test_layers_that_stay_on_the_device_are_read_while_those_before_them_compute(
    stored: Stored,
) -> None:
    reader = HeldReader(NUM_LAYERS)
    stream = LayerStream(stored.layers, CpuBackend(), residents=range(NUM_LAYERS), reader=reader)
    assert reader.submitted == NUM_LAYERS and stream.counters.bytes_read == 0
    for layer in range(NUM_LAYERS):
        reader.turns[layer].set()
        with stream.lease(layer) as lease:
            assert same(lease.weights, stored.contents[layer])
            assert stream.counters.bytes_read == sum(
                one.read_bytes for one in stored.layers[: layer + 1]
            )
    for _ in range(2):
        for layer in range(NUM_LAYERS):
            with stream.lease(layer) as lease:
                assert same(lease.weights, stored.contents[layer])
    assert reader.submitted == NUM_LAYERS
    stream.close()


def test_a_stream_that_is_left_reads_no_more_layers_that_stay_and_its_reader_goes_on(
    stored: Stored,
) -> None:
    reader = RecordingReader(threads=1)
    stream = LayerStream(stored.layers, CpuBackend(), residents=range(NUM_LAYERS), reader=reader)
    stream.leave()
    assert len(reader.tickets) == NUM_LAYERS and all(
        ticket.done() for _, _, ticket in reader.tickets
    )
    read = reader.bytes_read
    again = LayerStream(stored.layers, CpuBackend(), prefetch_depth=0, reader=reader)
    with again.lease(2) as lease:
        assert same(lease.weights, stored.contents[2])
    assert reader.bytes_read == read + stored.layers[2].read_bytes
    again.close()


# What it costs


@pytest.mark.parametrize("residents", [(), (0,), (5,), (1, 3, 5), tuple(range(NUM_LAYERS))])
@pytest.mark.parametrize(("lowest", "passes"), [(0, 1), (0, 3), (3, 1), (3, 3)])
def test_counters_say_what_passes_cost(
    stored: Stored, residents: tuple[int, ...], lowest: int, passes: int
) -> None:
    stream = LayerStream(stored.layers, CpuBackend(), prefetch_depth=2, residents=residents)
    kept = sum(stored.layers[layer].read_bytes for layer in residents)
    stream.load_residents()
    assert stream.counters.bytes_read == kept
    assert (
        stream.counters.layers_read,
        stream.counters.leases,
        stream.counters.bytes_uploaded,
    ) == (0, 0, 0)
    order = training_order(NUM_LAYERS, lowest)
    stream.announce(order * passes)
    for layer in order * passes:
        with stream.lease(layer), stream.lease(layer):
            pass
    streamed = [layer for layer in order if layer not in residents]
    read = fetched(order * passes, stream.num_slots, residents)
    counters = stream.counters
    assert counters.layers_read == len(read)
    assert counters.layers_kept == passes * len(streamed) - len(read)
    assert counters.bytes_read == kept + sum(stored.layers[layer].read_bytes for layer in read)
    uploaded = sum(stored.layers[layer].nbytes for layer in read)
    # Where reads come late, so do uploads, and a slot may by then have kept what it would have
    # given up.
    assert (
        counters.bytes_uploaded == uploaded if lowest == 0 else counters.bytes_uploaded <= uploaded
    )
    assert counters.leases == passes * len(order)
    assert counters.seconds_blocked_disk >= 0 and counters.seconds_blocked_upload >= 0
    stream.close()


def test_the_time_a_read_waits_for_a_buffer_that_is_computed_with_is_counted(
    stored: Stored,
) -> None:
    now = 0.0
    stream = LayerStream(stored.layers, CpuBackend(), prefetch_depth=1, clock=lambda: now)
    stream.announce(range(4))  # for layer 2 there is no buffer
    with stream.lease(0):
        now += 5.0
    assert stream.counters.seconds_blocked_compute == 5.0
    stream.cancel()
    now += 7.0
    with stream.lease(3):
        pass
    assert stream.counters.seconds_blocked_compute == 5.0
    stream.close()


def test_layers_in_host_memory_are_read_once_and_uploaded_where_their_slot_was_refilled(
    stored: Stored,
) -> None:
    stream = LayerStream(
        stored.layers, CpuBackend(poison=True), residents={1}, host_cached=range(NUM_LAYERS)
    )
    every = sum(layer.read_bytes for layer in stored.layers)
    order = training_order(NUM_LAYERS)
    for passes in (1, 2):
        stream.announce(order)
        for layer in order:
            with stream.lease(layer) as lease:
                assert same(lease.weights, stored.contents[layer])
        counters = stream.counters
        assert (counters.layers_read, counters.bytes_read) == (0, every)
        uploaded = fetched(order * passes, stream.num_slots, {1})
        assert counters.bytes_uploaded == sum(
            stored.layers[layer].upload_bytes for layer in uploaded
        )
        assert counters.layers_kept == 0
    stream.close()


def test_a_slot_is_as_large_as_the_largest_streamed_layer(stored: Stored) -> None:
    sizes = [layer.nbytes for layer in stored.layers]
    assert sizes[-1] > sizes[0] >= PAGE
    for residents in ((), (NUM_LAYERS - 1,), tuple(range(NUM_LAYERS))):
        stream = LayerStream(stored.layers, CpuBackend(), residents=residents)
        left = [size for layer, size in enumerate(sizes) if layer not in residents]
        assert stream.slot_bytes == max(left, default=0)
        stream.close()


def test_closing_reads_no_more_and_keeps_no_buffer(tmp_path: Path) -> None:
    layers = write_layers(tmp_path)
    reader = LayerReader()
    stream = LayerStream(layers.layers, CpuBackend(), reader=reader)
    stream.announce(forward_order(NUM_LAYERS))
    stream.close()
    assert stream.announced == 0
    with pytest.raises(RuntimeError, match="after shutdown"):
        reader.submit(layers.layers[0], torch.empty(layers.layers[0].nbytes, dtype=torch.uint8))
    stream.close()
