"""The leases announced, and which place to refill for the next of them: pure Python."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence

__all__ = ["Order", "place_to_refill"]


class Order:
    """Leases to come, in order; knows when each layer is wanted next."""

    def __init__(self) -> None:
        self._ahead: deque[int] = deque()
        self._uses: dict[int, deque[int]] = {}
        self._begun = 0  # leases that began: the number of the first to come

    def __len__(self) -> int:
        return len(self._ahead)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield each lease to come as (number, layer)."""
        return enumerate(self._ahead, self._begun)

    @property
    def first(self) -> int | None:
        """The layer to be leased next; None: no lease is announced."""
        return self._ahead[0] if self._ahead else None

    def extend(self, layers: Iterable[int]) -> None:
        """Announce leases after those announced before."""
        for layer in layers:
            self._uses.setdefault(layer, deque()).append(self._begun + len(self._ahead))
            self._ahead.append(layer)

    def begin(self) -> None:
        """Count the first lease as begun."""
        self._uses[self._ahead.popleft()].popleft()
        self._begun += 1

    def clear(self) -> None:
        """Forget what was announced."""
        self._ahead.clear()
        self._uses.clear()

    def next_use(self, layer: int) -> float:
        """Return the number of the layer's next lease; infinity: none is announced."""
        uses = self._uses.get(layer)
        return uses[0] if uses else math.inf


def place_to_refill(places: Sequence[int | None], order: Order, number: int, held: Collection[int]) -> int | None:
    """Return the place to refill for lease `number`: an empty one, else the one whose layer is wanted last.

    That is Belady's rule (1966), and the first of two by which prefetching does no harm (Cao et al. 1995): no layer is
    given up for one that is wanted later. None: every place holds a layer on lease, or one wanted sooner.

    Args:
        places: the layer in each place; None: none.
        order: leases to come.
        number: of the lease that wants a place.
        held: layers on lease.
    """
    best, furthest = None, (float(number), math.inf)
    for place, layer in enumerate(places):
        if layer in held:
            continue
        # Passes begin at the bottom: of layers that no announced lease wants, a lower one is wanted sooner.
        wanted = (math.inf, math.inf) if layer is None else (order.next_use(layer), float(layer))
        if wanted > furthest:
            best, furthest = place, wanted
    return best
