"""Sharded streams: whatever each process does when, all gather the same layers in the same order,
and a lease holds its layer; each process reads and uploads its part of the bytes, and no more."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_fakes import STORED, RecordingReader, SteppedReader, Stored, raw_bytes, same, share_of
from torch import Tensor

from lema.backend import Alone, Gathering, Upload
from lema.backend.hostmemory import anonymous
from lema.errors import ReadError
from lema.storage.header import TensorRecord
from lema.stream import LayerStream, StreamCounters
from lema.stream.placement import PAGE, lay_out_tensors, part_bytes, rank_share, views
from lema.stream.reader import LayerReader
from lema.stream.schedule import fetched, training_order
from lema.stream.workers import Ticket
from lema_cpu import CpuBackend

NUM_LAYERS = 6
LAYER = st.integers(0, NUM_LAYERS - 1)
ANNOUNCE = st.tuples(st.just("announce"), st.lists(LAYER, max_size=2 * NUM_LAYERS))
FOLLOW = st.tuples(st.just("follow"), st.integers(1, 2 * NUM_LAYERS))
LEASE = st.tuples(st.just("lease"), LAYER)
ACCOMPANY = st.tuples(st.just("accompany"), st.lists(LAYER, min_size=1, max_size=NUM_LAYERS))
CANCEL = st.tuples(st.just("cancel"), st.none())
COURSES = st.lists(st.one_of(ANNOUNCE, FOLLOW, LEASE, ACCOMPANY, CANCEL), max_size=10)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """Layers of some pages each, of which one tensor is cast, and one lies in a run of its own."""
    directory = tmp_path_factory.mktemp("layers")
    file = directory / "layers.bin"
    generator = torch.Generator().manual_seed(1)
    data = bytearray(52)
    layers = []
    contents = []
    for index in range(NUM_LAYERS):
        tensors = {
            "weight": torch.randn(30 + index, 100 + 70 * index, generator=generator),
            "bias": torch.randn(18 + 2 * index, generator=generator).bfloat16(),
            "cast": torch.randn(50, 61 + index, generator=generator),
            "alone": torch.randn(7, generator=generator),
        }
        records: dict[str, Any] = {}
        for name, tensor in tensors.items():
            data += bytes(12 if name == "alone" else 0)
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
                torch.bfloat16 if name == "cast" else tensor.dtype,
            )
            data += raw
        layers.append(lay_out_tensors(records))
        contents.append(tensors | {"cast": tensors["cast"].bfloat16()})
    file.write_bytes(data)
    return Stored(file, layers, contents)


@settings(max_examples=50)
@given(index=LAYER, size=st.integers(1, 9))
def test_the_parts_of_a_layer_are_the_layer(stored: Stored, index: int, size: int) -> None:
    layer = stored.layers[index]
    reader = LayerReader(threads=1)
    parts = [rank_share(layer, rank, size) for rank in range(size)]
    assert {part.nbytes for part in parts} == {part_bytes(layer.nbytes, size)}
    assert layer.nbytes <= size * parts[0].nbytes < layer.nbytes + size * PAGE
    whole = torch.empty(size * parts[0].nbytes + PAGE, dtype=torch.uint8)
    whole = whole[-whole.data_ptr() % PAGE :][: size * parts[0].nbytes]
    for part, memory in zip(parts, whole.chunk(size), strict=True):
        reader.submit(part, memory).wait()
    assert same(views(whole, layer), stored.contents[index])
    assert reader.bytes_read == layer.read_bytes == sum(part.read_bytes for part in parts)
    reader.close()


class Board:
    """What several processes, threads here, have sent: the n-th gathering of each to the n-th of
    all others.
    """

    PATIENCE = 30  # seconds, after which a process that waits for ever is an error

    def __init__(self, size: int) -> None:
        self.size = size
        self._sent: list[dict[int, Any]] = []
        self._told: list[dict[int, Any]] = []
        self._changed = threading.Condition()
        self._ended = 0

    def put(self, where: list[dict[int, Any]], number: int, rank: int, value: Any) -> None:
        with self._changed:
            while len(where) <= number:
                where.append({})
            where[number][rank] = value
            self._changed.notify_all()

    def get(self, where: list[dict[int, Any]], number: int) -> list[Any]:
        """Return what all have put there; raise if one of them has ended without."""
        with self._changed:
            while len(where[number]) < self.size:
                if self._ended or not self._changed.wait(self.PATIENCE):
                    raise RuntimeError("another process never came here")
            return [where[number][rank] for rank in range(self.size)]

    def end(self) -> None:
        with self._changed:
            self._ended += 1
            self._changed.notify_all()


class Replica(Alone):
    """One of several processes, which sends its part at once, or as late as may be."""

    def __init__(
        self, board: Board, rank: int, seed: int, *, machine: dict[int, Tensor] | None = None
    ) -> None:
        self.board = board
        self.rank = rank
        self.size = board.size
        self.chance = Random(seed)  # type: ignore[misc]
        self.local_rank, self.local_size = (rank, board.size) if machine is not None else (0, 1)  # type: ignore[misc]
        self.machine = machine
        self.num_gathered = self.num_told = self.under_way = 0

    def gather(self, upload: Upload, whole: Tensor) -> Gathering:
        assert not self.under_way, "two gatherings are under way"
        self.under_way = 1
        number = self.num_gathered
        self.num_gathered += 1
        whole.fill_(0xA5)
        sending = _Sending(self, number, upload, whole)
        if self.chance.random() < 0.3:
            sending.send()
        return sending

    def exchange(self, value: Any) -> list[Any]:
        number = self.num_told
        self.num_told += 1
        self.board.put(self.board._told, number, self.rank, value)
        return self.board.get(self.board._told, number)

    def shared_memory(self, nbytes: int) -> Tensor:
        assert self.machine is not None
        if self.rank == 0:
            self.machine[nbytes] = anonymous(nbytes)
        self.exchange(nbytes)
        return self.machine[nbytes]


class _Sending:
    def __init__(self, replica: Replica, number: int, upload: Upload, whole: Tensor) -> None:
        self.replica = replica
        self.number = number
        self.upload = upload
        self.whole = whole
        self.sent = False

    def send(self) -> None:
        if not self.sent:
            self.sent = True
            board = self.replica.board
            board.put(board._sent, self.number, self.replica.rank, self.upload.wait().clone())

    def wait(self) -> None:
        self.send()
        self.whole.copy_(torch.cat(self.replica.board.get(self.replica.board._sent, self.number)))
        self.replica.under_way = 0
        self.upload.release()


@dataclass
class Process:
    """One process: its stream, and what was announced."""

    replica: Replica
    stream: LayerStream
    reader: LayerReader
    stored: Stored
    ahead: list[int] = field(default_factory=list)

    def announce(self, order: list[int]) -> None:
        self.stream.announce(order)
        self.ahead += order

    def follow(self, steps: int) -> None:
        for layer in self.ahead[:steps]:
            self.lease(layer)

    def lease(self, layer: int) -> None:
        with self.stream.lease(layer) as lease, self.stream.lease(layer) as again:
            assert again is lease
            assert lease.layer == layer
            for _ in range(2):
                assert same(lease.weights, self.stored.contents[layer])
                for weight in lease.weights.values():
                    reference = lease.refer(weight)
                    assert reference is not None and torch.equal(lease.resolve(reference), weight)
                if isinstance(self.reader, SteppedReader):
                    self.reader.some_steps()
        self.ahead = self.ahead[1:] if self.ahead[:1] == [layer] else []

    def accompany(self, order: list[int]) -> None:
        """A process whose share is empty leases what the others do."""
        if not self.ahead:
            self.announce(order)
        if self.replica.rank % 2:
            self.stream.join_idle(order)
            for layer in order:
                self.ahead = self.ahead[1:] if self.ahead[:1] == [layer] else []
        else:
            for layer in order:
                self.lease(layer)

    def cancel(self, _: None) -> None:
        self.stream.cancel()
        self.ahead = []


def run_ranks(work: Callable[[Replica], Any], board: Board, **options: Any) -> list[Any]:
    """Run every process to its end; return what they returned, or raise what the first raised."""

    def run(rank: int) -> Any:
        try:
            return work(Replica(board, rank, seed=rank, **options))
        finally:
            board.end()

    with ThreadPoolExecutor(board.size) as pool:
        return [one.result() for one in [pool.submit(run, rank) for rank in range(board.size)]]


def open_stream(
    stored: Stored, replica: Replica, reader: LayerReader, *, poison: bool = True, **options: Any
) -> LayerStream:
    backend = CpuBackend(poison=poison)
    backend._replicas = replica
    return LayerStream(stored.layers, backend, reader=reader, **options)


@pytest.mark.slow
@settings(max_examples=100)
@given(
    course=COURSES,
    size=st.integers(2, 3),
    seed=st.integers(0, 1000),
    depth=st.integers(0, 3),
    residents=st.sets(LAYER),
    host_cached=st.one_of(st.just(set[int]()), st.sets(LAYER)),
    poison=st.booleans(),
)
def test_a_lease_holds_its_layer_in_every_process(
    stored: Stored,
    course: list[Any],
    size: int,
    seed: int,
    depth: int,
    residents: set[int],
    host_cached: set[int],
    poison: bool,
) -> None:
    """Reads end at other times in each process; were the n-th gathering not one layer's in all,
    bytes would be off.
    """
    board = Board(size)

    def work(replica: Replica) -> int:
        reader = SteppedReader(seed + replica.rank)
        options = {"prefetch_depth": depth, "residents": residents, "host_cached": host_cached}
        stream = open_stream(stored, replica, reader, poison=poison, sharded=True, **options)
        process = Process(replica, stream, reader, stored)
        for action, argument in course:
            getattr(process, action)(argument)
            assert stream.announced == len(process.ahead)
            assert len(reader.pending) <= depth + 1
        stream.cancel()
        for layer in range(NUM_LAYERS):
            process.lease(layer)
        stream.close()
        return replica.num_gathered

    assert len(set(run_ranks(work, board))) == 1


@pytest.mark.sampled(6)
@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize(
    ("depth", "residents", "host_cached"), [(1, (), ()), (2, (1, 4), (0, 3)), (3, (), range(6))]
)
@pytest.mark.parametrize("size", [2, 4])
def test_each_process_moves_its_part_of_the_bytes(
    stored: Stored,
    size: int,
    depth: int,
    residents: tuple[int, ...],
    host_cached: Collection[int],
    poison: bool,
) -> None:
    order = training_order(NUM_LAYERS)
    passes = 3
    whole = order * passes
    gathered = fetched(whole, 2)  # a layer is put together but once at a turn
    held = set(residents)
    uploaded = fetched(gathered, depth + 1, held)
    read = fetched(gathered, depth + 1, held | set(host_cached))
    once = sorted(held) + [layer for layer in host_cached if layer not in held]

    def work(replica: Replica) -> StreamCounters:
        options = {"prefetch_depth": depth, "residents": residents, "host_cached": host_cached}
        stream = open_stream(stored, replica, LayerReader(), poison=poison, sharded=True, **options)
        process = Process(replica, stream, stream._reader, stored)
        process.announce(list(whole))
        process.follow(len(whole))
        counters = stream.counters
        shares = [share_of(layer, replica.rank, size, packed=poison) for layer in stored.layers]
        parts = [part for part, _ in shares]
        assert counters.bytes_uploaded == sum(shares[layer][1] for layer in uploaded)
        assert counters.bytes_read == sum(parts[layer].read_bytes for layer in [*read, *once])
        assert stream.slot_bytes == max(
            parts[layer].nbytes for layer in range(NUM_LAYERS) if layer not in held
        )
        assert all(one.numel() == parts[layer].nbytes for layer, one in stream._host.items())
        stream.close()
        return counters

    padded = [part_bytes(layer.nbytes, size) for layer in stored.layers]
    found = run_ranks(work, Board(size))
    assert {one.leases for one in found} == {len(whole)}
    assert {one.bytes_gathered for one in found} == {
        sum((size - 1) * padded[layer] for layer in gathered)
    }
    unsharded = sum(stored.layers[layer].read_bytes for layer in [*read, *once])
    assert sum(one.bytes_read for one in found) == unsharded  # nobody reads what another reads


def test_the_next_layer_is_gathered_behind_the_computation(stored: Stored) -> None:
    """It is under way while a layer is on lease, and not before the lease."""

    def work(replica: Replica) -> list[int]:
        stream = open_stream(stored, replica, LayerReader(), sharded=True)
        order = training_order(NUM_LAYERS)
        stream.announce(order)
        if replica.rank == 0:  # one may know earlier than another what comes after this order
            stream.announce([4, 5])
        begun = [replica.num_gathered]
        for layer in order:
            with stream.lease(layer):
                begun.append(replica.num_gathered)
            assert replica.num_gathered == begun[-1]
        stream.close()
        return begun

    # At the turn the layer below the top is there still; at the end nothing is begun.
    assert run_ranks(work, Board(2)) == [[0, 2, 3, 4, 5, 6, 6, 7, 8, 9, 10, 10]] * 2


def test_a_part_being_sent_is_not_overwritten(stored: Stored) -> None:
    """What arrives meanwhile waits for another slot, or another buffer."""

    def work(replica: Replica) -> None:
        reader = SteppedReader(replica.rank)
        stream = open_stream(stored, replica, reader, sharded=True, prefetch_depth=1)
        process = Process(replica, stream, reader, stored)
        process.announce([0, 1, 2, 3, 4, 5])
        for _ in range(4):
            process.follow(1)
            while reader.pending:
                reader.pending[0].step()
            process.announce([0])
        process.follow(6)
        stream.close()

    for _ in range(5):
        run_ranks(work, Board(2))


def test_after_a_cancel_reading_begins_with_what_is_announced(stored: Stored) -> None:
    """Layers that would have been there by now are not, and those that are there are not read."""

    def work(replica: Replica) -> None:
        reader = RecordingReader()
        stream = open_stream(stored, replica, reader, sharded=True)
        process = Process(replica, stream, reader, stored)
        process.announce([0, 1, 2, 3, 4, 5])
        process.follow(1)
        process.cancel(None)
        before = len(reader.tickets)
        process.announce([1, 0, 5, 4])
        asked = [
            share_of(stored.layers[layer], replica.rank, 2, packed=True)[0] for layer in (5, 4)
        ]
        assert [layer for layer, _, _ in reader.tickets[before:]] == asked
        process.follow(4)
        stream.close()

    run_ranks(work, Board(2))


def test_sharded_leases_are_one_at_a_time(stored: Stored) -> None:
    def work(replica: Replica) -> None:
        stream = open_stream(stored, replica, LayerReader(), sharded=True)
        with stream.lease(0), pytest.raises(AssertionError, match="more than one"), stream.lease(1):
            pass
        stream.close()

    run_ranks(work, Board(2))


def test_one_process_shards_nothing(stored: Stored) -> None:
    stream = LayerStream(stored.layers, CpuBackend(), sharded=True)
    assert not stream.sharded
    stream.join_idle([0, 1])
    assert stream.counters.leases == stream.announced == 0
    stream.close()


def test_a_read_that_fails_at_the_start_fails_in_every_process(stored: Stored) -> None:
    def work(replica: Replica) -> str:
        reader = BrokenReader() if replica.rank == 1 else LayerReader()
        with pytest.raises(ReadError) as raised:
            open_stream(stored, replica, reader, sharded=True, residents={2})
        reader.close()
        return raised.value.what

    first, second = run_ranks(work, Board(2))
    assert second == "the disk is gone" and first == "process 1: the disk is gone"


class BrokenReader(LayerReader):
    def submit(self, *_: Any, **__: Any) -> Ticket:
        def fail() -> None:
            raise ReadError("the disk is gone")

        ticket = Ticket([fail])
        self._workers.submit(ticket)
        return ticket


@pytest.mark.parametrize("poison", [False, True])
def test_the_processes_of_a_machine_keep_one_copy(stored: Stored, poison: bool) -> None:
    """Each reads its share into memory that all have; nothing else is read, and each finds all
    layers there.
    """
    cached = (0, 1, 3, 4, 5)
    size = 2
    machine: dict[int, Tensor] = {}

    def work(replica: Replica) -> tuple[int, dict[int, int]]:
        options = {"residents": {2}, "host_cached": cached, "poison": poison}
        stream = open_stream(stored, replica, LayerReader(), **options)
        for layer in training_order(NUM_LAYERS):
            with stream.lease(layer) as lease:
                assert same(lease.weights, stored.contents[layer])
        places = {layer: one.data_ptr() for layer, one in stream._host.items()}
        read = stream.counters.bytes_read
        stream.close()
        return read, places

    with pytest.MonkeyPatch.context() as patch:
        # other threads here have the same mapping
        patch.setattr("lema.stream.preload.read_only", lambda _: None)
        (read, places), (others, other_places) = run_ranks(work, Board(size), machine=machine)
    assert places == other_places and len(machine) == 1
    assert all(place % PAGE == 0 for place in places.values())
    sizes = [layer.read_bytes for layer in stored.layers]
    assert read == sizes[2] + sum(sizes[layer] for layer in cached[::2])
    assert others == sizes[2] + sum(sizes[layer] for layer in cached[1::2])
