"""The solver: within both limits, never slower with more memory, and nothing taken that helps
nobody.
"""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lema.errors import MemoryLimitError
from lema.plan import Allocation
from lema.plan.budget import MARGIN, scattered, solve, spread
from lema.plan.cost import Demand, LayerCost, Overhead, Speeds, phases, seconds
from lema.plan.memory import device_parts, host_parts

LAYERS = st.builds(
    LayerCost,
    slot_bytes=st.integers(1, 500),
    read_bytes=st.integers(1, 500),
    upload_bytes=st.integers(1, 500),
    saved_bytes=st.integers(0, 800),
    expand=st.floats(0, 3),
    forward=st.floats(0, 9),
    recompute=st.floats(0, 9),
    backward=st.floats(0, 9),
    micro_saved_bytes=st.integers(0, 200),
    product_bytes=st.integers(0, 400),
    without_products=st.floats(0, 9),
)
BYTES = st.integers(0, 400)


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    layers = tuple(draw(st.lists(LAYERS, min_size=1, max_size=9)))
    return Demand(
        layers,
        lowest=draw(st.integers(0, len(layers) - 1)),
        outside_bytes=draw(BYTES),
        adapter_bytes=draw(BYTES),
        working_bytes=draw(BYTES),
        flight_bytes=draw(BYTES),
        expanded_bytes=draw(BYTES),
        boundary_bytes=draw(BYTES),
        micro_boundary_bytes=draw(BYTES),
        head_seconds=draw(st.floats(0, 9)),
        shared=draw(st.booleans()),
        overhead=draw(
            st.builds(Overhead, workspaces=BYTES, block=st.sampled_from([1, 1, 16, 128]))
        ),
    )


SPEEDS = st.builds(
    Speeds, disk=st.floats(1, 1000), link=st.one_of(st.floats(1, 1000), st.just(float("inf")))
)
LIMITS = st.one_of(st.none(), st.integers(0, 9000))
OPTIONS = st.fixed_dictionaries(
    {
        "recompute": st.booleans(),
        "host_cache": st.sampled_from(["none", "fill", "all"]),
        "saved_on": st.sampled_from(["device", "host", "disk"]),
    }
)


def within(demand: Demand, allocation: Allocation, device: int | None, host: int | None) -> bool:
    on_device, in_host = (
        sum(parts(demand, allocation).values()) for parts in (device_parts, host_parts)
    )
    return (device is None or on_device <= device) and (host is None or in_host <= host)


@given(demands(), SPEEDS, st.integers(2, 4), LIMITS, LIMITS, OPTIONS)
def test_both_limits_hold(
    demand: Demand,
    speeds: Speeds,
    slots: int,
    device: int | None,
    host: int | None,
    options: dict[str, object],
) -> None:
    try:
        found = solve(demand, speeds, slots, device_limit=device, host_limit=host, **options)  # type: ignore[arg-type]
    except MemoryLimitError as error:
        assert error.where in ("device_memory", "host_memory")
        return
    assert within(demand, found, device, host)
    assert found.slots == slots
    assert not found.residents & found.host_cached
    assert found.residents == set(spread(len(found.residents), len(demand.layers)))
    assert found.saved <= set(demand.visited_twice)


@given(demands(), SPEEDS, st.integers(2, 4), *[st.integers(0, 9000)] * 4, OPTIONS)
def test_more_memory_is_never_predicted_to_be_slower(
    demand: Demand,
    speeds: Speeds,
    slots: int,
    device: int,
    host: int,
    more_device: int,
    more_host: int,
    options: dict[str, object],
) -> None:
    def best(device: int, host: int) -> float:
        found = solve(demand, cautious, slots, device_limit=device, host_limit=host, **options)  # type: ignore[arg-type]
        return seconds(demand, found, Speeds(cautious.disk / 1.1, cautious.link / 1.1))

    cautious = speeds
    try:
        less = best(device, host)
    except MemoryLimitError:
        return
    assert best(device + more_device, host + more_host) <= less


@given(
    demands(),
    SPEEDS,
    st.integers(2, 4),
    st.integers(0, 9000),
    st.sampled_from(["device", "host", None]),
)
def test_activations_are_kept_only_where_computing_takes_the_time(
    demand: Demand, speeds: Speeds, slots: int, room: int, tier: Any
) -> None:
    needed = sum(device_parts(demand, Allocation(slots, boundaries=tier or "device")).values())
    found = solve(demand, speeds, slots, device_limit=needed + room, boundaries=tier)
    if not found.saved:
        return
    cautious = Speeds(speeds.disk / MARGIN, speeds.link / MARGIN)
    without = replace(found, saved=frozenset())
    assert seconds(demand, found, cautious) < seconds(demand, without, cautious)
    down = phases(demand, without, cautious)[1]
    if found.boundaries == "device":  # else keeping them spares the way of the layer's input, too
        assert down.compute > max(down.link, down.disk)


@given(demands(), st.integers(2, 4), st.sampled_from(["device", "host", "disk"]))
def test_the_input_of_a_layer_whose_activations_are_kept_stays_with_them(
    demand: Demand, slots: int, tier: Any
) -> None:
    none = frozenset[int]()
    every = frozenset(demand.visited_twice)
    away, kept = (Allocation(slots, boundaries=tier, saved=saved) for saved in (none, every))
    activations = sum(demand.layers[index].saved_bytes for index in every)
    inputs = len(every) * demand.boundary_bytes
    parts = device_parts(demand, kept)
    assert (parts["saved"], parts["boundaries"]) == (activations, inputs)
    assert host_parts(demand, kept)["boundaries"] == 0
    assert host_parts(demand, away)["boundaries"] <= inputs


@given(demands(), SPEEDS, st.integers(2, 4), st.sampled_from(["host", "disk"]))
def test_what_waits_elsewhere_is_counted_there(
    demand: Demand, speeds: Speeds, slots: int, tier: Any
) -> None:
    here, away = (
        solve(demand, speeds, slots, recompute=False, saved_on=place) for place in ("device", tier)
    )
    assert (here.saved_on, away.saved_on) == ("device", tier)
    assert here.saved == away.saved == set(demand.visited_twice)
    total = sum(demand.layers[index].saved_bytes + demand.boundary_bytes for index in away.saved)
    assert host_parts(demand, here)["saved"] == 0
    # of these few bytes all pass through memory at once
    assert host_parts(demand, away)["saved"] == total
    passing = max((demand.layers[index].micro_saved_bytes for index in away.saved), default=0)
    assert device_parts(demand, away)["saved"] <= passing + demand.micro_boundary_bytes
    assert device_parts(demand, away)["boundaries"] == 0
    for one, other in zip(phases(demand, here, speeds), phases(demand, away, speeds), strict=True):
        assert one.compute == other.compute
        assert other.disk - one.disk == pytest.approx(
            total / speeds.disk * (tier == "disk"), abs=1e-6
        )
    down = [phases(demand, one, speeds)[1].link for one in (here, away)]
    assert down[1] - down[0] == pytest.approx(total / speeds.link, abs=1e-6)


@given(demands(), SPEEDS, st.integers(2, 4), st.integers(0, 9000))
def test_a_refused_limit_of_host_memory_says_what_is_enough(
    demand: Demand, speeds: Speeds, slots: int, limit: int
) -> None:
    try:
        solve(demand, speeds, slots, host_limit=limit, recompute=False, saved_on="host")
    except MemoryLimitError as error:
        assert "activation_offloading: disk" in error.how
        enough = int(error.what.partition(" bytes")[0].replace(",", ""))
        assert enough > limit
        solve(demand, speeds, slots, host_limit=enough, recompute=False, saved_on="host")
        with pytest.raises(MemoryLimitError):
            solve(demand, speeds, slots, host_limit=enough - 1, recompute=False, saved_on="host")


@given(demands(), SPEEDS, st.integers(2, 4), st.booleans())
def test_without_limits_no_more_is_taken_than_streaming_needs(
    demand: Demand, speeds: Speeds, slots: int, recompute: bool
) -> None:
    found = solve(demand, speeds, slots, recompute=recompute)
    kept = frozenset[int]() if recompute else frozenset(demand.visited_twice)
    assert found == Allocation(slots, saved=kept, recompute=recompute)


@given(demands(), SPEEDS, st.integers(2, 4), st.integers(0, 9000))
def test_a_refused_limit_says_what_is_enough(
    demand: Demand, speeds: Speeds, slots: int, limit: int
) -> None:
    try:
        solve(demand, speeds, slots, device_limit=limit)
    except MemoryLimitError as error:
        enough = int("".join(filter(str.isdigit, error.how.partition(" bytes")[0])))
        assert enough > limit
        assert within(demand, solve(demand, speeds, slots, device_limit=enough), enough, None)
        with pytest.raises(MemoryLimitError):
            solve(demand, speeds, slots, device_limit=enough - 1)


def equal_layers(count: int = 12, **changes: float) -> Demand:
    values = {"forward": 1.0, "recompute": 1.0, "backward": 1.0, **changes}
    return Demand(
        (LayerCost(100, 100, 100, saved_bytes=50, **values),) * count,  # type: ignore[arg-type]
        boundary_bytes=10,
        micro_boundary_bytes=1,
    )


def test_memory_goes_to_residents_until_the_link_keeps_up_and_then_to_activations() -> None:
    demand = equal_layers()
    slow = Speeds(disk=1e9, link=50.0)  # a layer takes two seconds to upload, one to compute
    bare = sum(device_parts(demand, Allocation(3)).values())
    taken = [solve(demand, slow, 3, device_limit=bare + extra) for extra in range(0, 2000, 50)]
    for one in taken:
        down = phases(demand, one, slow)[1]
        if one.saved:  # where the computation is what takes the time
            assert phases(demand, replace(one, saved=frozenset()), slow)[1].compute > down.link
        assert one.residents == set(spread(len(one.residents), 12))
    assert taken[2].residents and not taken[2].saved
    assert taken[-1].saved == set(demand.visited_twice)


def test_products_are_kept_before_activations_if_they_save_more_seconds_for_their_bytes() -> None:
    fast = Speeds(disk=1e9, link=1e9)
    cheap = {"product_bytes": 20}
    dear = {"product_bytes": 45}
    for sizes, order in ((cheap, ("products", "saved")), (dear, ("saved", "products"))):
        demand = equal_layers(**sizes, without_products=0.2)
        bare = sum(device_parts(demand, Allocation(3)).values())
        seen = list[Allocation]()
        for extra in range(0, 700, 5):
            seen.append(
                solve(demand, fast, 3, device_limit=bare + extra, stay=False, boundaries="device")
            )
            assert sum(device_parts(demand, seen[-1]).values()) <= bare + extra
            assert not seen[-1].saved & seen[-1].products
        times = [seconds(demand, one, fast) for one in seen]
        assert times == sorted(times, reverse=True)
        first = next(one for one in seen if one.saved or one.products)
        assert len(getattr(first, order[0])) == 1 and not getattr(first, order[1])
        assert seen[-1].saved == set(demand.visited_twice) and not seen[-1].products
    only_graphs = solve(
        equal_layers(**cheap), fast, 3, device_limit=bare + 100, stay=False, products=False
    )
    assert only_graphs.saved and not only_graphs.products


def test_boundaries_leave_the_device_when_there_is_no_room_for_them() -> None:
    demand = equal_layers(recompute=0.0)
    fast = Speeds(disk=1e9, link=1e9)
    kept = sum(device_parts(demand, Allocation(3)).values())
    assert solve(demand, fast, 3, device_limit=kept).boundaries == "device"
    assert solve(demand, fast, 3, device_limit=kept - 1).boundaries == "host"
    host = sum(host_parts(demand, Allocation(3)).values())
    assert solve(demand, fast, 3, device_limit=kept - 1, host_limit=host + 20).boundaries == "disk"


def test_host_memory_holds_layers_as_long_as_reading_is_what_takes_the_time() -> None:
    demand = equal_layers()
    cold = Speeds(disk=50.0, link=1e9)
    ring = sum(host_parts(demand, Allocation(3)).values())
    found = [
        solve(demand, cold, 3, host_limit=ring + 100 * count, host_cache="fill")
        for count in range(14)
    ]
    sizes = [len(one.host_cached) for one in found]
    assert sizes == sorted(sizes) and sizes[1] == 1
    assert sizes[-1] < 12  # the rest are read while others compute
    enough = replace(
        demand, layers=tuple(replace(layer, forward=9.0, backward=9.0) for layer in demand.layers)
    )
    assert not solve(enough, cold, 3, host_limit=10_000, host_cache="fill").host_cached


@given(st.integers(1, 200), st.data())
def test_layers_are_scattered_however_many_are_taken(num_layers: int, data: st.DataObject) -> None:
    order = scattered(num_layers)
    assert sorted(order) == list(range(num_layers))
    count = data.draw(st.integers(1, num_layers))
    places = sorted(order[:count])
    gaps = [after - before for before, after in zip(places, [*places[1:], num_layers], strict=True)]
    assert max(gaps) <= 4 * max(1, num_layers / count)
