"""Chunks of hidden states and of boundaries come to the device before the compute of the chunk in
front of them, a few at a time, and nothing is read before it is there.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from stream_fakes import LateBackend
from torch import Tensor

from lema.activations.boundaries import NUM_BUFFERS, TierName
from lema.activations.chunks.copies import NUM_LEAVING, NUM_SLOTS
from lema.activations.chunks.cuts import Cut, Cuts
from lema.activations.chunks.hostpool import HostPool
from lema.activations.stepstore import BoundaryArena, BoundaryChunks
from lema.backend import Backend, DeviceSlots, Download, SlotLayout, Upload
from lema.storage.spillfile import whole_blocks
from lema_cpu import CpuBackend

SIZE = 4
LENGTH = 22  # tokens, the last chunk of which is shorter
ROWS = 3


def cuts_of(length: int, *, shared: int = 0) -> tuple[Cut, ...]:
    """Return chunks of tokens; of the first `shared` chunks the first row alone is computed."""
    starts = range(0, length, SIZE)
    return tuple(
        Cut(slice(1) if number < shared else slice(None), slice(start, min(start + SIZE, length)))
        for number, start in enumerate(starts)
    )


class Recording(CpuBackend):
    """Copies at once, to memory that is NaN when it is released; notes what is queued, and how
    many chunks are on the device at once.
    """

    def __init__(self) -> None:
        super().__init__(poison=True)
        self.events: list[str] = []
        self.slots = 0
        self.most_slots = 0
        self.leaving = 0
        self.most_leaving = 0

    def device_slots(self, nbytes: int, count: int) -> DeviceSlots:
        return _RecordingSlots(self, super().device_slots(nbytes, count))

    def download(self, source: Tensor, target: Tensor) -> Download:
        self.events.append("download")
        self.leaving += 1
        self.most_leaving = max(self.most_leaving, self.leaving)
        return _RecordingDownload(self, super().download(source, target))


class _RecordingSlots:
    def __init__(self, backend: Recording, slots: DeviceSlots) -> None:
        self.backend = backend
        self.slots = slots

    def upload(self, source: Tensor, layout: SlotLayout | None = None) -> Upload:
        self.backend.events.append("upload")
        self.backend.slots += 1
        self.backend.most_slots = max(self.backend.most_slots, self.backend.slots)
        return _RecordingUpload(self.backend, self.slots.upload(source, layout))


class _RecordingUpload:
    def __init__(self, backend: Recording, upload: Upload) -> None:
        self.backend = backend
        self.upload = upload
        self.wait = upload.wait
        self.drained = upload.drained

    def release(self) -> None:
        self.backend.slots -= 1
        self.upload.release()


class _RecordingDownload:
    def __init__(self, backend: Recording, download: Download) -> None:
        self.backend = backend
        self.download = download
        self.landed = download.landed

    def release(self) -> None:
        self.backend.leaving -= 1
        self.download.release()


def state_in(pool: HostPool, rows: int = ROWS, length: int = LENGTH) -> Tensor:
    state = pool.take_zeros((rows, length, 8), torch.float32)
    return state.copy_(torch.randn(rows, length, 8))


@pytest.mark.parametrize("backwards", [False, True])
def test_a_chunk_is_on_its_way_before_the_one_in_front_of_it_is_computed(backwards: bool) -> None:
    backend = Recording()
    pool = HostPool(backend)
    state = state_in(pool)
    result = pool.take(state.shape, state.dtype)
    cuts = cuts_of(LENGTH, shared=2)
    order = [*range(len(cuts))][:: -1 if backwards else 1]
    with pool.uploads(state, cuts, order) as chunks, pool.downloads(result) as put:
        for number in order:
            with chunks.chunk(number) as chunk:
                backend.events.append("compute")
                assert torch.equal(chunk, cuts[number].of(state))
                put(Cut(slice(None), cuts[number].tokens), chunk * 2)
    uploads = 0
    computed = 0
    for event in backend.events:
        uploads += event == "upload"
        computed += event == "compute"
        if event == "compute":
            assert uploads == min(len(cuts), computed + 1)
    assert backend.most_slots == NUM_SLOTS
    assert backend.most_leaving == NUM_LEAVING * ROWS
    assert backend.slots == backend.leaving == 0
    for number, cut in enumerate(cuts):
        expected = state[:1] if number < 2 else state
        assert torch.equal(
            result[:, cut.tokens], 2 * expected[:, cut.tokens].expand_as(result[:, cut.tokens])
        )


def double(chunk: Tensor, target: Tensor) -> None:
    target.copy_(chunk * 2)


def test_nothing_is_read_before_it_is_there_on_a_device_that_works_as_late_as_it_may() -> None:
    """Results go where the input was, chunk for chunk, as gradients do."""
    backend = LateBackend()
    pool = HostPool(backend)
    state = state_in(pool)
    before = state.clone()
    cuts = cuts_of(LENGTH)
    for _ in range(3):
        order = [*reversed(range(len(cuts)))]
        with pool.uploads(state, cuts, order) as chunks, pool.downloads(state) as put:
            for number in order:
                with chunks.chunk(number) as chunk:
                    result = torch.empty_like(chunk)
                    backend.compute(partial(double, chunk, result))
                    put(cuts[number], result)
    pool.synchronize(state)
    assert torch.equal(state, before * 8)


def test_memory_that_is_used_again_is_written_by_the_host_after_all_copies() -> None:
    backend = LateBackend()
    pool = HostPool(backend)
    state = state_in(pool)
    seen = list[Tensor]()
    expected = state.clone()
    cuts = cuts_of(LENGTH)
    with pool.uploads(state, cuts, range(len(cuts))) as chunks:
        for number in range(len(cuts)):
            with chunks.chunk(number) as chunk:
                seen.append(torch.empty_like(chunk))
                backend.compute(partial(double, chunk, seen[-1]))
    pool.give(state)
    again = pool.take_zeros(state.shape, state.dtype)
    assert again.data_ptr() == state.data_ptr()
    backend.synchronize()
    for number, cut in enumerate(cuts):
        assert torch.equal(seen[number], 2 * cut.of(expected))


def test_what_is_not_in_the_pool_is_taken_where_it_is() -> None:
    backend = Recording()
    pool = HostPool(backend)
    state = torch.randn(ROWS, LENGTH, 8)
    cuts = cuts_of(LENGTH)
    with pool.uploads(state, cuts, range(len(cuts))) as chunks:
        for number, cut in enumerate(cuts):
            with chunks.chunk(number) as chunk:
                assert chunk.data_ptr() == cut.of(state).data_ptr()
    assert not backend.events


LAYERS = range(3, 7)
TIERS: list[TierName] = ["host", "disk"]


@pytest.fixture
def arena_on(tmp_path: Path) -> Iterator[Callable[..., BoundaryArena]]:
    made = []

    def make(tier: TierName, backend: Backend) -> BoundaryArena:
        made.append(BoundaryArena(backend, tier, tmp_path / "aside"))
        return made[-1]

    yield make
    for arena in made:
        arena.close()


def read_twice(length: int, *, shared: int = 0) -> Cuts:
    """Return cuts of a layer whose backward reads all chunks but the last in order, and then all in
    reverse."""
    chunks = cuts_of(length, shared=shared)
    numbers = range(len(chunks))
    return Cuts(chunks, (*numbers[:-1], *reversed(numbers)))


def in_reverse(length: int) -> Cuts:
    chunks = cuts_of(length)
    return Cuts(chunks, tuple(reversed(range(len(chunks)))))


def step_through(
    arena: BoundaryArena,
    hidden: list[Tensor],
    cuts: dict[tuple[int, int], Cuts],
    see: Callable[[tuple[int, int, int], Tensor], None],
    *,
    again: bool = False,
) -> None:
    step = arena.step(hidden, LAYERS, cuts)
    for layer in LAYERS:
        for index, state in enumerate(hidden):
            for number, cut in enumerate(cuts[layer, index].chunks):
                slot = cut.of(state + layer)
                with step.keeping(layer, index, number, slot) as layer_input:
                    assert torch.equal(layer_input, cut.of(state + layer))
                slot.fill_(torch.nan)  # its memory is used again
            step.end_chunks()
    for last in (False, True)[not again :]:
        for layer in reversed(LAYERS):
            for index in range(len(hidden)):
                chunks = BoundaryChunks(step, layer, index, again=not last)
                for number in cuts[layer, index].order:
                    with chunks.chunk(number) as chunk:
                        see((layer, index, number), chunk)
    assert step.done


def mixed_cuts(*lengths: int) -> dict[tuple[int, int], Cuts]:
    """Return cuts of layers of both kinds in turns."""
    return {
        (layer, index): read_twice(length, shared=index) if layer % 2 else in_reverse(length)
        for layer in LAYERS
        for index, length in enumerate(lengths)
    }


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("again", [False, True])
def test_chunks_of_boundaries_come_back_as_they_were_kept(
    arena_on: Callable[..., BoundaryArena], tier: TierName, again: bool
) -> None:
    arena = arena_on(tier, CpuBackend(poison=True))
    for lengths in ((22, 9), (3, 40), (22, 4)):
        hidden = [torch.randn(2, length, 8) for length in lengths]
        cuts = mixed_cuts(*lengths)

        def see(key: tuple[int, int, int], chunk: Tensor) -> None:
            layer, index, number = key
            cut = cuts[layer, index].chunks[number]  # noqa: B023 - called before the next round
            assert torch.equal(chunk, cut.of(hidden[index] + layer))  # noqa: B023 - likewise

        step_through(arena, hidden, cuts, see, again=again)


def add_up(
    backend: LateBackend,
    sums: dict[tuple[int, int, int], Tensor],
    key: tuple[int, int, int],
    kept: Tensor,
) -> None:
    """Queue a sum of what was kept."""

    def add() -> None:
        sums[key] = kept.sum()

    backend.compute(add)


@pytest.mark.parametrize("tier", TIERS)
def test_chunks_of_boundaries_are_right_on_a_device_that_works_as_late_as_it_may(
    arena_on: Callable[..., BoundaryArena], tier: TierName
) -> None:
    backend = LateBackend()
    arena = arena_on(tier, backend)
    hidden = [torch.randn(2, length, 8) for length in (22, 9)]
    cuts = mixed_cuts(22, 9)
    for _ in range(2):
        sums = dict[tuple[int, int, int], Tensor]()
        add = partial(add_up, backend, sums)
        step_through(arena, hidden, cuts, add)
        backend.synchronize()
        for (layer, index, number), value in sums.items():
            cut = cuts[layer, index].chunks[number]
            assert torch.equal(value, (cut.of(hidden[index] + layer)).contiguous().sum())
        assert len(sums) == sum(len(of_layer.chunks) for of_layer in cuts.values())


@pytest.mark.parametrize("length", [24, 240])
def test_host_memory_on_the_way_to_the_disk_is_a_few_chunks_whatever_the_length(
    arena_on: Callable[..., BoundaryArena], length: int
) -> None:
    width = 1024  # a chunk of a row is whole blocks of the disk
    backend = Recording()
    arena = arena_on("disk", backend)
    hidden = [torch.randn(1, length, width)]
    cuts = {(layer, 0): read_twice(length) for layer in LAYERS}
    step_through(arena, hidden, cuts, lambda *_: None)
    chunk_bytes = whole_blocks(SIZE * width * 4)
    store = arena._storage_tier._pool._store  # type: ignore[union-attr]
    assert store.staging.counters.peak_bytes == NUM_BUFFERS * chunk_bytes
    assert backend.most_slots <= NUM_BUFFERS
    store.reserve(0)
    kept = len(LAYERS) * length // SIZE
    twice = len(LAYERS) * (length // SIZE - 1)
    # what is dropped before it was written need not be, and what is still in a buffer is not read
    few = len(LAYERS) * NUM_BUFFERS
    assert kept - few <= store.bytes_written // chunk_bytes <= kept
    assert kept + twice - 2 * few <= store.bytes_read // chunk_bytes <= kept + twice


@pytest.mark.parametrize("tier", TIERS)
def test_a_chunk_comes_back_before_the_one_in_front_of_it_is_computed(
    arena_on: Callable[..., BoundaryArena], tier: TierName
) -> None:
    """From the disk as soon as it has been read; here nobody waits for that."""
    backend = Recording()
    arena = arena_on(tier, backend)
    length = 40
    cuts = {(layer, 0): in_reverse(length) for layer in LAYERS}
    seen = list[int]()

    def see(*_: object) -> None:
        seen.append(backend.events.count("upload"))

    step_through(arena, [torch.randn(1, length, 8)], cuts, see)
    total = len(LAYERS) * length // SIZE
    if tier == "host":
        # two are on their way while one is in use
        assert seen == [min(total, number + NUM_BUFFERS) for number in range(total)]
    assert seen[-1] == total
    assert backend.most_slots <= NUM_BUFFERS
