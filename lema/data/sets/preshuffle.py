"""The order in which the library `datasets` shuffles rows, and the rows that its split takes last.

`Dataset.shuffle(seed)` takes `numpy.random.default_rng(seed).permutation`; a split that does not
shuffle has the last rows to evaluate on, of a fraction rounded up. NumPy does not promise that a
permutation stays the same in other releases (NEP 19); it is what axolotl has.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from lema.errors import DataError

__all__ = ["datasets_order", "last_rows_split", "surviving_order"]

Selectable = TypeVar("Selectable", bound=Any)


def datasets_order(count: int, seed: int) -> npt.NDArray[np.int64]:
    """Return the positions of `count` rows in the order of `datasets`' shuffle."""
    order: npt.NDArray[np.int64] = np.random.default_rng(seed).permutation(count)
    return order


def surviving_order(
    survivors: Sequence[tuple[int, int]], missing: Sequence[tuple[int, int]], seed: int
) -> npt.NDArray[np.int64]:
    """Return the positions of the rows that are left, in the order in which all rows are shuffled.

    Args:
        survivors: file and line of each row.
        missing: the same of rows that were left out since.
        seed: of the shuffle.
    """
    positions = np.full(len(survivors) + len(missing), -1, dtype=np.int64)
    everything = [*survivors, *missing]
    for position, number in enumerate(sorted(range(len(everything)), key=everything.__getitem__)):
        if number < len(survivors):
            positions[position] = number
    order = positions[datasets_order(len(everything), seed)]
    return order[order >= 0]


def last_rows_split(rows: Selectable, eval_split: float | int) -> tuple[Selectable, Selectable]:
    """Return all but the last rows, and these; a fraction of the rows is rounded up.

    Raises:
        DataError: one of the two would be empty.
    """
    total = len(rows)
    count = eval_split if isinstance(eval_split, int) else math.ceil(eval_split * total)
    if not 0 < count < total:
        what = f"an evaluation split of {eval_split} leaves {total - count} of {total} rows"
        how = "both need at least one row: choose another split, or set eval_data"
        raise DataError(what, where="eval_split", how=how)
    return rows.first_rows(total - count), rows.select(np.arange(total - count, total))
