"""Where the weight of a head is cut into pieces."""

import math

from lema.stream.placement import PAGE

__all__ = ["spans_of"]


def spans_of(size: int, row_bytes: int, largest: int) -> tuple[tuple[int, int], ...]:
    """Return the rows of each piece, `(first, end)`: as few pieces as go into the slots of layers.

    Args:
        size: the rows of the weight.
        row_bytes: the bytes of one.
        largest: the bytes of the largest layer.
    """
    # Less two pages, because a piece begins as far into a page as it does in its file, and is
    # rounded up to one.
    budget = largest - 2 * PAGE
    count = math.ceil(size / max(1, min(size, budget // row_bytes)))
    num_rows = math.ceil(size / count)
    return tuple((first, min(first + num_rows, size)) for first in range(0, size, num_rows))
