"""Host buffers used again, and never more of them than is allowed; what has no room in host
memory goes to the disk.
"""

import gc
import threading
from collections.abc import Callable
from random import Random

import psutil
import pytest
import torch
from hoststores import used_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lema.activations import hoststore as stores
from lema.activations.hoststore import HostPool, HostStore, floor_bytes
from lema.activations.protocols import WaitingPiece
from lema.backend.hostmemory import anonymous
from lema.storage.directio import BLOCK


def plenty() -> int:
    return 1 << 50


def pool(limit: int | None = None, available: Callable[[], int] = plenty) -> HostPool:
    return HostPool(anonymous, limit, available)


def taken(pool: HostPool, nbytes: int) -> Tensor:
    buffer = pool.take(nbytes)
    assert buffer is not None
    return buffer


def test_a_few_buffers_serve_pieces_of_all_sizes() -> None:
    one = HostPool(anonymous, available=plenty, num_buffers=3)
    assert one.limit == 0
    for sizes in ([BLOCK] * 4, [5 * BLOCK, 10, BLOCK, BLOCK], [BLOCK, 5 * BLOCK, 2 * BLOCK, 7]):
        found = [one.take(nbytes) for nbytes in sizes]
        assert [None if buffer is None else len(buffer) for buffer in found] == [*sizes[:3], None]
        for buffer in found[:3]:
            assert buffer is not None
            one.give(buffer)
    assert one.allocated_bytes == one.limit == 15 * BLOCK
    assert one.counters.allocated == 6, "buffers are made again only where they are too small"


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["take", "take", "take", "must", "give", "give", "forget", "clear"]),
        st.integers(0, 63),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(STEPS, st.one_of(st.none(), st.integers(1, 24)))
def test_no_byte_is_handed_out_twice_and_the_limit_holds(
    steps: list[tuple[str, int]], blocks: int | None
) -> None:
    limit = None if blocks is None else blocks * BLOCK
    one = pool(limit)
    out: list[tuple[Tensor, int]] = []
    forced = False
    most = peak = 0
    for number, (step, chance) in enumerate(steps):
        if step in ("take", "must"):
            nbytes = 1 + chance % 12 * 1000
            found = one.take(nbytes, must=step == "must")
            if found is not None:
                assert found.shape == (nbytes,)
                assert found.dtype == torch.uint8
                assert found.data_ptr() % BLOCK == 0
                out.append((found.fill_(number), number))
            else:
                assert step == "take"
                assert limit is not None
                assert used_bytes(one) + nbytes > limit - BLOCK
            forced = forced or (step == "must")
        elif step in ("give", "forget") and out:
            buffer, filled = out.pop(chance % len(out))
            assert buffer.eq(filled).all()
            (one.give if step == "give" else one.forget)(buffer)
        elif step == "clear":
            one.clear()
            assert one.allocated_bytes == used_bytes(one)
        assert all(buffer.eq(filled).all() for buffer, filled in out)
        asked = sum(-(-len(buffer) // BLOCK) * BLOCK for buffer, _ in out)
        most = max(most, asked, used_bytes(one))
        assert asked <= used_bytes(one) <= 2 * asked
        assert one.allocated_bytes <= most
        peak = max(peak, one.allocated_bytes)
        assert one.counters.peak_bytes >= peak
        assert forced or limit is None or one.counters.peak_bytes <= limit
        assert limit is None or one.allocated_bytes <= max(limit, used_bytes(one))
    for buffer, _ in out:
        one.give(buffer)
    assert used_bytes(one) == 0
    one.clear()
    assert one.allocated_bytes == 0


def test_steps_that_are_alike_allocate_once() -> None:
    one = pool()
    for _ in range(5):
        buffers = [taken(one, nbytes) for nbytes in (5000, 100, 5000, 90_000, 100)]
        for buffer in buffers:
            one.give(buffer)
    assert one.counters.allocated == 5
    assert one.counters.reused == 20
    assert one.allocated_bytes == one.counters.peak_bytes == 2 * 8192 + 2 * 4096 + 90_112


def test_batches_of_all_lengths_do_not_add_up() -> None:
    one = pool()
    chance = Random(0)
    most = 0
    for _ in range(100):
        length = chance.randint(32, 64)
        buffers = [taken(one, length * width) for width in (4096, 4096, 12_288)]
        most = max(most, length * 20_480)
        for buffer in buffers:
            one.give(buffer)
        assert one.allocated_bytes <= 2 * most
    assert one.counters.allocated < 30  # of 300


def test_free_buffers_of_other_sizes_make_room() -> None:
    one = pool(limit=10 * BLOCK)
    first = taken(one, 8 * BLOCK)
    second = taken(one, 2 * BLOCK)
    assert one.take(1) is None
    one.give(first)
    assert len(taken(one, BLOCK)) == BLOCK
    one.give(second)
    assert len(taken(one, 9 * BLOCK)) == 9 * BLOCK
    assert one.allocated_bytes == one.counters.peak_bytes == 10 * BLOCK


def test_a_buffer_that_must_be_had_goes_back_to_the_system() -> None:
    one = pool(limit=BLOCK)
    large = one.take(3 * BLOCK, must=True)
    assert large is not None
    assert one.allocated_bytes == 3 * BLOCK
    one.give(large)
    assert one.allocated_bytes == 0


def test_some_memory_is_left_to_the_machine() -> None:
    assert floor_bytes() >= psutil.virtual_memory().total // 20
    left = [floor_bytes() + 3 * BLOCK]
    one = pool(available=lambda: left[0])
    assert one.take(4 * BLOCK) is None
    buffer = taken(one, 3 * BLOCK)
    left[0] -= 3 * BLOCK
    assert one.take(1) is None
    one.give(buffer)
    assert taken(one, 3 * BLOCK).data_ptr() == buffer.data_ptr()  # what there is may be used again


def test_by_default_the_machine_says_how_much_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    one = HostPool(anonymous)
    taken(one, 1)
    monkeypatch.setattr(stores, "memory_available", lambda: 0)
    assert HostPool(anonymous).take(1) is None


def test_what_may_still_be_written_into_is_not_used_again() -> None:
    one = pool()
    buffer = taken(one, BLOCK)
    one.forget(buffer)
    assert one.allocated_bytes == 0
    assert taken(one, BLOCK).data_ptr() != buffer.data_ptr()


def test_what_is_given_back_twice_is_noticed() -> None:
    one = pool()
    buffer = taken(one, 1)
    one.give(buffer)
    one.give(buffer)
    with pytest.raises(AssertionError, match="given back twice"):
        one.take(1)


def test_an_allocation_that_fails_leaves_the_pool_as_it_was() -> None:
    def refuse(nbytes: int) -> Tensor:
        raise MemoryError(f"{nbytes} bytes")

    one = HostPool(refuse, 3 * BLOCK, plenty)
    for _ in range(2):
        with pytest.raises(MemoryError, match="8192 bytes"):
            one.take(2 * BLOCK)
    assert one.allocated_bytes == used_bytes(one) == one.counters.allocated == 0


class Owner:
    """Drops a place when it is collected, and is collected by nothing but the garbage collector."""

    def __init__(self, place: WaitingPiece | None) -> None:
        self.place = place
        self.me = self

    def __del__(self) -> None:
        assert self.place is not None
        self.place.drop()


def test_a_garbage_collector_gives_back_in_the_middle_of_a_call() -> None:
    def allocate(nbytes: int) -> Tensor:
        gc.collect()
        return anonymous(nbytes)

    store = HostStore(HostPool(allocate, None, plenty))
    gc.disable()
    gc.freeze()  # what other tests left is not looked through again and again
    try:
        for size in range(1, 20):
            Owner(store.allocate(size * BLOCK))
    finally:
        gc.enable()
    gc.collect()
    gc.unfreeze()
    assert used_bytes(store.pool) == 0


def test_threads_share_a_pool() -> None:
    one = pool(limit=64 * BLOCK)
    wrong = []

    def work(seed: int) -> None:
        chance = Random(seed)
        mine = list[Tensor]()
        for _ in range(400):
            found = one.take(chance.randint(1, 5 * BLOCK)) if chance.random() < 0.5 else None
            if found is not None:
                mine.append(found.fill_(seed))
            if mine and chance.random() < 0.6:
                buffer = mine.pop(chance.randrange(len(mine)))
                if not buffer.eq(seed).all():
                    wrong.append(seed)
                one.give(buffer)
        for buffer in mine:
            one.give(buffer)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert used_bytes(one) == 0
    assert one.counters.peak_bytes <= 64 * BLOCK


def test_a_place_in_host_memory_holds_its_bytes_until_it_is_dropped() -> None:
    store = HostStore(pool(limit=2 * BLOCK))
    first = store.allocate(5000)
    second = None
    assert first is not None
    first.fill().fill_(7)
    first.filled(lambda: None)
    assert store.allocate(1) is None
    first.expect()
    assert first.ready()
    for _ in range(2):
        assert first.memory().eq(7).all()
        first.used(lambda: None)
    first.drop()
    first.drop()
    with pytest.raises(AssertionError, match="had been dropped"):
        first.memory()
    second = store.allocate(8000)
    assert second is not None
    second.drop()
    store.close()
    assert store.pool.allocated_bytes == 0


class Shelf:
    """A store that counts."""

    def __init__(self) -> None:
        self.placed: list[int] = []
        self.closed = False

    def allocate(self, nbytes: int) -> WaitingPiece | None:
        self.placed.append(nbytes)
        return HostStore(pool()).allocate(nbytes)

    def close(self) -> None:
        self.closed = True


def test_what_has_no_room_in_host_memory_goes_to_the_disk() -> None:
    disk = Shelf()
    store = HostStore(pool(limit=3 * BLOCK), disk)
    places = [store.allocate(nbytes) for nbytes in (8000, 8001, 4000, 1)]
    assert all(place is not None for place in places)
    assert disk.placed == [8001, 1]
    assert places[0] is not None
    places[0].drop()
    store.allocate(8192)
    assert disk.placed == [8001, 1]
    store.close()
    assert disk.closed
