"""Layers and models over 2 and 4 ranks compute what one process computes, and so do their
gradients.

The cases are in `neuronlayers.py` and `neuronmodels.py`; they run in one launch for each number of
ranks.
"""

from collections.abc import Callable
from typing import Any

import pytest
from neuronlayers import layer_cases
from neuronmodels import left_out, model_cases

TOLERANCE = 1e-5  # relative to the largest number of one process
# whose norms, rotary tables and softmax are in single all the same
EXACT = {
    "draw": 0.0,
    "llama-fewer-in-double": 1e-6,
}
NAMES = [
    pytest.param(
        count,
        name,
        id=f"{name}-on-{count}",
        marks=[pytest.mark.exhaustive] if count == 4 or name in left_out(count) else [],
    )
    for count in (2, 4)
    for name in {**layer_cases(count), **model_cases(count)}
    if name != "unreduced"
]


@pytest.mark.slow
@pytest.mark.whole  # they run together, in a few processes
@pytest.mark.parametrize(("count", "name"), NAMES)
def test_ranks_compute_what_one_process_computes(
    ranks: Callable[[int], Any], count: int, name: str
) -> None:
    for rank, measured in enumerate(ranks(count)[name]):
        assert isinstance(measured, dict), measured
        assert measured
        far = {
            what: value
            for what, value in measured.items()
            if not value <= EXACT.get(name, TOLERANCE)
        }
        assert not far, f"rank {rank}"


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_without_the_reduction_whole_factors_get_other_gradients(
    ranks: Callable[[int], Any], count: int
) -> None:
    for measured in ranks(count)["unreduced"]:
        assert measured["wrong"] > 0.01
