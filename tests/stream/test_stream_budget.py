"""What stays on the device fits the budget, and is as much as fits, evenly spread."""

import itertools
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lema.errors import MemoryLimitError
from lema.stream.budget import choose_residents, spread

SIZES = st.lists(st.integers(1, 1000), min_size=1, max_size=40)
SLOTS = st.integers(2, 6)


def device_bytes(sizes: list[int], residents: frozenset[int], fixed: int, num_slots: int) -> int:
    """What the stream will take: slots as large as the largest streamed layer, the residents, and the rest."""
    streamed = [size for layer, size in enumerate(sizes) if layer not in residents]
    return fixed + num_slots * max(streamed, default=0) + sum(sizes[layer] for layer in residents)


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


@given(SIZES, st.integers(0, 5000), SLOTS, st.integers(0, 60_000))
def test_the_budget_holds_or_the_error_says_what_would(
    sizes: list[int], fixed: int, num_slots: int, budget: int
) -> None:
    try:
        residents = choose_residents(sizes, budget, fixed, num_slots)
    except MemoryLimitError as error:
        assert f"{budget:,} bytes" in error.what and f"{fixed:,} bytes" in error.what
        assert error.where == "device_memory"
        asked = re.search(r"at least ([\d,]+) bytes", error.how)
        assert asked is not None
        enough = int(asked[1].replace(",", ""))
        assert enough > budget
        residents = choose_residents(sizes, enough, fixed, num_slots)
        assert device_bytes(sizes, residents, fixed, num_slots) <= enough
        with pytest.raises(MemoryLimitError):
            choose_residents(sizes, enough - 1, fixed, num_slots)
    else:
        assert residents <= set(range(len(sizes)))
        assert device_bytes(sizes, residents, fixed, num_slots) <= budget


@given(st.integers(1, 1000), st.integers(1, 60), st.integers(0, 5000), SLOTS, st.integers(0, 100_000))
def test_equal_layers_stay_as_many_as_fit(size: int, num_layers: int, fixed: int, num_slots: int, budget: int) -> None:
    assume(budget >= fixed + num_slots * size)
    count = len(choose_residents([size] * num_layers, budget, fixed, num_slots))
    room = budget - fixed
    assert count == (num_layers if room >= num_layers * size else room // size - num_slots)


@given(SIZES, st.integers(0, 5000), SLOTS)
def test_without_a_budget_nothing_stays(sizes: list[int], fixed: int, num_slots: int) -> None:
    assert choose_residents(sizes, None, fixed, num_slots) == frozenset()
