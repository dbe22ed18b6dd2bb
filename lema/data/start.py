"""Where a stage of training begins with a data set: in an order of its own, or where a stage before has left it."""

from typing import NamedTuple

__all__ = ["Start"]


class Start(NamedTuple):
    """A place in the order of a data set's rows, of all its epochs.

    Args:
        stage: of whose order it is.
        taken: rows that have been given in this order.
    """

    stage: int
    taken: int
