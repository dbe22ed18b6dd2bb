"""The simulator: the real schedule in virtual time keeps its promises and moves the bytes of the
formula.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from smallrun import settings as run_settings
from smallrun import write_model

from lema import LemaModel
from lema.plan import Allocation, Machine
from lema.plan.cost import Demand, LayerCost, Speeds, fetches, phases, saved_elsewhere, seconds
from lema.plan.machine import PROFILES
from lema.plan.memory import device_parts, host_parts
from lema.plan.simulation.simulator import STEPS, layers_like, simulate
from lema.plan.simulation.virtual import Clock, ScheduleError, VirtualDevice, VirtualReader
from lema.stream import LayerStream
from lema.stream.placement import PAGE
from lema.stream.ring import LayerRing

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# seconds: far shorter ones are lost in the difference of two times
LENGTHS = st.just(0.0) | st.floats(1e-3, 5)
LAYERS = st.builds(
    LayerCost,
    slot_bytes=st.integers(1, 500),
    read_bytes=st.integers(1, 500),
    upload_bytes=st.integers(1, 500),
    saved_bytes=st.integers(0, 800),
    expand=LENGTHS,
    forward=LENGTHS,
    recompute=LENGTHS,
    backward=LENGTHS,
)
SPEEDS = st.builds(
    Speeds, disk=st.floats(1, 500), link=st.one_of(st.floats(1, 500), st.just(float("inf")))
)


@st.composite
def steps(draw: st.DrawFn) -> tuple[Demand, Allocation, Speeds]:
    layers = tuple(draw(st.lists(LAYERS, min_size=1, max_size=9)))
    indices = st.sets(st.integers(0, len(layers) - 1))
    speeds = draw(SPEEDS)
    lowest = draw(st.integers(0, len(layers) - 1))
    demand = Demand(
        tuple(LayerCost(**{**vars(layer), "upload_bytes": layer.slot_bytes}) for layer in layers),
        lowest=lowest,
        outside_bytes=70,
        expanded_bytes=draw(st.integers(0, 300)),
        boundary_bytes=draw(st.integers(0, 300)),
        micro_boundary_bytes=20,
        head_seconds=draw(LENGTHS),
        outside_seconds=draw(LENGTHS),
        shared=speeds.link == float("inf"),
    )
    residents = frozenset(draw(indices))
    tier: Any = draw(st.sampled_from(["device", "host", "disk"]))
    saved = frozenset(draw(indices)) & set(demand.visited_twice)
    slots = draw(st.integers(2, 5))
    saved_on: Any = draw(st.sampled_from(["device", "host", "disk"]))
    return (
        demand,
        Allocation(slots, residents, frozenset(draw(indices)) - residents, tier, saved, saved_on),
        speeds,
    )


@pytest.mark.slow
@settings(max_examples=300)
@given(steps())
def test_any_schedule_keeps_its_promises_and_takes_as_long_as_it_must(
    step: tuple[Demand, Allocation, Speeds],
) -> None:
    """No buffer is used before it is filled or refilled in use (`ScheduleError`), and every step
    ends.
    """
    demand, allocation, speeds = step
    found = simulate(demand, allocation, speeds)
    bound = max(found.compute, found.link, found.disk)
    assert found.seconds >= bound - 1e-6 * bound
    computed = (
        sum(phase.compute for phase in phases(demand, allocation, speeds)) + demand.outside_seconds
    )
    assert found.compute == pytest.approx(computed, rel=1e-6, abs=1e-6)
    left = demand.boundary_bytes * len(demand.layers) + sum(
        saved_elsewhere(demand, allocation).values()
    )
    busy = found.compute + found.link + found.disk + left / speeds.link
    assert found.seconds <= busy * (1 + 1e-6)  # at worst one thing after the other
    stalls = found.stall_disk + found.stall_upload + found.stall_boundaries
    assert found.compute + stalls <= found.seconds * (1 + 1e-6) + 1e-6


@settings(max_examples=200)
@given(steps())
def test_bytes_are_those_of_the_formula(step: tuple[Demand, Allocation, Speeds]) -> None:
    demand, allocation, speeds = step
    found = simulate(demand, allocation, speeds)
    count = len(demand.layers)
    held = allocation.residents | allocation.host_cached
    read = [
        index
        for way in fetches((0,) * count, allocation.slots, held, demand.lowest)[1:]
        for index in way
    ]
    expected = sum(demand.layers[index].read_bytes for index in read)
    assert found.bytes_read == expected if demand.lowest == 0 else found.bytes_read <= expected
    if not demand.shared:
        uploaded = [
            index
            for way in fetches((0,) * count, allocation.slots, allocation.residents, demand.lowest)[
                1:
            ]
            for index in way
        ]
        expected = sum(demand.layers[index].slot_bytes for index in uploaded)
        assert (
            found.bytes_uploaded == expected
            if demand.lowest == 0
            else found.bytes_uploaded <= expected
        )


@settings(max_examples=25)
@given(steps(), st.data())
def test_so_are_they_where_experts_are_leased_in_groups(
    step: tuple[Demand, Allocation, Speeds], data: st.DataObject
) -> None:
    demand, allocation, speeds = step
    counts = data.draw(
        st.lists(st.integers(0, 4), min_size=len(demand.layers), max_size=len(demand.layers))
    )
    layers = tuple(
        replace(
            layer,
            slot_bytes=(1 + count) * PAGE,
            read_bytes=(1 + count) * PAGE,
            groups=(PAGE,) * count,
        )
        for layer, count in zip(demand.layers, counts, strict=True)
    )
    demand = replace(demand, layers=layers, lowest=0, pieces=0)
    allocation = replace(allocation, slots=max(2, allocation.slots), saved=frozenset())
    found = simulate(demand, allocation, speeds)
    held = allocation.residents | allocation.host_cached
    _, up, down = fetches(demand.groups, allocation.slots, held, 0)
    assert found.bytes_read == demand.total("read_bytes", up + down) == PAGE * len(up + down)


@settings(max_examples=100)
@given(steps())
def test_the_peaks_are_those_the_solver_counts_with(
    step: tuple[Demand, Allocation, Speeds],
) -> None:
    demand, allocation, speeds = step
    found = simulate(demand, allocation, speeds)
    on_device = device_parts(demand, allocation)
    in_host = host_parts(demand, allocation)
    if demand.shared:  # there is one memory, and the ring is the slots
        in_host["residents"] = on_device["residents"]
    assert found.device_peak == sum(on_device.values())
    assert found.host_peak <= sum(in_host.values()) + 2 * max(
        layer.slot_bytes for layer in demand.layers
    )


SHAPES = {"8B": (32, 218e6, 4096), "70B": (80, 856e6, 8192), "405B": (126, 3188e6, 16384)}
VOCABULARY = 128256


def step_of(size: str, machine: Machine, tokens: float) -> Demand:
    layers, parameters, hidden = SHAPES[size]
    once = 2 * parameters * tokens / machine.half
    nbytes = int(2 * parameters) // 4096 * 4096
    return Demand(
        (LayerCost(nbytes, nbytes, nbytes, 0, once, once, once),) * layers,
        head_seconds=4 * hidden * VOCABULARY * tokens / machine.half,
        shared=machine.shared,
    )


def break_even(machine: Machine, bytes_per_second: float) -> float:
    """T* = w F / (3 B) tokens: three passes of arithmetic for two of weights."""
    return 2 * machine.half / (3 * bytes_per_second)


@pytest.mark.covered
@pytest.mark.sampled(20)
@pytest.mark.parametrize("times", [1.5, 2.0, 4.0])
@pytest.mark.parametrize("from_disk", [True, False])
@pytest.mark.parametrize("size", SHAPES)
@pytest.mark.parametrize("machine", PROFILES.values(), ids=PROFILES)
def test_streaming_is_hidden_from_one_and_a_half_times_the_break_even_on(
    machine: Machine, size: str, from_disk: bool, times: float
) -> None:
    speed = min(machine.speeds.disk, machine.speeds.link) if from_disk else machine.speeds.link
    tokens = max(times * break_even(machine, speed), 1.0)
    demand = step_of(size, machine, tokens)
    cached = frozenset() if from_disk else frozenset(range(len(demand.layers)))
    found = simulate(demand, Allocation(3, host_cached=cached), machine.speeds)
    assert found.seconds <= 1.05 * max(found.compute, found.link, found.disk)
    assert found.bottleneck == "compute"


@pytest.mark.parametrize("machine", PROFILES.values(), ids=PROFILES)
def test_below_the_break_even_the_stall_is_named(machine: Machine) -> None:
    demand = step_of(
        "8B", machine, 0.2 * break_even(machine, min(machine.speeds.disk, machine.speeds.link))
    )
    found = simulate(demand, Allocation(3), machine.speeds)
    assert found.bottleneck == "disk"
    assert found.stall_disk > 0.3 * found.seconds
    assert found.seconds <= 1.1 * seconds(demand, Allocation(3), machine.speeds)


def test_boundaries_that_come_too_late_are_waited_for() -> None:
    demand = Demand(
        (LayerCost(1, 1, 1, 0, 1.0, 1.0, 1.0),) * 6, boundary_bytes=500, micro_boundary_bytes=5
    )
    near = simulate(demand, Allocation(3), Speeds(1e9, 100.0))
    away = simulate(demand, Allocation(3, boundaries="host"), Speeds(1e9, 100.0))
    assert near.stall_boundaries == 0 and away.stall_boundaries > 5
    assert away.seconds > near.seconds + 5


# What is watched for


def two_layers() -> Sequence[Any]:
    return layers_like(Demand((LayerCost(10, 10, 10), LayerCost(10, 10, 10))))


def test_a_buffer_used_before_it_is_filled_is_seen() -> None:
    clock = Clock()
    device = VirtualDevice(clock, Speeds(1.0, 1.0))
    buffer = device.host_buffer(10)
    VirtualReader(device).submit(two_layers()[0], buffer)
    slots = device.device_slots(10, 1)
    with pytest.raises(ScheduleError, match="before it was filled"):
        slots.upload(buffer)
    clock.wait_until(10)
    slots.upload(buffer)


def test_a_buffer_refilled_while_it_is_copied_is_seen() -> None:
    clock = Clock()
    device = VirtualDevice(clock, Speeds(1.0, 1.0))
    reader = VirtualReader(device)
    buffer = device.host_buffer(10)
    reader.submit(two_layers()[0], buffer).wait()
    upload = device.device_slots(10, 1).upload(buffer)
    with pytest.raises(ScheduleError, match="refilled"):
        reader.submit(two_layers()[1], buffer)
    reader.submit(two_layers()[1], buffer, upload.drained)


def test_a_buffer_refilled_on_lease_is_seen_where_it_is_the_slot() -> None:
    clock = Clock()
    device = VirtualDevice(clock, Speeds(1.0))
    reader = VirtualReader(device)
    buffer = device.host_buffer(10)
    reader.submit(two_layers()[0], buffer).wait()
    upload = device.device_slots(10, 1).upload(buffer)
    upload.wait()
    with pytest.raises(ScheduleError, match="on lease"):
        reader.submit(two_layers()[1], buffer)
    upload.release()
    reader.submit(two_layers()[1], buffer)


def test_another_layers_weights_are_seen() -> None:
    clock = Clock()
    device = VirtualDevice(clock, Speeds(1.0, 1.0))
    one, other = two_layers()
    buffer = device.host_buffer(10)
    VirtualReader(device).submit(one, buffer).wait()
    slot = device.device_slots(10, 1).upload(buffer).wait()
    device.compute(1.0, slot, one)
    with pytest.raises(ScheduleError, match="another layer"):
        device.compute(1.0, slot, other)


@given(
    orders=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=8), min_size=1, max_size=4),
    stray=st.lists(st.integers(0, 5), max_size=3),
    depth=st.integers(1, 4),
    residents=st.sets(st.integers(0, 5)),
    cached=st.sets(st.integers(0, 5)),
    speeds=SPEEDS,
    length=LENGTHS,
)
def test_no_order_of_leases_breaks_a_promise(
    orders: list[list[int]],
    stray: list[int],
    depth: int,
    residents: set[int],
    cached: set[int],
    speeds: Speeds,
    length: float,
) -> None:
    """Announced, jumped about in: what is computed has its own weights, or `ScheduleError` says
    otherwise.
    """
    clock = Clock()
    device = VirtualDevice(clock, speeds)
    layers = layers_like(
        Demand(tuple(LayerCost(10 * size, 10 * size, 10 * size) for size in range(1, 7)))
    )
    stream = LayerStream(
        layers,
        device,
        prefetch_depth=depth,
        residents=residents,
        host_cached=cached,
        reader=VirtualReader(device),
        clock=clock,
    )
    for order in orders:
        stream.announce(order)
        for layer in (*order, *stray):
            with stream.lease(layer) as lease:
                device.compute(length, lease.slot, layers[layer])
    counters = stream.counters
    on_disk = [
        layer for order in orders for layer in (*order, *stray) if layer not in residents | cached
    ]
    assert counters.layers_read >= len(set(on_disk))
    assert counters.layers_kept <= len(on_disk)
    device.synchronize()
    assert clock.now >= device.computed - 1e-9
    stream.close()


def test_a_simulation_has_no_bytes() -> None:
    device = VirtualDevice(Clock(), Speeds(1.0, 1.0))
    assert device.host_buffer(10**15).device == torch.device("meta")


@contextmanager
def events_recorded() -> Iterator[list[tuple[str, int]]]:
    """Record which layers are leased, those on lease already excepted, and which are read into
    the ring.
    """
    found = list[tuple[str, int]]()
    lease = LayerStream.lease
    read = LayerRing._read

    def record_lease(self: LayerStream, layer: int) -> Any:
        if layer not in self._leases.by_layer:
            found.append(("lease", layer))
        return lease(self, layer)

    def record_read(self: LayerRing, layer: int, *rest: Any) -> None:
        found.append(("read", layer))
        read(self, layer, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerStream, "lease", record_lease)
        patch.setattr(LayerRing, "_read", record_read)
        yield found


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"prefetch_depth": 4},
        {"strategy": "resident"},
        {"device_memory": "1MB", "batch_size": 1, "max_length": 16},
        {"gradient_checkpointing": False},
        {"lora_target_modules": ["q_proj"], "lora_layers_to_transform": [3, 5]},
    ],
    ids=str,
)
def test_the_engine_leases_and_reads_what_the_simulator_does(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Layer by layer, over some steps of a real run: what is simulated is what runs."""
    model = LemaModel(run_settings(write_model(tmp_path / "model"), tmp_path, **changes))
    model.initialize_lora()
    trainer = model.get_trainer()
    memory = model.memory
    ids = torch.randint(1, 290, (2, 16))
    with events_recorded() as real:
        for _ in range(STEPS):
            trainer.accumulate([{"input_ids": ids, "labels": ids}] * 2, more=True)
    sizes = [
        LayerCost(layer.nbytes, layer.read_bytes, layer.nbytes, 0, 0, 1, 1, 1)
        for layer in memory.layers
    ]
    demand = Demand(tuple(sizes), lowest=model.adapter.lowest_trained, shared=True)
    allocation = Allocation(memory.num_slots, memory.residents, memory.host_cached)
    with events_recorded() as simulated:
        simulate(demand, allocation, Speeds(1e6))
    assert ("read", 7) in real or memory.host_cached
    assert simulated == real
    model.close()
