"""A stream that gives slots up goes on with the others: every lease has its weights, and the
memory is given back.
"""

import weakref
from contextlib import closing
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_fakes import LateBackend, SteppedReader, Stored, same, write_layers
from torch import Tensor

from lema.backend import Backend, DeviceSlots
from lema.stream import LayerStream
from lema.stream.schedule import training_order
from lema_cpu import CpuBackend

BACKENDS = {"alias": CpuBackend, "poison": lambda: CpuBackend(poison=True), "late": LateBackend}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    return write_layers(tmp_path_factory.mktemp("layers"))


class Counting(LateBackend):
    """Remembers the slots and the host buffers there are."""

    def __init__(self) -> None:
        super().__init__()
        self.slots: list[weakref.ref[Tensor]] = []
        self.host: list[weakref.ref[Tensor]] = []

    def device_slots(self, nbytes: int, count: int) -> DeviceSlots:
        made = super().device_slots(nbytes, count)
        self.slots += [weakref.ref(slot) for slot in made.free.values()]  # type: ignore[attr-defined]
        return made

    def host_buffer(self, nbytes: int, memory: Tensor | None = None) -> Tensor:
        made = super().host_buffer(nbytes, memory)
        self.host.append(weakref.ref(made))
        return made


def alive(made: list[weakref.ref[Tensor]]) -> int:
    return sum(one() is not None for one in made)


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(BACKENDS)),
    st.integers(0, 2**20),
    st.integers(1, 5),
    st.sets(st.integers(0, 5)),
)
def test_every_lease_has_its_weights_whenever_a_slot_is_given_up(
    stored: Stored, name: str, seed: int, depth: int, cached: set[int]
) -> None:
    chance = Random(seed)
    made = BACKENDS[name]
    backend: Backend = made()
    stream = LayerStream(
        stored.layers, backend, prefetch_depth=depth, host_cached=cached, reader=SteppedReader(seed)
    )
    with closing(stream):
        for _ in range(2):
            stream.announce(training_order(len(stored), 0))
            for layer in training_order(len(stored), 0):
                with stream.lease(layer) as lease:
                    if chance.random() < 0.2:
                        stream.shrink()
                    if isinstance(backend, LateBackend):
                        found: list[bool] = []
                        weights = lease.weights
                        expected = stored.contents[layer]
                        backend.compute(lambda w=weights, e=expected, f=found: f.append(same(w, e)))
                    else:
                        assert same(lease.weights, stored.contents[layer])
                if isinstance(backend, LateBackend) and chance.random() < 0.5:
                    backend.synchronize()
                    assert found == [True]
                if chance.random() < 0.2:
                    stream.shrink()


def test_the_one_on_lease_and_the_last_stay(stored: Stored) -> None:
    with closing(LayerStream(stored.layers, CpuBackend(poison=True), prefetch_depth=2)) as stream:
        stream.announce(training_order(len(stored), 0))
        with stream.lease(0) as lease:
            assert [stream.shrink() for _ in range(4)] == [True, True, False, False]
            assert same(lease.weights, stored.contents[0])
        assert stream.num_slots == 1
        assert not stream.shrink()


@pytest.mark.parametrize(
    ("cached", "buffers"), [((), (3, 2, 1)), ((2, 3, 4, 5), (6, 6, 5))], ids=["read", "cached"]
)
def test_memory_is_given_back_at_once_on_both_sides(
    stored: Stored, cached: tuple[int, ...], buffers: tuple[int, ...]
) -> None:
    backend = Counting()
    reader = SteppedReader(3)
    with closing(
        LayerStream(stored.layers, backend, prefetch_depth=3, host_cached=cached, reader=reader)
    ) as stream:
        order = training_order(len(stored), 0)
        stream.announce(order)
        for layer in order[:3]:
            with stream.lease(layer):
                pass
        with stream.lease(order[3]):
            for left, in_host in zip((3, 2, 1), buffers, strict=True):
                assert stream.shrink()
                # a read that is under way has waited for the copies of its buffer
                while reader.pending:
                    reader.pending[0].step()
                assert (alive(backend.slots), alive(backend.host)) == (left, in_host)


def test_what_is_wanted_soonest_is_kept(stored: Stored) -> None:
    with closing(LayerStream(stored.layers, CpuBackend(poison=True), prefetch_depth=3)) as stream:
        stream.announce(range(4))
        for layer in range(4):
            with stream.lease(layer):
                pass
        read = stream.counters.layers_read
        stream.announce([0, 1])
        for _ in range(2):
            assert stream.shrink()
        for layer in (0, 1):
            with stream.lease(layer) as lease:
                assert same(lease.weights, stored.contents[layer])
        assert stream.counters.layers_read == read
