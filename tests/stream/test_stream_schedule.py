"""The order of visits: up, then down, the turn once, and nothing below the lowest layer that trains."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from lema.stream.schedule import forward_order, layers_read, training_order

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
    # The backward reaches every layer that the forward left a boundary for, and the turn comes once.
    assert {layer for layer in order if order.count(layer) == 2} == set(range(lowest, num_layers - 1))


@given(DEPTHS, st.data())
def test_residents_save_one_read_per_visit(num_layers: int, data: st.DataObject) -> None:
    residents = data.draw(st.sets(st.integers(0, num_layers - 1)))
    order = training_order(num_layers)
    top = num_layers - 1
    saved = 2 * len(residents) - (top in residents)
    assert layers_read(order) == 2 * num_layers - 1
    assert layers_read(order, residents) == 2 * num_layers - 1 - saved
    assert layers_read(forward_order(num_layers), residents) == num_layers - len(residents)
