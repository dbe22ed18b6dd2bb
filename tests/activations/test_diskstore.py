"""Activations on a disk: what comes back is what went there, nothing is left of it, and no
failure is hidden.
"""

import errno
import gc
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import torch
from hoststores import settle, taken_bytes, used_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lema.activations.diskstore import DiskPiece, DiskStore
from lema.activations.hoststore import HostPool
from lema.backend.hostmemory import anonymous
from lema.errors import DiskError, ReadError
from lema.storage.directio import BLOCK
from lema.storage.spillfile import Extents, OffloadFile

HOW = "free some space"
SHARED = Path("/dev/shm")


@pytest.fixture(params=["disk", "memory"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A directory on a file system with transfers past the page cache, and one on a file system
    without, or so.
    """
    if request.param == "disk":
        yield tmp_path
        return
    if not SHARED.is_dir():
        pytest.skip("this machine has no file system in memory")
    with tempfile.TemporaryDirectory(dir=SHARED) as name:
        yield Path(name)


def opened(directory: Path, blocks: int = 16, limit: int | None = None) -> DiskStore:
    staging = HostPool(anonymous, blocks * BLOCK, lambda: 1 << 50)
    return DiskStore(OffloadFile(directory, "activations", HOW), staging, limit)


def placed(store: DiskStore, nbytes: int) -> DiskPiece:
    place = store.allocate(nbytes)
    assert isinstance(place, DiskPiece)
    return place


class Late:
    """A copy from a device that takes effect when somebody waits for it, once."""

    def __init__(self, target: Tensor, source: Tensor) -> None:
        self.lock = threading.Lock()
        self.target = target
        self.source = source
        self.done = False

    def landed(self) -> None:
        with self.lock:
            if not self.done:
                self.target.copy_(self.source)
            self.done = True


class LateReader:
    """A copy to a device that takes effect when somebody waits for it: it must find the bytes
    then.
    """

    def __init__(self, source: Tensor, expected: Tensor, wrong: list[str]) -> None:
        self.lock = threading.Lock()
        self.source = source
        self.expected = expected
        self.wrong = wrong
        self.done = False

    def drained(self) -> None:
        with self.lock:
            if not self.done and not torch.equal(self.source, self.expected):
                self.wrong.append(f"{len(self.expected)} bytes were not what had been kept")
            self.done = True


class Kept:
    """One piece: what was kept, where, and the copies of it that may still take effect."""

    def __init__(
        self, store: DiskStore, data: Tensor, wrong: list[str], place: DiskPiece | None = None
    ) -> None:
        self.data = data
        self.wrong = wrong
        self.place = placed(store, len(data)) if place is None else place
        self.copy = Late(self.place.fill(), data)
        self.place.filled(self.copy.landed)

    def read(self) -> None:
        found = self.place.memory()
        assert found.shape == self.data.shape
        if not self.copy.done:  # the device would have it come before what is queued now
            self.copy.landed()
        self.place.used(LateReader(found, self.data, self.wrong).drained)


def data(chance: Random, nbytes: int) -> Tensor:
    return torch.frombuffer(bytearray(chance.randbytes(nbytes)), dtype=torch.uint8)


def overlap(places: list[DiskPiece]) -> bool:
    extents = sorted((place.start, place.start + place.size) for place in places)
    return any(end > start for (_, end), (start, _) in pairwise(extents))


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "keep",
                "keep",
                "keep",
                "expect",
                "read",
                "read",
                "drop",
                "drop",
                "settle",
                "empty",
                "half",
            ]
        ),
        st.integers(0, 1 << 16),
    ),
    max_size=50,
)
SIZES = (1, 700, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK - 5, 4 * BLOCK)


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(STEPS, st.sampled_from([8, 11, 40]))
def test_any_course_brings_back_what_was_kept(steps: list[tuple[str, int]], blocks: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        chance = Random(0)
        wrong = list[str]()
        kept = list[Kept]()
        store = opened(Path(name), blocks)
        for step, number in steps:
            one = kept[number % len(kept)] if kept else None
            if step == "keep":
                kept.append(Kept(store, data(chance, SIZES[number % len(SIZES)]), wrong))
                assert not overlap([other.place for other in kept])
            elif step == "settle":
                settle(store)
            elif step == "empty":  # no piece has a buffer any more
                store.staging.give(store._buffer(4 * BLOCK))
            elif step == "half":  # a copy could not be begun
                place = placed(store, 1 + number % BLOCK)
                place.fill()
                place.drop()
            elif one is not None and step == "expect":
                one.place.expect()
            elif one is not None and step == "read":
                one.read()
            elif one is not None:
                kept.remove(one)
                one.place.drop()
                one.place.drop()
            assert taken_bytes(store) >= sum(other.place.size for other in kept)
            assert store.staging.counters.peak_bytes <= blocks * BLOCK
        for one in reversed(kept):
            one.place.expect()
            one.read()
            one.place.drop()
        nothing_is_left(store)
        store.close()
        assert not wrong
        assert not list(Path(name).iterdir())


def nothing_is_left(store: DiskStore) -> None:
    store._await_dropped()
    store._await_dropped()  # copies that were to land before what was not written after all
    assert not store._in_flight
    assert not store._dropped
    assert not store._idle
    assert taken_bytes(store) == store._space.extents.end == used_bytes(store.staging) == 0


def test_bytes_come_back_from_the_disk(directory: Path) -> None:
    store = opened(directory, blocks=8)
    chance = Random(1)
    wrong = list[str]()
    kept = [Kept(store, data(chance, size), wrong) for size in SIZES * 4]
    settle(store)
    assert (
        store.bytes_written
        == taken_bytes(store)
        == store._space.file.size
        == sum(one.place.size for one in kept)
    )
    for one in reversed(kept):
        one.read()
        one.place.drop()
    assert 0 < store.bytes_read < store.bytes_written
    nothing_is_left(store)
    assert not list(directory.iterdir())
    store.close()
    assert not wrong
    assert not list(directory.iterdir())


def test_threads_share_a_store(tmp_path: Path) -> None:
    store = opened(tmp_path, blocks=12)
    wrong = list[str]()

    def work(seed: int) -> None:
        chance = Random(seed)
        kept = list[Kept]()
        for _ in range(60):
            kept.append(Kept(store, data(chance, chance.choice(SIZES)), wrong))
            if chance.random() < 0.5:
                chance.choice(kept).place.expect()
            if chance.random() < 0.7:
                chance.choice(kept).read()
            if chance.random() < 0.4:
                kept.pop(chance.randrange(len(kept))).place.drop()
        for one in kept:
            one.read()
            one.place.drop()
        done.append(seed)

    done: list[int] = []
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == [0, 1, 2, 3]
    nothing_is_left(store)
    store.close()
    assert not wrong


def test_steps_that_are_alike_use_the_same_blocks(tmp_path: Path) -> None:
    store = opened(tmp_path)
    chance = Random(2)
    sizes: set[int] = set()
    for step in range(4):
        kept = [Kept(store, data(chance, size), []) for size in SIZES]
        settle(store)
        for one in kept if step % 2 else reversed(kept):
            one.place.drop()
        sizes.add(store._space.file.size)
    assert len(sizes) == 1
    store.close()


@settings(max_examples=200)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=80))
def test_extents_never_overlap_and_free_neighbours_are_one(steps: list[tuple[bool, int]]) -> None:
    extents = Extents()
    taken = dict[int, int]()
    reserved = [0]
    for take, number in steps:
        if take:
            free = extents.end - extents.taken_bytes
            end = extents.end
            start = extents.take(number + 1, reserved.append)
            assert all(
                start + number + 1 <= other or other + size <= start
                for other, size in taken.items()
            )
            assert start == end or free > number
            taken[start] = number + 1
        elif taken:
            start = sorted(taken)[number % len(taken)]
            extents.give(start, taken.pop(start))
        assert extents.taken_bytes == sum(taken.values())
        assert extents.end == max((start + size for start, size in taken.items()), default=0)
        assert max(reserved) >= extents.end
    holes = extents.end - extents.taken_bytes
    before = sorted(taken.items())
    for start, size in before:
        extents.give(start, size)
    assert extents.end == extents.taken_bytes == 0
    assert extents.take(holes + sum(size for _, size in before) + 1, reserved.append) == 0


def test_extents_that_may_not_grow_stay_as_they_are() -> None:
    def refuse(end: int) -> None:
        raise DiskError(f"{end}")

    extents = Extents()
    extents.take(5, lambda end: None)
    with pytest.raises(DiskError, match="12"):
        extents.take(7, refuse)
    assert extents.end == extents.taken_bytes == 5


class Gate:
    """A copy that lands when it is let."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()

    def landed(self) -> None:
        self.reached.set()
        assert self.opened.wait(60)


def test_a_write_begins_when_the_bytes_have_landed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened = list[str]()
    gate = Gate()
    real = os.pwrite

    def pwrite(descriptor: int, memory: memoryview, offset: int) -> int:
        happened.append(f"written {memory[0]}")
        return real(descriptor, memory, offset)

    def landed() -> None:
        gate.landed()
        buffer.fill_(9)
        happened.append("landed")

    monkeypatch.setattr(os, "pwrite", pwrite)
    store = opened(tmp_path)
    place = placed(store, BLOCK)
    buffer = place.fill().fill_(3)
    place.filled(landed)
    assert gate.reached.wait(60)
    happened.append("let")
    gate.opened.set()
    settle(store)
    assert happened == ["let", "landed", "written 9"]
    store.close()


def test_what_is_not_written_yet_is_there_at_once(tmp_path: Path) -> None:
    store = opened(tmp_path)
    gate = Gate()
    place = placed(store, 5000)
    place.fill().fill_(4)
    place.filled(gate.landed)
    assert gate.reached.wait(60)
    assert place.ready()
    assert place.memory().eq(4).all()
    place.used(lambda: None)
    place.drop()
    # the write still needs them
    assert used_bytes(store.staging) == taken_bytes(store) == 2 * BLOCK
    gate.opened.set()
    nothing_is_left(store)
    assert store.bytes_read == 0
    store.close()


def test_what_nobody_wants_any_more_is_not_written(tmp_path: Path) -> None:
    store = opened(tmp_path)
    gates = [Gate(), Gate()]
    for gate in gates:  # as many as write at once
        place = placed(store, BLOCK)
        place.fill()
        place.filled(gate.landed)
    late = Kept(store, data(Random(0), BLOCK), [])
    late.place.drop()
    store._poll()
    for gate in gates:
        gate.opened.set()
    settle(store)
    store._await_dropped()
    store._poll()
    assert late.copy.done  # the buffer was not used again before
    assert store.bytes_written == taken_bytes(store) == 2 * BLOCK
    store.close()


def test_what_was_written_last_is_still_in_memory_and_the_rest_is_read_ahead(
    tmp_path: Path,
) -> None:
    store = opened(tmp_path, blocks=4)
    chance = Random(3)
    wrong = list[str]()
    kept = []
    for _ in range(12):
        kept.append(Kept(store, data(chance, BLOCK), wrong))
        settle(store)  # else a buffer goes whose write ended first, whichever that is
    for one in reversed(kept[8:]):
        one.place.expect()
        assert one.place.ready()
    kept[7].place.expect()  # all the others are wanted sooner
    assert not kept[7].place.ready()
    kept[11].read()
    kept[11].place.drop()
    store._drains.submit(lambda: None).result()
    kept[7].place.expect()
    kept[7].place.expect()
    (reading,) = kept[7].place.transfers
    reading.future.exception()
    assert kept[7].place.ready()
    store._poll()
    assert store.bytes_read == BLOCK
    for one in reversed(kept[:11]):
        one.read()
    assert store.bytes_read == 8 * BLOCK
    store.close()
    assert not wrong


def test_what_was_used_can_be_had_again(tmp_path: Path) -> None:
    store = opened(tmp_path, blocks=2)
    wrong = list[str]()
    kept = [Kept(store, data(Random(seed), 2 * BLOCK), wrong) for seed in range(3)]
    for one in (*kept, *reversed(kept), *kept):
        one.read()
    store.close()
    assert not wrong


def test_what_is_being_read_is_not_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path, blocks=1)
    gate = Gate()
    real = os.preadv
    wrong = list[str]()
    kept = [Kept(store, data(Random(seed), BLOCK), wrong) for seed in range(2)]
    settle(store)
    monkeypatch.setattr(os, "preadv", lambda *arguments: gate.landed() or real(*arguments))
    kept[0].place.expect()
    assert gate.reached.wait(60)
    assert not kept[0].place.ready()
    gate.opened.set()
    kept[0].read()
    store.close()
    assert not wrong


def test_who_needs_its_buffer_least_loses_it_first(tmp_path: Path) -> None:
    store = opened(tmp_path, blocks=4)
    wrong = list[str]()
    kept = [Kept(store, data(Random(seed), BLOCK), wrong) for seed in range(4)]
    settle(store)
    kept[0].place.expect()
    kept[3].read()  # perhaps for the last time
    store._drains.submit(lambda: None).result()
    lost = []
    for _ in range(4):
        placed(store, BLOCK)
        lost.append([one.place.ready() for one in kept].count(False))
        if lost[-1] == 1:
            assert not kept[3].place.ready()
        if lost[-1] == 3:
            assert kept[0].place.ready()
    assert lost == [1, 2, 3, 4]
    store.close()
    assert not wrong


def test_expecting_never_waits(tmp_path: Path) -> None:
    store = opened(tmp_path, blocks=2)
    gates = [Gate(), Gate()]
    kept = Kept(store, data(Random(0), BLOCK), [])
    settle(store)
    for gate in gates:
        place = placed(store, BLOCK)
        place.fill()
        place.filled(gate.landed)
        assert gate.reached.wait(60)
    kept.place.expect()  # every buffer is being written, and will be until the gates are opened
    assert not kept.place.ready()
    with store._lock:
        kept.place.expect()
    for gate in gates:
        gate.opened.set()
    kept.read()
    store.close()


@pytest.mark.parametrize("touched_by", ["the disk", "the device"])
def test_a_buffer_is_not_used_again_while_anything_touches_it(
    tmp_path: Path, touched_by: str
) -> None:
    store = opened(tmp_path, blocks=1)
    gate = Gate()
    wrong = list[str]()
    kept = Kept(store, data(Random(0), BLOCK), wrong)
    settle(store)
    touched = placed(store, BLOCK)
    touched.fill().fill_(8)
    touched.filled(gate.landed if touched_by == "the disk" else lambda: None)
    assert touched.memory().eq(8).all()
    touched.used((lambda: None) if touched_by == "the disk" else gate.landed)
    if touched_by == "the disk":
        store._drains.submit(lambda: None).result()
    else:
        settle(store)
    assert gate.reached.wait(60)
    kept.place.expect()
    assert not kept.place.ready()
    gate.opened.set()
    kept.read()
    assert touched.memory().eq(8).all()
    store.close()
    assert not wrong


@pytest.mark.parametrize("state", ["filling", "read"])
def test_a_buffer_of_which_nobody_said_when_its_copy_ends_is_not_used_again(
    tmp_path: Path, state: str
) -> None:
    store = opened(tmp_path, blocks=2)
    place = placed(store, BLOCK)
    buffer = place.fill()
    if state == "read":
        place.filled(lambda: None)
        settle(store)
        buffer = place.memory()
    place.drop()
    others = [placed(store, BLOCK) for _ in range(2)]
    assert buffer.data_ptr() not in [other.fill().data_ptr() for other in others]
    store.close()


@pytest.mark.parametrize("size", [3 * BLOCK, 40 * BLOCK])
def test_one_piece_that_is_larger_than_staging_passes(tmp_path: Path, size: int) -> None:
    store = opened(tmp_path, blocks=2)
    wrong = list[str]()
    small = Kept(store, data(Random(0), BLOCK), wrong)
    large = Kept(store, data(Random(1), size), wrong)
    other = Kept(store, data(Random(2), BLOCK), wrong)
    settle(store)
    assert store.staging.allocated_bytes <= 2 * BLOCK
    for one in (large, small, large, other):
        one.read()
    store._drains.submit(lambda: None).result()
    settle(store)
    assert store.staging.allocated_bytes <= 2 * BLOCK
    store.close()
    assert not wrong


def test_a_copy_that_has_ended_keeps_nothing_of_the_device(tmp_path: Path) -> None:
    store = opened(tmp_path)
    kept = Kept(store, data(Random(0), BLOCK), [])
    upload = LateReader(kept.place.memory(), kept.data, [])
    kept.place.used(upload.drained)
    settle(store)
    store._drains.submit(lambda: None).result()
    store._poll()
    gone = [weakref.ref(upload), weakref.ref(kept.copy)]
    del upload, kept.copy
    assert [ref() for ref in gone] == [None, None]
    kept.place.drop()
    store.close()


def flip(store: DiskStore, place: DiskPiece) -> None:
    """Change one bit of what lies on the disk."""
    block = mmap.mmap(-1, BLOCK)
    descriptor = store._space.file._descriptor
    offset = place.start + (place.nbytes - 1) // BLOCK * BLOCK
    os.preadv(descriptor, [block], offset)
    block[(place.nbytes - 1) % BLOCK] ^= 16
    os.pwrite(descriptor, block, offset)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_bit_that_changed_on_the_disk_is_noticed(directory: Path, ahead: bool) -> None:
    store = opened(directory, blocks=3)
    wrong = list[str]()
    kept = [Kept(store, data(Random(seed), 2 * BLOCK - 7), wrong) for seed in range(3)]
    settle(store)
    flip(store, kept[0].place)
    if ahead:
        kept[2].place.drop()
        kept[0].place.expect()
    for _ in range(2):
        with pytest.raises(
            ReadError, match="8,185 bytes of activations differ from what was written"
        ) as caught:
            kept[0].place.memory()
        assert caught.value.where == str(directory)
    flip(store, kept[0].place)
    kept[0].read()
    kept[1].read()
    store.close()
    assert not wrong


def test_a_disk_that_is_full_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    wrong = list[str]()
    real = os.statvfs
    kept = Kept(store, data(Random(0), BLOCK), wrong)

    def nearly_full(place: str) -> os.statvfs_result:
        found = list(real(place))
        found[4] = 1  # f_bavail
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", nearly_full)
    with pytest.raises(DiskError, match="16,384 bytes are needed for activations") as caught:
        store.allocate(3 * BLOCK)
    assert caught.value.where == str(tmp_path)
    assert caught.value.how == HOW
    monkeypatch.undo()
    assert taken_bytes(store) == BLOCK
    Kept(store, data(Random(1), 3 * BLOCK), wrong).read()
    kept.read()
    store.close()
    assert not wrong


def test_a_file_that_may_not_grow_names_the_setting(tmp_path: Path) -> None:
    store = opened(tmp_path, limit=4 * BLOCK)
    gate = Gate()
    first = placed(store, 3 * BLOCK)
    first.fill()
    first.filled(gate.landed)
    assert gate.reached.wait(60)
    with pytest.raises(
        DiskError, match=r"20,480 bytes are needed for .*, but 16,384 are allowed"
    ) as caught:
        store.allocate(2 * BLOCK)
    assert caught.value.where == str(tmp_path)
    assert "disk_space" in caught.value.how
    first.drop()
    threading.Thread(target=gate.opened.set).start()
    # waits for a write that nobody wants any more
    Kept(store, data(Random(0), 4 * BLOCK), []).read()
    assert store._space.file.size == 4 * BLOCK
    store.close()


def failing(kind: OSError, real: Callable[..., int], wanted: int) -> Callable[..., int]:
    def fail(descriptor: int, memory: object, offset: int) -> int:
        if offset == wanted:
            raise kind
        return real(descriptor, memory, offset)

    return fail


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("call", ["place", "settle", "memory", "memory of another"])
def test_a_write_that_fails_is_raised_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(os, "pwrite", failing(FULL, os.pwrite, BLOCK))
    store = opened(tmp_path)
    wrong = list[str]()
    places = [placed(store, BLOCK) for _ in range(3)]
    kept = [
        Kept(store, data(Random(seed), BLOCK), wrong, place) for seed, place in enumerate(places)
    ]
    lost = kept[1].place
    assert lost.transfers
    for one in kept:
        for transfer in tuple(one.place.transfers):
            transfer.future.exception()
    calls: dict[str, Callable[[], object]] = {
        "place": lambda: store.allocate(1),
        "settle": lambda: settle(store),
        "memory": lost.memory,
        "memory of another": kept[0].place.memory,
    }
    with pytest.raises(DiskError, match="writing failed for activations: No space left") as caught:
        calls[call]()
    assert caught.value.where == str(tmp_path)
    assert caught.value.how == HOW
    for _ in range(2):
        settle(store)  # once is enough
        with pytest.raises(DiskError, match="writing failed"):
            lost.memory()
    kept[0].read()
    kept[2].read()
    monkeypatch.undo()
    for one in kept:
        one.place.drop()
    nothing_is_left(store)
    Kept(store, data(Random(3), BLOCK), wrong).read()
    store.close()
    assert not wrong


def test_a_write_that_fails_while_its_buffer_is_waited_for_costs_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path, blocks=1)
    gate = Gate()
    real = os.statvfs
    monkeypatch.setattr(os, "pwrite", failing(FULL, os.pwrite, 0))
    place = placed(store, BLOCK)
    place.fill()
    place.filled(gate.landed)
    monkeypatch.setattr(os, "statvfs", lambda place: gate.opened.set() or real(place))
    with pytest.raises(DiskError, match="writing failed"):
        store.allocate(BLOCK)
    assert gate.opened.is_set()
    assert taken_bytes(store) == BLOCK
    place.drop()
    nothing_is_left(store)
    store.close()


def test_a_write_that_fails_for_nobody_is_not_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", failing(FULL, os.pwrite, 0))
    store = opened(tmp_path)
    gate = Gate()
    place = placed(store, BLOCK)
    place.fill()
    place.filled(gate.landed)
    assert gate.reached.wait(60)
    place.drop()
    gate.opened.set()
    settle(store)
    nothing_is_left(store)
    store.close()


def test_a_read_that_fails_is_raised_and_may_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path, blocks=1)
    wrong = list[str]()
    kept = [Kept(store, data(Random(seed), BLOCK), wrong) for seed in range(2)]
    settle(store)
    broken = OSError(errno.EIO, "Input/output error")
    monkeypatch.setattr(os, "preadv", failing(broken, os.preadv, 0))
    with pytest.raises(ReadError, match="reading failed for activations: Input/output error"):
        kept[0].place.memory()
    monkeypatch.undo()
    kept[0].read()
    kept[1].read()
    store.close()
    assert not wrong


def test_a_device_that_fails_is_told(tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("the device is lost")

    store = opened(tmp_path)
    place = placed(store, 1)
    place.fill()
    place.filled(fail)
    with pytest.raises(RuntimeError, match="the device is lost"):
        settle(store)
    kept = Kept(store, data(Random(0), 1), [])
    kept.place.memory()
    kept.place.used(fail)
    with pytest.raises(RuntimeError, match="the device is lost"):
        store._drains.submit(lambda: None).result() or settle(store)
    store.close()


def test_two_writes_that_a_file_system_refuses_at_once_both_go_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    both = threading.Barrier(2, timeout=60)
    numbers = iter((1, 2))
    again = threading.Event()

    def refusing(descriptor: int, memory: memoryview, offset: int) -> int:
        for number in numbers:
            both.wait()
            assert number == 1 or again.wait(60)  # the other was refused, and tries again
            raise OSError(errno.EINVAL, "refused")
        again.set()
        return real(descriptor, memory, offset)

    store = opened(tmp_path)
    if not store._space.file._direct:
        pytest.skip("this file system has no transfers past the page cache")
    monkeypatch.setattr(os, "pwrite", refusing)
    wrong: list[str] = []
    kept = [Kept(store, data(Random(seed), BLOCK), wrong) for seed in range(2)]
    settle(store)
    for one in kept:
        one.read()
    store.close()
    assert not wrong


class Owner:
    """Drops a place when it is collected, and is collected by nothing but the garbage collector."""

    def __init__(self, place: DiskPiece) -> None:
        self.place = place
        self.me = self

    def __del__(self) -> None:
        self.place.drop()


def test_a_garbage_collector_drops_in_the_middle_of_any_call_and_thread(tmp_path: Path) -> None:
    def allocate(nbytes: int) -> Tensor:
        gc.collect()
        return anonymous(nbytes)

    def landed() -> None:
        gc.collect()

    store = DiskStore(
        OffloadFile(tmp_path, "activations", HOW), HostPool(allocate, 6 * BLOCK, lambda: 1 << 50)
    )
    gc.disable()
    gc.freeze()  # what other tests left is not looked through again and again
    try:
        for number in range(60):
            place = placed(store, 1 + number % 5 * BLOCK)
            place.fill()
            Owner(place)
            if number % 7:
                place.filled(landed)
            del place
    finally:
        gc.enable()
    gc.collect()
    gc.unfreeze()
    nothing_is_left(store)
    store.close()


def test_a_store_that_was_closed_says_so(tmp_path: Path) -> None:
    store = opened(tmp_path)
    kept = Kept(store, data(Random(0), BLOCK), [])
    descriptor = store._space.file._descriptor
    store.close()
    store.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert store.staging.allocated_bytes == 0
    for call in (kept.place.memory, lambda: settle(store), lambda: store.allocate(1)):
        with pytest.raises(DiskError, match="closed") as caught:
            call()
        assert caught.value.where == str(tmp_path)
    kept.place.expect()
    kept.place.drop()


ENDINGS = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    "raised": ("raise RuntimeError('over')", 1),
    "exited": ("sys.exit(3)", 3),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "named"), [*((ending, False) for ending in ENDINGS), ("killed", True)]
)
def test_a_process_that_ends_leaves_no_file(tmp_path: Path, ending: str, named: bool) -> None:
    statement, code = ENDINGS[ending]
    program = f"""
import os, signal, sys
from pathlib import Path
if {named} and hasattr(os, "O_TMPFILE"):
    del os.O_TMPFILE
from lema.activations.diskstore import DiskStore
from lema.activations.hoststore import HostPool
from lema.backend.hostmemory import anonymous
from lema.storage.spillfile import OffloadFile
store = DiskStore(OffloadFile(Path(sys.argv[1]), "activations", "x"), HostPool(anonymous, 1 << 20))
places = [store.allocate(100_000) for _ in range(30)]
for place in places:
    place.fill().fill_(1)
    place.filled(lambda: None)
print(store._space.file.size, os.listdir(sys.argv[1]), flush=True)
{statement}
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == code, done.stderr
    assert done.stdout == f"{30 * 25 * BLOCK} []\n"
    assert not list(tmp_path.iterdir())
