"""Which data set gives the i-th sample of a mixture, by rate: a pure function of (key, i), with no
state kept.

If data sets were drawn at random, only a replay could tell how many samples one has given before
the i-th. Here slots are dealt out such that this number is a formula, and are shuffled afterwards
within windows: the formula counts up to a window, and the rest is counted. Rates also hold better
than by drawing (`Interleaving`).

A fade is the passage from one mixture into the next (`Fade`). The weight of the earlier mixture at
sample i of n is a function of x = i / n that falls from 1 to 0: `1 - x` (linear), `(1 + cos(pi x))
/ 2` (cosine), or `1 / (1 + exp(10 (x - 1/2)))`, stretched so that it begins at 1 and ends at 0
(sigmoid). Slots are dealt out by sums of weights, which must be the same on every machine, while
cosines are not to the last bit. So the function is tabulated at 257 places, rounded to 2**-20, and
is linear between them; sums are exact from there on.
"""

import heapq
import math
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TypeAlias

from lema.data.mixing.permutation import Permutation
from lema.data.mixing.sampling import Sampling, check_rates, rates_of
from lema.errors import ConfigError

__all__ = ["SHAPES", "WINDOW", "Fade", "Interleaving"]

PIECES = 256
UNIT = 2**20  # a weight of 1
STEEPNESS = 10.0  # of the sigmoid: a tenth of the fade before its middle, the weight is 0.73


def _sigmoid(x: float) -> float:
    bent, first, last = (
        1.0 / (1.0 + math.exp(STEEPNESS * (position - 0.5))) for position in (x, 0.0, 1.0)
    )
    return (bent - last) / (first - last)


SHAPES: Mapping[str, Callable[[float], float]] = {
    "linear": lambda x: 1.0 - x,
    "cosine": lambda x: (1.0 + math.cos(math.pi * x)) / 2.0,
    "sigmoid": _sigmoid,
}
"""The weight of the mixture before, as a function of how much of the fade is over."""


@lru_cache(maxsize=len(SHAPES))
def _tables(shape: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Weights at the ends of the pieces in units of 2**-20, and twice the sum of all pieces
    before each end.
    """
    weights = tuple(round(UNIT * SHAPES[shape](piece / PIECES)) for piece in range(PIECES + 1))
    return weights, tuple(
        accumulate((left + right for left, right in pairwise(weights)), initial=0)
    )


@dataclass(frozen=True)
class Fade:
    """The first samples of a stage, over which its mixture comes in for the one before.
    `ConfigError`: `before` is no mixture, there are no samples, or there is no such shape."""

    before: tuple[Sampling, ...]  # the data sets of the mixture before
    samples: int  # over which
    shape: str = "linear"  # one of `SHAPES`

    def __post_init__(self) -> None:
        check_rates(self.before, "fade")
        if self.samples < 1:
            raise ConfigError(
                f"a fade cannot have {self.samples} samples", where="fade", how="leave it out"
            )
        if self.shape not in SHAPES:
            how = f"use one of {', '.join(SHAPES)}"
            raise ConfigError(f"there is no fade {self.shape!r}", where="shape", how=how)

    def num_before(self, count: int) -> int:
        """Return how many of the first `count` slots are the mixture's before: the sum of weights,
        halves up. It is the integral of the weight from 0 to `count`, exactly, so no slot is given
        twice and none is left out."""
        weights, sums = _tables(self.shape)
        count = min(count, self.samples)
        piece, remainder = divmod(count * PIECES, self.samples)
        # In units of UNIT * PIECES * 2 * samples: whole pieces are trapezoids, and so is the part
        # of the last one.
        total = self.samples**2 * sums[piece]
        if remainder:
            total += (
                2 * self.samples * weights[piece] * remainder
                + (weights[piece + 1] - weights[piece]) * remainder**2
            )
        denominator = 2 * UNIT * PIECES * self.samples
        return (2 * total + denominator) // (2 * denominator)


# samples that are shuffled among each other; another number is another order of every run
WINDOW = 1024
# windows in a fade, at least, where it has so many samples: shuffling must not even it out
FADING = 16


@dataclass(frozen=True, slots=True)
class _Node:
    """A node of a tree: of the first n slots at it, `round(n * share)` go left, halves up, and the
    others right. Where the share is a fade, `share.given(n)` go left, to the mixture before."""

    left: "_Node | str"
    right: "_Node | str"
    share: Fraction | Fade

    def to_left(self, slots: int) -> int:
        if isinstance(self.share, Fade):
            return self.share.num_before(slots)
        part, denominator = self.share.as_integer_ratio()
        return (2 * slots * part + denominator) // (2 * denominator)


_Tree: TypeAlias = _Node | str


class Interleaving:
    """Data sets that take turns, each as often as its rate says; rates are decimals, divided by
    their sum.

    Of the first n slots a data set has its rate of n, give or take less than 2 (with two data sets:
    at most 1/2), for every n. Samples are the slots, shuffled by `key` in windows of 1024; so the
    same holds for samples up to the end of any window. The order in which data sets are listed
    changes nothing. Under a fade a data set has, of the first n slots, the sum of its rates at each
    of them, give or take less than 5 (with two data sets in both mixtures: at most 2), during the
    fade and ever after. The samples of a fade are shuffled in windows of their own, a sixteenth of
    the fade at most; windows of 1024 begin where it ends."""

    def __init__(
        self, rates: Mapping[str, float], *key: int | str, fade: Fade | None = None
    ) -> None:
        self._tree = _tree(rates)
        self._names = list(rates)
        self._key = key
        self._fade_samples = 0
        self._fade_window = 1
        if fade is not None:
            before = rates_of(fade.before)
            self._tree = _Node(_tree(before), self._tree, fade)
            self._names += [name for name in before if name not in rates]
            self._fade_samples = fade.samples
            self._fade_window = min(WINDOW, max(1, fade.samples // FADING))

    def slot(self, slot: int) -> tuple[str, int]:
        """Return the data set that has this slot, and how many of the slots before it has."""
        name = _owner(self._tree, slot)
        return name, _slots(self._tree, slot)[name]

    def sample(self, index: int) -> tuple[str, int]:
        """Return the data set that gives this sample, and how many of the samples before it
        gave.
        """
        first, order = self._window(index)
        which = order[index - first]
        name = self._names[which]
        return name, _slots(self._tree, first)[name] + order[: index - first].count(which)

    def counts(self, count: int) -> dict[str, int]:
        """Return how many of the first `count` samples each data set gives."""
        first, order = self._window(count)
        num_slots = _slots(self._tree, first)
        part = order[: count - first]
        return {name: num_slots[name] + part.count(which) for which, name in enumerate(self._names)}

    def _window(self, index: int) -> tuple[int, "array[int]"]:
        """Return the first sample of a sample's window, and the data set of each in the window,
        by place in `names`.
        """
        if index < self._fade_samples:
            window = index // self._fade_window
            first = window * self._fade_window
            count = min(self._fade_window, self._fade_samples - first)
            key = (*self._key, "fade", window)
        else:
            window = (index - self._fade_samples) // WINDOW
            first = self._fade_samples + window * WINDOW
            count = WINDOW
            key = (*self._key, window)
        return first, _order(self._tree, tuple(self._names), first, count, key)


@lru_cache(maxsize=16)
def _order(
    tree: _Tree, names: tuple[str, ...], first: int, count: int, key: tuple[int | str, ...]
) -> "array[int]":
    """Return the data sets of a window's samples, by place in `names`; the latest are kept for
    the next calls.
    """
    shuffled = Permutation(count, *key)
    numbers = {name: number for number, name in enumerate(names)}
    return array("L", (numbers[_owner(tree, first + shuffled(index))] for index in range(count)))


def _owner(tree: _Tree, slot: int) -> str:
    while not isinstance(tree, str):
        left = tree.to_left(slot)
        goes_left = tree.to_left(slot + 1) > left
        tree, slot = (tree.left, left) if goes_left else (tree.right, slot - left)
    return tree


def _slots(tree: _Tree, slots: int) -> Counter[str]:
    """Return how many of the first `slots` slots each data set has."""
    if isinstance(tree, str):
        return Counter({tree: slots})
    left = tree.to_left(slots)
    slot_counts = _slots(tree.left, left)
    slot_counts.update(_slots(tree.right, slots - left))
    return slot_counts


def _tree(rates: Mapping[str, float]) -> _Tree:
    """Huffman's tree over the rates. A node rounds by 1/2 at most, and what comes to it too much or
    too little is passed on by its share. In this tree a node has at most 2/3 of the node above it
    (its own two parts are no larger than its sibling), so a node is off by at most 1/2 + 1/3 + 2/9
    + ... = 3/2, and a data set by less than 2."""
    # Names break ties: they are compared before trees would be, and no two are alike.
    heap: list[tuple[Fraction, str, _Tree]] = [
        (Fraction(str(rate)), name, name) for name, rate in rates.items()
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        small, name, right = heapq.heappop(heap)
        large, left_name, left = heapq.heappop(heap)
        node = _Node(left, right, large / (small + large))
        heapq.heappush(heap, (small + large, min(name, left_name), node))
    return heap[0][2]
