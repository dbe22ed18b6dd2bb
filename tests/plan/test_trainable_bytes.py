"""What training weights takes, and what of it goes to files."""

import pytest
import torch

from lema.errors import ConfigError, MemoryLimitError
from lema.plan.work.trainable_bytes import masters_in_files, trainable_bytes


def test_twelve_bytes_a_parameter_beside_what_streams() -> None:
    half, single = (
        trainable_bytes([("a", 7, dtype), ("b", 3, dtype)])
        for dtype in (torch.bfloat16, torch.float32)
    )
    assert (half.count, half.nbytes, half.masters, half.moments, half.largest) == (
        10,
        20,
        40,
        80,
        14,
    )
    assert (single.nbytes, single.masters, single.moments) == (40, 0, 80)
    assert (half.movable(clipped=False), half.movable(clipped=True)) == (120, 140)
    assert (single.movable(clipped=False), single.movable(clipped=True)) == (80, 120)
    with pytest.raises(ConfigError, match="float16, which does not train"):
        trainable_bytes([("a", 1, torch.float16)])


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (1000, set()),
        (160, set()),
        (159, {0}),
        (141, {0}),
        (140, {0}),
        (139, {0, 1}),
        (100, {0, 1, 4}),
        (1e9, set()),
    ],
)
def test_as_few_layers_as_will_do_go_to_files_the_lowest_first(
    limit: int, expected: set[int]
) -> None:
    assert masters_in_files({0: 20, 1: 30, 4: 10}, 100, int(limit)) == expected


def test_a_small_layer_below_one_that_does_not_fit_goes_too() -> None:
    """What stays is the top of the model, whole: the first that the backward comes to."""
    assert masters_in_files({0: 1, 1: 100, 2: 10}, 0, 50) == {0, 1}


def test_what_must_be_in_memory_must_fit() -> None:
    with pytest.raises(MemoryLimitError, match=r"needs 100 bytes .* 99 are allowed") as raised:
        masters_in_files({0: 10}, 100, 99)
    assert raised.value.where == "host_memory"
    assert masters_in_files({0: 10}, 100, 100) == {0}
    assert masters_in_files({}, 100, 100) == frozenset()
