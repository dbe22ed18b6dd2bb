"""The order of visits: up, then down, the turn once, and nothing below the lowest layer that
trains.
"""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from lema.stream.schedule import (
    fetched,
    fetched_per_step,
    forward_order,
    in_parts,
    training_order,
)

DEPTHS = st.integers(1, 200)


@given(DEPTHS)
def test_an_evaluation_goes_up_once(num_layers: int) -> None:
    assert list(forward_order(num_layers)) == list(range(num_layers))


@given(DEPTHS, st.data())
def test_a_step_goes_up_and_down_and_turns_at_the_top(num_layers: int, data: st.DataObject) -> None:
    lowest = data.draw(st.integers(0, num_layers - 1))
    order = training_order(num_layers, lowest)
    assert order[:num_layers] == forward_order(num_layers)
    assert list(order[num_layers:]) == list(range(lowest, num_layers - 1))[::-1]
    assert len(order) == 2 * num_layers - 1 - lowest
    # Neighbours in the order are neighbours in the model: a step never jumps.
    assert all(abs(after - before) == 1 for before, after in itertools.pairwise(order))
    # The backward reaches every layer that the forward left a boundary for, and the turn comes
    # once.
    assert {layer for layer in order if order.count(layer) == 2} == set(
        range(lowest, num_layers - 1)
    )


# What it costs


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, int, set[int], set[int], int]:
    """Draw layers, places, residents, layers cached in host memory, and the lowest layer that
    trains.
    """
    num_layers = draw(st.integers(1, 24))
    some = st.one_of(st.just(set[int]()), st.sets(st.integers(0, num_layers - 1)))
    lowest = st.one_of(st.just(0), st.integers(0, num_layers - 1))
    return num_layers, draw(st.integers(1, 8)), draw(some), draw(some), draw(lowest)


@given(steps())
def test_the_third_step_fetches_what_the_second_does(
    step: tuple[int, int, set[int], set[int], int],
) -> None:
    num_layers, slots, residents, cached, lowest = step
    order = training_order(num_layers, lowest)
    read = fetched_per_step(num_layers, slots, residents | cached, lowest)
    assert (
        fetched(order * 3, slots, residents | cached)
        == fetched(order * 2, slots, residents | cached) + read
    )


@given(steps())
def test_training_every_layer_fetches_twice_what_is_not_held(
    step: tuple[int, int, set[int], set[int], int],
) -> None:
    num_layers, slots, residents, cached, _ = step
    passing = num_layers - len(residents | cached)
    assert len(fetched_per_step(num_layers, slots, residents | cached)) == 2 * max(
        0, passing - slots
    )


@given(
    st.lists(st.integers(0, 6), max_size=40),
    st.integers(1, 5),
    st.sets(st.integers(0, 6), max_size=2),
)
def test_a_layer_is_fetched_unless_fewer_others_than_places_came_between(
    order: list[int], places: int, held: set[int]
) -> None:
    expected = []
    for number, layer in enumerate(order):
        before = [earlier for earlier in range(number) if order[earlier] == layer]
        between = set(order[before[-1] + 1 : number]) - held if before else set(range(99))
        if layer not in held and len(between) >= places:
            expected.append(layer)
    assert list(fetched(order, places, held)) == expected


@given(st.lists(st.integers(0, 6), max_size=40), st.integers(1, 5))
def test_more_places_never_cost_a_fetch(order: list[int], places: int) -> None:
    assert len(fetched(order, places + 1)) <= len(fetched(order, places))
    assert len(fetched(order, 7)) == len(set(order))


@given(st.integers(1, 12), st.data())
def test_a_layer_in_parts_is_leased_once_each_way_its_parts_the_other_way_round_going_down(
    num_layers: int, data: st.DataObject
) -> None:
    counts = data.draw(st.lists(st.integers(0, 5), min_size=num_layers, max_size=num_layers))
    ends = list(itertools.accumulate(counts, initial=num_layers))
    parts = {at: range(*pair) for at, pair in enumerate(itertools.pairwise(ends)) if counts[at]}
    up = in_parts(forward_order(num_layers), parts)
    top = num_layers - 1
    assert list(up) == [
        one for layer in range(num_layers) for one in (layer, *parts.get(layer, ()))
    ]
    order = in_parts(training_order(num_layers), parts, top_layer=top)
    assert order[: len(up)] == up
    # Down again the same parts, those of the turn first; its own part is still on lease.
    down = order[len(up) :]
    assert list(down[: counts[top]]) == list(parts.get(top, ()))[::-1]
    assert down[counts[top] :] == in_parts(range(top - 1, -1, -1), parts, down=True)
    pinned = in_parts(training_order(num_layers), parts, top_layer=top, pinned=True)
    assert set(pinned) == set(order) and len(fetched(pinned, sum(counts) + num_layers)) == len(
        set(order)
    )
