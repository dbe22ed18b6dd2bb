"""What a slot keeps: layers left at a turn come back without a read or an upload, and a step costs
what the formula says; a view held after its lease is caught all the same."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_fakes import LateBackend, RecordingReader, SteppedReader, Stored, same, write_layers

from lema.stream import LayerStream, StreamCounters
from lema.stream.schedule import (
    fetched,
    fetched_per_step,
    forward_order,
    training_order,
)
from lema_cpu import CpuBackend

MOST = 10


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    return write_layers(tmp_path_factory.mktemp("layers"), MOST)


def follow(stream: LayerStream, stored: Stored, order: tuple[int, ...]) -> StreamCounters:
    """Lease the layers of an order that is announced, or will be found to be another; return the
    counters.
    """
    for layer in order:
        with stream.lease(layer) as lease:
            assert same(lease.weights, stored.contents[layer])
    return stream.counters


@pytest.mark.slow
@settings(max_examples=150)
@given(
    num_layers=st.integers(1, MOST),
    depth=st.integers(0, 4),
    seed=st.integers(0, 1000),
    ahead=st.booleans(),
    at_turn=st.booleans(),
    poison=st.booleans(),
    data=st.data(),
)
def test_a_step_costs_what_the_formula_says(
    stored: Stored,
    num_layers: int,
    depth: int,
    seed: int,
    ahead: bool,
    at_turn: bool,
    poison: bool,
    data: st.DataObject,
) -> None:
    some = st.one_of(st.just(set[int]()), st.sets(st.integers(0, num_layers - 1)))
    residents = data.draw(some)
    cached = data.draw(some)
    lowest = data.draw(st.one_of(st.just(0), st.integers(0, num_layers - 1)))
    stream = LayerStream(
        stored.layers[:num_layers],
        CpuBackend(poison=poison),
        prefetch_depth=depth,
        residents=residents,
        host_cached=cached,
        reader=SteppedReader(seed),
    )
    order = training_order(num_layers, lowest)
    turn = num_layers  # the trainer announces the next step behind the forward
    reads = len(fetched_per_step(num_layers, depth + 1, residents | cached, lowest))
    stream.announce(order * (1 + ahead))
    before = None
    for _ in range(4):
        follow(stream, stored, order[:turn])
        if at_turn:
            stream.announce(order)
        after = follow(stream, stored, order[turn:])
        if not at_turn:
            stream.announce(order)
        if before is not None:
            leases = sum(layer not in residents | cached for layer in order)
            read = after.layers_read - before.layers_read
            kept = after.layers_kept - before.layers_kept
            # A step announced late may find what would have been given up, had its first layers
            # been read ahead.
            assert read == reads if ahead or lowest == 0 else read <= reads
            assert read + kept == leases
            if lowest == 0:
                uploaded = fetched_per_step(num_layers, depth + 1, residents)
                layers = [stored.layers[layer] for layer in uploaded]
                moved = sum(layer.upload_bytes if poison else layer.nbytes for layer in layers)
                assert after.bytes_uploaded - before.bytes_uploaded == moved
        before = after
    stream.close()


@settings(max_examples=60)
@given(
    num_layers=st.integers(1, MOST),
    depth=st.integers(0, 4),
    poison=st.booleans(),
    data=st.data(),
)
def test_uploads_from_host_memory_cost_what_a_step_fetches(
    stored: Stored, num_layers: int, depth: int, poison: bool, data: st.DataObject
) -> None:
    residents = data.draw(st.sets(st.integers(0, num_layers - 1)))
    lowest = data.draw(st.integers(0, num_layers - 1))
    stream = LayerStream(
        [stored.layers[0]] * num_layers,
        CpuBackend(poison=poison),
        prefetch_depth=depth,
        residents=residents,
        host_cached=range(num_layers),
    )
    order = training_order(num_layers, lowest)
    nbytes = stored.layers[0].upload_bytes if poison else stored.layers[0].nbytes
    per_step = nbytes * len(fetched_per_step(num_layers, depth + 1, residents, lowest))
    stream.announce(order * 5)
    uploaded = []
    for _ in range(3):
        for layer in order:
            with stream.lease(layer) as lease:
                assert same(lease.weights, stored.contents[0])
        uploaded.append(stream.counters.bytes_uploaded)
    assert uploaded[2] - uploaded[1] == per_step
    assert stream.counters.layers_read == 0
    stream.close()


@settings(max_examples=100)
@given(
    order=st.lists(st.integers(0, MOST - 1), max_size=40),
    depth=st.integers(0, 4),
    seed=st.integers(0, 1000),
    residents=st.sets(st.integers(0, MOST - 1), max_size=3),
    cached=st.sets(st.integers(0, MOST - 1), max_size=3),
)
def test_any_order_announced_whole_costs_what_reuse_leaves(
    stored: Stored, order: list[int], depth: int, seed: int, residents: set[int], cached: set[int]
) -> None:
    stream = LayerStream(
        stored.layers,
        CpuBackend(poison=True),
        prefetch_depth=depth,
        residents=residents,
        host_cached=cached,
        reader=SteppedReader(seed),
    )
    stream.announce(order)
    counters = follow(stream, stored, tuple(order))
    read = fetched(order, depth + 1, residents | cached)
    assert counters.layers_read == len(read)
    assert counters.layers_kept == sum(layer not in residents | cached for layer in order) - len(
        read
    )
    stream.close()


@pytest.mark.parametrize("poison", [False, True])
def test_at_a_turn_nothing_is_read_and_nothing_uploaded(stored: Stored, poison: bool) -> None:
    reader = RecordingReader()
    stream = LayerStream(stored.layers, CpuBackend(poison=poison), prefetch_depth=2, reader=reader)
    stream.announce(forward_order(MOST))
    before = follow(stream, stored, forward_order(MOST))
    stream.announce([8, 7])
    after = follow(stream, stored, (8, 7))
    assert (after.layers_read, after.bytes_uploaded) == (before.layers_read, before.bytes_uploaded)
    assert after.layers_kept == before.layers_kept + 2
    assert len(reader.tickets) == MOST
    stream.close()


def test_reading_for_the_way_down_begins_when_the_top_is_left(stored: Stored) -> None:
    """What is kept does not hold up what comes behind it: reading is as far ahead as ever."""
    reader = RecordingReader()
    stream = LayerStream(stored.layers, CpuBackend(), prefetch_depth=2, reader=reader)
    stream.announce(training_order(MOST))
    read: list[int] = []
    for layer in training_order(MOST)[: MOST + 2]:
        with stream.lease(layer):
            read = [stored.layers.index(done) for done, _, _ in reader.tickets]
    assert read == [*range(MOST), 6, 5]  # 9 gone: 6; 8 gone: 5; 7 is on lease
    stream.close()


def test_what_is_whole_is_kept_when_the_order_is_forgotten(stored: Stored) -> None:
    reader = RecordingReader()
    stream = LayerStream(stored.layers, CpuBackend(poison=True), prefetch_depth=2, reader=reader)
    stream.announce(forward_order(MOST)[:3])
    reader.settle_all()
    stream.cancel()
    assert stream.announced == 0
    counters = follow(stream, stored, (2, 0, 1))
    assert counters.layers_read == 3
    stream.close()


def test_the_lowest_layers_stay_when_nothing_is_announced(stored: Stored) -> None:
    """A step that is announced only when it begins finds the bottom of the model where the last
    one left it.
    """
    stream = LayerStream(stored.layers, CpuBackend(), prefetch_depth=2)
    stream.announce(training_order(MOST))
    before = follow(stream, stored, training_order(MOST)).layers_read
    stream.announce(training_order(MOST))
    assert follow(stream, stored, (0, 1, 2)).layers_kept >= 3
    after = follow(stream, stored, training_order(MOST)[3:]).layers_read
    assert after - before == len(fetched_per_step(MOST, 3))
    stream.close()


# A view held after its lease


def test_released_weights_are_gone_though_the_slot_keeps_the_layer(stored: Stored) -> None:
    stream = LayerStream(stored.layers, CpuBackend(poison=True), prefetch_depth=2)
    with stream.lease(1) as first:
        held = dict(first.weights)
    with stream.lease(1) as second:
        assert stream.counters.layers_read == 1
        assert same(second.weights, stored.contents[1])
        # nor does the next lease bring them back
        assert all(bool(tensor.isnan().all()) for tensor in held.values())
    stream.close()


def test_a_layer_cached_in_host_memory_is_leased_where_it_lies(stored: Stored) -> None:
    """On this device no byte is moved: every lease is at the same address."""
    stream = LayerStream(stored.layers, CpuBackend(), prefetch_depth=1, host_cached={2, 5})
    places: dict[int, set[int]] = {2: set(), 5: set()}
    for layer in training_order(MOST) * 2:
        with stream.lease(layer) as lease:
            if layer in places:
                places[layer].add(lease.slot.data_ptr())
    assert all(len(found) == 1 for found in places.values())
    assert places[2] != places[5]
    stream.close()


def test_a_second_lease_of_a_kept_layer_holds_off_the_refill_too(tmp_path: Path) -> None:
    """The device computes as late as it may: what was queued under the second lease still sees
    the layer.
    """
    stored = write_layers(tmp_path, 3)
    backend = LateBackend()
    stream = LayerStream(stored.layers, backend, prefetch_depth=0)
    seen: list[torch.Tensor] = []
    for layer in (0, 0, 1, 1, 2):
        with stream.lease(layer) as lease:
            weight = lease.weights["weight"]
            backend.compute(lambda weight=weight: seen.append(weight.clone()))  # type: ignore[misc]
    backend.synchronize()
    expected = [stored.contents[layer]["weight"] for layer in (0, 0, 1, 1, 2)]
    assert all(torch.equal(found, wanted) for found, wanted in zip(seen, expected, strict=True))
    assert stream.counters.layers_read == 3
    stream.close()


def test_of_two_empty_slots_the_one_computed_with_longest_ago_is_refilled_first(
    stored: Stored,
) -> None:
    stream = LayerStream(stored.layers, CpuBackend(poison=True), prefetch_depth=2)
    follow(stream, stored, (0, 1, 2, 1))
    before = {slot.layer: slot for slot in stream._ring.slots}
    # they are read at once into the buffers of 2 and 1, whose slots become empty
    stream.announce([5, 6])
    follow(stream, stored, (5, 6))
    after = {slot.layer: slot for slot in stream._ring.slots}
    assert after[5] is before[2]
    assert after[6] is before[1]
    stream.close()
