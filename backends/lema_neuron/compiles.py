"""Counts the graphs that a lazy device compiles in each step: after the first steps there should be
no new ones.

A compiler takes minutes for a graph of a layer. The same graph is used by all layers of one shape,
and in all steps whose micro-batches have one shape. Another length of rows or another number of
rows means another compilation, and without this count the user would notice only the time that it
takes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["WARM_UP", "Compiles"]

# Steps. One is not enough if a user's optimizer makes its state in the first step, or if a warm-up
# begins with a learning rate of 0, because the compiler takes 0 for a constant.
WARM_UP = 2


class Compiles:
    """Counts the graphs compiled in each step.

    Args:
        total: returns how many were compiled so far.
        warm_up: the number of first steps that are expected to compile graphs.

    Attributes:
        of_steps: how many were compiled in each step. These graphs run where a lease or a step
            begins or ends. Graphs that run because the host reads a number, for example after an
            evaluation, are small and not counted.
    """

    def __init__(self, total: Callable[[], int], warm_up: int = WARM_UP) -> None:
        self._total = total
        self._warm_up = warm_up
        self._num_compiled = 0
        self.of_steps: list[int] = []

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the graphs that are compiled in a `with` block."""
        before = self._total()
        yield
        self._num_compiled += self._total() - before

    def step_ended(self) -> None:
        """End the count of a step; warn if a step after the first ones compiled graphs."""
        num_compiled = self._num_compiled
        self._num_compiled = 0
        self.of_steps.append(num_compiled)
        if num_compiled and len(self.of_steps) > self._warm_up:
            warnings.warn(
                f"step {len(self.of_steps)} compiled {num_compiled} "
                f"graph{'' if num_compiled == 1 else 's'} anew, after "
                f"{self._warm_up} in which all should have been: rows of one length, and "
                "as many in every micro-batch "
                "(pad_to_multiple_of, micro_batch_size), need no others",
                stacklevel=2,
            )
