"""Steps of a part of what an optimizer holds, and a thread in which they are taken behind the backward."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from torch import nn
from torch.optim import Optimizer

__all__ = ["Behind", "settings_of", "step_part"]


def step_part(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Step some of an optimizer's parameters, as its own `step` would that found no gradient of the others."""
    wanted = {id(parameter) for parameter in parameters}
    part = copy.copy(optimizer)  # the state is the same object
    part.param_groups = [
        {**group, "params": [one for one in group["params"] if id(one) in wanted]} for group in optimizer.param_groups
    ]
    part.step()


def settings_of(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer of the same parameter groups, with no state."""
    bare = copy.copy(optimizer)
    bare.state = defaultdict(dict)
    return bare


class Behind:
    """One piece of work at a time, in a thread of its own, behind what its caller does meanwhile."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._under_way: Future[None] | None = None

    def begin(self, work: Callable[[], None]) -> None:
        """Have `work` done; blocks until what was begun before has ended.

        Raises:
            what that raised; then `work` is not begun.
        """
        self.wait()
        self._under_way = self._pool.submit(_done, [work])

    def wait(self) -> None:
        """Block until nothing is under way; raise, once, what it raised."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def failure(self) -> BaseException | None:
        """Block until nothing is under way; return what it raised, which `wait` then does not raise again."""
        under_way, self._under_way = self._under_way, None
        return None if under_way is None else under_way.exception()

    def close(self) -> None:
        """Wait for what is under way, raise what it raised, and end the thread."""
        try:
            self.wait()
        finally:
            self._pool.shutdown(wait=True)


def _done(held: list[Callable[[], None]]) -> None:
    """Do the work; what it holds is let go of before anyone is told that it has been done."""
    held.pop()()
