"""How many graphs a lazy device has compiled, told step by step: after the first steps there are no new ones.

A compiler takes minutes for a graph of a layer. The same graph is used by all layers of one shape, and in all steps
whose micro-batches have one shape; whatever changes it (another length of a row, another number of rows) is compiled
again, and nothing but the time it takes would tell.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

__all__ = ["WARM_UP", "Compiles"]

WARM_UP = 2  # steps: an optimizer makes its state in the first, and uses it in the second


class Compiles:
    """Counts the graphs compiled in each step.

    Args:
        counted: returns how many were compiled so far.
        warm_up: steps in which graphs are compiled as a matter of course.

    Attributes:
        of_steps: how many were compiled in each step, from the first.
    """

    def __init__(self, counted: Callable[[], int], warm_up: int = WARM_UP) -> None:
        self._counted, self._warm_up = counted, warm_up
        self._seen = counted()
        self.of_steps: list[int] = []

    def step_ended(self) -> None:
        """Count the graphs of the step that ends; warn of those that a later step than the first ones needed."""
        total = self._counted()
        found, self._seen = total - self._seen, total
        self.of_steps.append(found)
        if found and len(self.of_steps) > self._warm_up:
            warnings.warn(
                f"step {len(self.of_steps)} compiled {found} graph{'' if found == 1 else 's'} anew, after "
                f"{self._warm_up} in which all should have been: rows of one length, and as many in every micro-batch "
                "(pad_to_multiple_of, micro_batch_size), need no others",
                stacklevel=2,
            )
