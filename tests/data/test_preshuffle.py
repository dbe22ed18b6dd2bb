"""Rows that are shuffled once come in the order of the library `datasets`.

The orders were written by axolotl 067b021 with datasets 4.8.4, on 29 November 2026:
`merge_datasets` and then `create_train_validation_split` of axolotl/utils/data/shared.py.
"""

import numpy as np
import pytest

from lema.data.read import prepare_data
from lema.data.sets.preshuffle import datasets_order, last_rows_split, surviving_order
from lema.errors import DataError


@pytest.mark.parametrize(
    ("count", "split", "seed", "train", "held_back"),
    [
        (10, 0.25, 42, [5, 6, 0, 7, 3, 2, 4], [9, 1, 8]),
        (7, 2, 3, [5, 6, 2, 1, 4], [3, 0]),
    ],
)
def test_rows_have_the_order_and_the_split_of_datasets(
    count: int, split: float, seed: int, train: list[int], held_back: list[int]
) -> None:
    rows = [{"input_ids": [number, number]} for number in range(count)]
    data = prepare_data(rows, max_length=8).preshuffled(seed)
    first, last = last_rows_split(data, split)
    assert [row["input_ids"][0] for row in first] == train
    assert [row["input_ids"][0] for row in last] == held_back


def test_rows_that_were_dropped_are_counted_in_the_order() -> None:
    rows = [{"input_ids": [number] * (9 if number in (0, 3) else 2)} for number in range(10)]
    data = prepare_data(rows, max_length=8, overlong="drop").preshuffled(42)
    order = [number for number in datasets_order(10, 42) if number not in (0, 3)]
    assert [row["input_ids"][0] for row in data] == order


def test_files_are_one_after_the_other() -> None:
    kept = [(0, 1), (0, 3), (1, 1)]
    order = surviving_order(kept, [(0, 2)], 5)
    places = {0: 0, 2: 1, 3: 2}
    expected = [places[int(place)] for place in datasets_order(4, 5) if place != 1]
    assert np.array_equal(order, expected)


def test_a_split_leaves_rows_on_both_sides() -> None:
    data = prepare_data([{"input_ids": [1, 2]}], max_length=8)
    with pytest.raises(DataError, match="leaves 0 of 1"):
        last_rows_split(data, 0.5)
