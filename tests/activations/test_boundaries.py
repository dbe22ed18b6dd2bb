"""Boundary activations come back as they were kept, from wherever they waited, in memory that
serves every step.
"""

import gc
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from stream_fakes import LateBackend
from torch import Tensor

from lema.activations.boundaries import (
    NUM_BUFFERS,
    TierName,
    boundaries_in_host,
    boundaries_on_device,
)
from lema.activations.stepstore import BoundaryArena
from lema.backend import Backend, DeviceSlots
from lema.engine.head.gradients import graph_input
from lema.errors import ReadError
from lema_cpu import CpuBackend

LAYERS = range(2, 9)
TIERS: list[TierName] = ["device", "host", "disk"]
every_tier = pytest.mark.parametrize("tier", TIERS)


@pytest.fixture
def arena_on(tmp_path: Path) -> Iterator[Callable[..., BoundaryArena]]:
    """Make arenas whose backend fills with NaN what was given back."""
    made = []

    def make(tier: TierName, backend: Backend | None = None) -> BoundaryArena:
        made.append(BoundaryArena(backend or CpuBackend(poison=True), tier, tmp_path / "aside"))
        return made[-1]

    yield make
    for arena in made:
        arena.close()


def states(*lengths: int) -> list[Tensor]:
    return [torch.randn(2, length, 8) for length in lengths]


def run(
    arena: BoundaryArena, hidden: list[Tensor], change: Callable[[Tensor, int], Tensor] = torch.add
) -> None:
    """Take a step: keep `change(state, layer)` for every layer, and see that each comes back."""
    step = arena.step(hidden, LAYERS)
    expected = {}
    for layer in LAYERS:
        for index, state in enumerate(hidden):
            changed = change(state, layer)
            expected[layer, index] = changed.clone()
            given = step.keep(layer, index, changed)
            assert torch.equal(given, changed)
            if arena.tier == "device":
                # what is kept is a copy from the start; elsewhere it may be copied later
                given.fill_(-1)
    for layer in reversed(LAYERS):
        for index in range(len(hidden)):
            with step.fetch(layer, index) as kept:
                wanted = expected[layer, index]
                assert kept.dtype == wanted.dtype
                assert kept.stride() == wanted.stride()
                assert torch.equal(kept, wanted)
                assert not kept.requires_grad


@every_tier
def test_what_was_kept_comes_back_in_every_step(
    arena_on: Callable[..., BoundaryArena], tier: TierName
) -> None:
    arena = arena_on(tier)
    for lengths in ((5, 3), (5, 3), (700, 2, 900), (4,)):
        run(arena, states(*lengths))


@every_tier
@pytest.mark.parametrize(
    "change",
    [
        lambda state, layer: (state + layer).double() if layer > 3 else state + layer,
        lambda state, layer: torch.cat([state + layer] * layer, dim=-1),
        lambda state, layer: (state + layer).transpose(1, 2) if layer % 2 else state + layer,
        lambda state, layer: (state + layer)[..., ::2],
    ],
    ids=["dtype", "shape", "strides", "holes"],
)
def test_layers_may_change_what_a_hidden_state_looks_like(
    arena_on: Callable[..., BoundaryArena], tier: TierName, change: Callable[[Tensor, int], Tensor]
) -> None:
    arena = arena_on(tier)
    held = []
    for _ in range(4):
        run(arena, states(50, 30), change)
        held.append(arena.memory_bytes)
    assert held[1] == held[2] == held[3], "room that was made in one step serves the next"


def add_up(sums: dict[tuple[int, int], Tensor], key: tuple[int, int], kept: Tensor) -> None:
    sums[key] = kept.sum()


@every_tier
def test_copies_are_right_on_a_device_that_works_as_late_as_it_may(
    arena_on: Callable[..., BoundaryArena], tier: TierName
) -> None:
    backend = LateBackend()
    arena = arena_on(tier, backend)
    hidden = states(6, 4)
    for _ in range(2):
        step = arena.step(hidden, LAYERS)
        sums = dict[tuple[int, int], Tensor]()
        for layer in LAYERS:
            for index, state in enumerate(hidden):
                step.keep(layer, index, state + layer)
        for layer in reversed(LAYERS):
            for index in range(len(hidden)):
                with step.fetch(layer, index) as kept:
                    # Not done before somebody waits: by then the slot is another's, if it was let
                    # go too early.
                    backend.compute(partial(add_up, sums, (layer, index), kept))
        backend.synchronize()
        assert sums == {key: (hidden[key[1]] + key[0]).sum() for key in sums}
        assert len(sums) == len(LAYERS) * len(hidden)


@pytest.mark.parametrize("tier", ["device", "host"])
def test_memory_is_taken_once_and_grows_only_for_a_larger_step(
    arena_on: Callable[..., BoundaryArena], tier: TierName
) -> None:
    arena = arena_on(tier)
    held = []
    for length in (64, 64, 16, 128, 64):
        run(arena, states(length, length))
        held.append(arena.memory_bytes)
    one = 2 * 2 * 64 * 8 * 4 * len(LAYERS)  # micro-batches of two rows of 64 tokens
    assert held == [one, one, one, 2 * one, 2 * one]


def test_the_boundaries_of_a_step_lie_in_one_allocation(
    arena_on: Callable[..., BoundaryArena],
) -> None:
    arena = arena_on("device")
    hidden = states(5, 3)
    for _ in range(2):
        step = arena.step(hidden, LAYERS)
        for layer in LAYERS:
            for index, state in enumerate(hidden):
                step.keep(layer, index, state)
        places = set()
        for layer in reversed(LAYERS):
            for index in range(len(hidden)):
                with step.fetch(layer, index) as kept:
                    places.add(kept.untyped_storage().data_ptr())
        assert len(places) == 1


class CountingBackend(CpuBackend):
    """Remembers the memory it has handed out."""

    def __init__(self) -> None:
        super().__init__()
        self.host: list[int] = []
        self.slots: list[int] = []

    def host_buffer(self, nbytes: int) -> Tensor:
        self.host.append(nbytes)
        return super().host_buffer(nbytes)

    def device_slots(self, nbytes: int, count: int) -> object:
        self.slots.append(nbytes * count)
        return super().device_slots(nbytes, count)


@pytest.mark.parametrize("depth", [3, 60])
def test_memory_for_boundaries_on_disk_does_not_grow_with_depth(tmp_path: Path, depth: int) -> None:
    backend = CountingBackend()
    hidden = states(256, 128)
    arena = BoundaryArena(backend, "disk", tmp_path)
    for _ in range(3):
        step = arena.step(hidden, range(depth))
        for layer in range(depth):
            for index, state in enumerate(hidden):
                step.keep(layer, index, state + layer)
        for layer in reversed(range(depth)):
            for index, state in enumerate(hidden):
                with step.fetch(layer, index) as kept:
                    assert torch.equal(kept, state + layer)
    # each was at most once too small
    assert sum(backend.host) <= 2 * NUM_BUFFERS * hidden[0].nbytes
    assert len(backend.host) <= 2 * NUM_BUFFERS
    assert arena.memory_bytes <= NUM_BUFFERS * hidden[0].nbytes
    assert backend.slots == [hidden[0].nbytes] * NUM_BUFFERS
    arena.close()


def test_a_byte_that_changes_on_the_disk_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = os.preadv

    def spoilt(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = read(descriptor, buffers, offset)
        buffers[0][17] ^= 1
        return count

    arena, (state,) = BoundaryArena(CpuBackend(), "disk", tmp_path), states(64)
    step = arena.step([state], range(9))
    monkeypatch.setattr(os, "preadv", spoilt)
    for layer in range(9):
        step.keep(layer, 0, state + layer)
    with pytest.raises(ReadError, match="bytes of activations differ from what was written"):
        for layer in reversed(range(9)):
            with step.fetch(layer, 0) as kept:
                assert torch.equal(kept, state + layer)
    arena.close()


@every_tier
def test_a_step_that_waits_keeps_its_boundaries_while_another_runs(
    arena_on: Callable[..., BoundaryArena], tier: TierName
) -> None:
    arena = arena_on(tier)
    hidden = states(5)
    waiting = arena.step(hidden, LAYERS)
    for layer in LAYERS:
        waiting.keep(layer, 0, hidden[0] + layer)
    run(arena, states(5))
    for layer in reversed(LAYERS):
        with waiting.fetch(layer, 0) as kept:
            assert torch.equal(kept, hidden[0] + layer)


@every_tier
@pytest.mark.parametrize("num_kept", [1, 5, len(LAYERS)])
def test_a_step_that_is_given_up_leaves_its_memory_to_the_next(
    arena_on: Callable[..., BoundaryArena], tier: TierName, num_kept: int
) -> None:
    arena = arena_on(tier)
    hidden = states(40)
    run(arena, hidden)
    held = arena.memory_bytes
    kept_in = arena._storage_tier
    gc.disable()  # nothing waits for the collector
    try:
        step = arena.step(hidden, LAYERS)
        for layer in LAYERS[:num_kept]:
            step.keep(layer, 0, hidden[0] + layer)
        if num_kept == len(LAYERS):
            with pytest.raises(KeyboardInterrupt), step.fetch(LAYERS[-1], 0):
                raise KeyboardInterrupt
        del step
        run(arena, hidden)
    finally:
        gc.enable()
    assert arena._storage_tier is kept_in
    assert arena.memory_bytes == held


def test_a_graph_holds_nothing_of_its_input_and_hands_on_the_gradient() -> None:
    anchor = torch.zeros((), requires_grad=True)
    found = dict[int, Tensor]()
    state = torch.randn(3, 4)
    given = graph_input(anchor, state, found, 7)
    out = (given + given * 2).sum()
    with pytest.raises(RuntimeError, match="inplace"):
        given.add_(1)
    freed = []
    storage = torch.multiprocessing.reductions.StorageWeakRef(state.untyped_storage())
    del state, given
    freed.append(storage.expired())
    out.backward()
    assert freed == [True]
    assert torch.equal(found[7], torch.full((3, 4), 3.0))
    assert anchor.grad is None


class Counting(CpuBackend):
    """A device apart from host memory, as far as what is taken of both is counted."""

    def __init__(self) -> None:
        super().__init__(poison=True)
        self.in_host = 0
        self.on_device = 0

    def host_buffer(self, nbytes: int, memory: Tensor | None = None) -> Tensor:
        self.in_host += nbytes
        return super().host_buffer(nbytes, memory)

    def device_slots(self, nbytes: int, count: int) -> DeviceSlots:
        self.on_device += nbytes * count
        return super().device_slots(nbytes, count)


@every_tier
@pytest.mark.parametrize("num_layers", [2, len(LAYERS)])
def test_a_plan_is_told_the_bytes_that_a_tier_takes(
    arena_on: Callable[..., BoundaryArena], tier: TierName, num_layers: int
) -> None:
    """If fewer wait than there are buffers, a plan has room for no more than wait, and each slot is
    as large as the largest, so no other is on the device with them then."""
    backend = Counting()
    arena = arena_on(tier, backend)
    (state,) = states(512)
    layers = LAYERS[:num_layers]
    step = arena.step([state], layers)
    for layer in layers:
        step.keep(layer, 0, state + layer)
    for layer in reversed(layers):
        with step.fetch(layer, 0):
            pass
    waiting = num_layers * state.nbytes
    on_device = arena.memory_bytes if tier == "device" else backend.on_device
    told = boundaries_on_device(tier, waiting, state.nbytes)
    assert told == (on_device if num_layers > NUM_BUFFERS or tier == "device" else waiting)
    in_host = 0 if tier == "device" else backend.in_host
    assert boundaries_in_host(tier, waiting, state.nbytes) == in_host
