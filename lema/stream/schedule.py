"""The order in which layers are visited, and how many fetches it costs: pure Python, no tensors, no
threads.

A training pass goes up through the layers and down again. The top layer is where it turns: one
visit does both its forward and its backward, so it is leased once. Places (device slots, host
buffers) hold the layer on lease and the distinct layers that come next; a layer that is wanted last
gives way to one that is wanted sooner. Near a turn the next layers are those visited last: with `k`
places and `n` layers through them, a whole step fetches `2 (n - k)`.
"""

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

__all__ = [
    "ExpertGroup",
    "Order",
    "fetched",
    "fetched_per_step",
    "forward_order",
    "in_parts",
    "index_to_refill",
    "training_order",
    "with_parts",
]


@dataclass(frozen=True)
class ExpertGroup:
    """Experts of one layer that are leased together: their number in the stream, the first, and
    the one after them.
    """

    number: int
    first: int
    end: int


def forward_order(num_layers: int) -> tuple[int, ...]:
    """Return the leases of an evaluation: each layer once, from the bottom up."""
    return tuple(range(num_layers))


def training_order(num_layers: int, lowest_trained: int = 0) -> tuple[int, ...]:
    """Return the leases of one optimizer step, whatever its number of micro-batches. Up `0 .. L-1`,
    then down `L-2 .. lowest_trained`: `2 L - 1 - lowest_trained` leases, the turn counted once."""
    return forward_order(num_layers) + tuple(range(num_layers - 2, lowest_trained - 1, -1))


def in_parts(
    order: Sequence[int],
    parts: Mapping[int, Sequence[int]],
    *,
    top_layer: int | None = None,
    down: bool = False,
    pinned: bool = False,
) -> tuple[int, ...]:
    """Return the leases of an order of layers of which some are leased in `parts`: such a layer is
    what is left of it, on lease until it is done, and then its parts, first to last on the way up,
    last to first on the way down. `down`: the order has only that way. `top_layer`: the layer that
    goes both ways at once. `pinned`: name such a layer again after each of its parts, for
    `fetched`: all the time it is a layer that was on lease last."""
    leases = list[int]()
    seen = set[int]()
    for layer in order:
        layer_parts = tuple(parts.get(layer, ()))
        part_order = (
            layer_parts + layer_parts[::-1]
            if layer == top_layer
            else layer_parts[::-1]
            if down or layer in seen
            else layer_parts
        )
        leases.append(layer)
        for number, part in enumerate(part_order):
            leases += [layer, part] if pinned and number else [part]
        leases += [layer] if pinned and part_order else []
        seen.add(layer)
    return tuple(leases)


def with_parts(layers: Collection[int], parts: Mapping[int, Sequence[int]]) -> frozenset[int]:
    """Return layers, and the parts of those that are leased in `parts`."""
    return frozenset(layers).union(*(parts.get(layer, ()) for layer in layers))


def fetched(
    order: Sequence[int], capacity: int, in_memory: Collection[int] = ()
) -> tuple[int, ...]:
    """Return the leases of `order` whose layer was dropped or never fetched, as layers in the order
    of fetching. The layers pass through so many `capacity`, empty at first, except those
    `in_memory` in memory of their own. A layer is still there if fewer than `capacity` other layers
    were on lease since. Belady's rule (1966: give up what is wanted last) comes to this where
    places are refilled as early as possible, so that reading is hidden."""
    recent: list[int] = []  # the layers that are there, the latest last
    fetches = []
    for layer in order:
        if layer in in_memory:
            continue
        if layer in recent:
            recent.remove(layer)
        else:
            fetches.append(layer)
        # The layer that was left first is given up, because near a turn the layers left last are
        # needed next.
        recent = [*recent[-capacity + 1 :], layer] if capacity > 1 else [layer]
    return tuple(fetches)


def fetched_per_step(
    num_layers: int, capacity: int, in_memory: Collection[int] = (), lowest_trained: int = 0
) -> tuple[int, ...]:
    """Return the layers that one training step after many others fetches; arguments as `fetched`. A
    step that is announced less than a step ahead may fetch fewer if `lowest_trained > 0`: what has
    not been fetched ahead has pushed nothing out. It never fetches more."""
    order = training_order(num_layers, lowest_trained)
    return fetched(order * 2, capacity, in_memory)[len(fetched(order, capacity, in_memory)) :]


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
        """Forget announced leases."""
        self._ahead.clear()
        self._uses.clear()

    def next_use(self, layer: int) -> float:
        """Return the number of the layer's next lease; infinity: none is announced."""
        uses = self._uses.get(layer)
        return uses[0] if uses else math.inf


def index_to_refill(
    layers: Sequence[int | None], order: Order, number: int, in_use: Collection[int]
) -> int | None:
    """Return the place to refill for lease `number`: an empty one, else the one whose layer is
    wanted last. That is Belady's rule (1966), and the first of two by which prefetching does no
    harm (Cao et al. 1995): no layer is given up for one that is wanted later. None: every place
    holds a layer on lease (`in_use`), or one wanted sooner."""
    best = None
    furthest = (float(number), math.inf)
    for index, layer in enumerate(layers):
        if layer in in_use:
            continue
        # Of layers that no announced lease wants a lower one is kept, because the next pass begins
        # at the bottom.
        next_use = (math.inf, math.inf) if layer is None else (order.next_use(layer), float(layer))
        if next_use > furthest:
            best = index
            furthest = next_use
    return best
