"""Which place is refilled: an empty one, else the one wanted last, never one that is wanted
sooner or on lease.
"""

import math

from hypothesis import given
from hypothesis import strategies as st

from lema.stream.schedule import Order, index_to_refill

LAYER = st.integers(0, 7)


def announced(layers: list[int]) -> Order:
    order = Order()
    order.extend(layers)
    return order


@given(st.lists(LAYER, max_size=20), st.lists(LAYER, max_size=20), st.integers(0, 20))
def test_an_order_knows_when_each_layer_is_wanted_next(
    first: list[int], second: list[int], begun: int
) -> None:
    order = announced(first)
    order.extend(second)
    whole = first + second
    begun = min(begun, len(whole))
    for _ in range(begun):
        order.begin()
    assert list(order) == list(enumerate(whole))[begun:]
    assert len(order) == len(whole) - begun
    assert order.first == (whole[begun] if begun < len(whole) else None)
    for layer in range(8):
        later = [number for number, ahead in order if ahead == layer]
        assert order.next_use(layer) == (later[0] if later else math.inf)


@given(st.lists(LAYER, max_size=20), st.integers(0, 5), st.lists(LAYER, min_size=1, max_size=9))
def test_what_was_announced_before_is_forgotten(
    before: list[int], begun: int, after: list[int]
) -> None:
    order = announced(before)
    for _ in range(min(begun, len(before))):
        order.begin()
    order.clear()
    assert (
        len(order) == 0
        and order.first is None
        and all(order.next_use(layer) == math.inf for layer in range(8))
    )
    order.extend(after)
    assert [layer for _, layer in order] == after
    numbers = {layer: number for number, layer in reversed(list(order))}
    assert all(order.next_use(layer) == numbers[layer] for layer in after)


@given(
    st.lists(LAYER, min_size=1, max_size=20),
    st.lists(
        st.one_of(st.none(), LAYER),
        max_size=5,
        unique_by=lambda layer: object() if layer is None else layer,
    ),
    st.sets(LAYER),
    st.data(),
)
def test_the_place_refilled_is_the_one_wanted_last(
    layers: list[int], places: list[int | None], held: set[int], data: st.DataObject
) -> None:
    order = announced(layers)
    number = data.draw(st.integers(0, len(layers) - 1))
    chosen = index_to_refill(places, order, number, held)
    free = [place for place, layer in enumerate(places) if layer not in held]
    uses = {
        place: math.inf if places[place] is None else order.next_use(places[place])
        for place in free
    }
    if chosen is None:
        assert all(use <= number for use in uses.values())
        return
    assert chosen in free and uses[chosen] > number
    assert uses[chosen] == max(uses.values())
    assert places[chosen] is None or None not in places


def test_of_layers_that_nobody_wants_the_lowest_is_kept() -> None:
    """The next pass begins at the bottom."""
    assert index_to_refill([3, 0, 5, 1], announced([7]), 0, in_use=()) == 2
