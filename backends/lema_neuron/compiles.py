"""How many graphs a lazy device has compiled, told step by step: after the first steps there are no new ones.

A compiler takes minutes for a graph of a layer. The same graph is used by all layers of one shape, and in all steps
whose micro-batches have one shape; whatever changes it (another length of a row, another number of rows) is compiled
again, and nothing but the time it takes would tell.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["WARM_UP", "Compiles"]

# Steps. One is enough, but where an optimizer of the user's makes its state in the first, or where a warm-up begins
# with a learning rate of 0, which the compiler takes for a constant.
WARM_UP = 2


class Compiles:
    """Counts the graphs compiled in each step.

    Args:
        total: returns how many were compiled so far.
        warm_up: steps in which graphs are compiled as a matter of course.

    Attributes:
        of_steps: how many were compiled in each step, from the first: those that run where a lease or a step begins or
            ends. Those that run because someone asks for a number, as at the end of an evaluation, are small.
    """

    def __init__(self, total: Callable[[], int], warm_up: int = WARM_UP) -> None:
        self._total, self._warm_up = total, warm_up
        self._found = 0
        self.of_steps: list[int] = []

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what is compiled in a `with` block."""
        before = self._total()
        yield
        self._found += self._total() - before

    def step_ended(self) -> None:
        """End the count of a step; warn of graphs that a later step than the first ones needed."""
        found, self._found = self._found, 0
        self.of_steps.append(found)
        if found and len(self.of_steps) > self._warm_up:
            warnings.warn(
                f"step {len(self.of_steps)} compiled {found} graph{'' if found == 1 else 's'} anew, after "
                f"{self._warm_up} in which all should have been: rows of one length, and as many in every micro-batch "
                "(pad_to_multiple_of, micro_batch_size), need no others",
                stacklevel=2,
            )
