"""What stays on the device is evenly spread; `test_stream_solver.py` has how much it is."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lema.plan.budget import spread


@given(st.integers(1, 200), st.data())
def test_layers_are_spread_evenly(num_layers: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, num_layers))
    chosen = spread(count, num_layers)
    assert len(chosen) == len(set(chosen)) == count
    assert all(0 <= layer < num_layers for layer in chosen)
    gaps = [after - before for before, after in itertools.pairwise(chosen)]
    assert not gaps or max(gaps) - min(gaps) <= 1
    # Neither end is left with more than its half of a gap.
    assert not chosen or max(chosen[0], num_layers - 1 - chosen[-1]) <= num_layers / (2 * count)


@pytest.mark.parametrize("count", [-1, 4])
def test_no_more_layers_are_spread_than_there_are(count: int) -> None:
    with pytest.raises(ValueError, match="out of 3 layers"):
        spread(count, 3)
