"""Which data set gives the i-th sample: by rate, as a pure function of (key, i), with no count kept along the way.

Were data sets drawn at random, only a replay could tell how many draws one has had before the i-th sample, and so which
of its rows comes next. Here slots are dealt out such that this number is a formula, and are shuffled afterwards, within
windows. Rates hold better so than by drawing: see `Interleaving`.
"""

import heapq
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from lema.data.permutation import permutation

__all__ = ["WINDOW", "Interleaving"]

WINDOW = 1024  # samples that are shuffled among each other; another number is another order of every run


@dataclass(frozen=True, slots=True)
class _Fork:
    """Of the first n slots that come here, `round(n * part / whole)` go left, halves up, and the others right."""

    left: "_Tree"
    right: "_Tree"
    part: int
    whole: int

    def to_left(self, slots: int) -> int:
        return (2 * slots * self.part + self.whole) // (2 * self.whole)


_Tree: TypeAlias = _Fork | str


class Interleaving:
    """Data sets that take turns, each as often as its rate says.

    Of the first n slots a data set has its rate of n, give or take less than 2 (with two data sets: at most 1/2), for
    every n: rates are exact in the long run, however small. Samples are the slots, shuffled in windows of 1024; so the
    same holds for samples up to the end of any window. The order in which data sets are listed changes nothing.

    Args:
        rates: of each data set by name; they are taken for what they are as decimals, and divided by their sum.
        key: numbers and words that decide how slots are shuffled.
    """

    def __init__(self, rates: Mapping[str, float], *key: int | str) -> None:
        self._tree, self._names, self._key = _tree(rates), list(rates), key

    def slot(self, slot: int) -> tuple[str, int]:
        """Return who has this slot, and how many of the slots before were theirs."""
        node = self._tree
        while isinstance(node, _Fork):
            left = node.to_left(slot)
            goes_left = node.to_left(slot + 1) > left
            node, slot = (node.left, left) if goes_left else (node.right, slot - left)
        return node, slot

    def sample(self, index: int) -> tuple[str, int]:
        """Return who gives this sample, and which of theirs it is; every number from 0 comes once."""
        window, place = divmod(index, WINDOW)
        return self.slot(window * WINDOW + permutation(WINDOW, *self._key, window)(place))

    def counts(self, count: int) -> dict[str, int]:
        """Return how many of the first `count` samples each data set gives."""
        whole = count // WINDOW * WINDOW
        given = Counter(self.sample(index)[0] for index in range(whole, count))
        _add_slots(self._tree, whole, given)
        return {name: given[name] for name in self._names}


def _add_slots(tree: _Tree, slots: int, counts: Counter[str]) -> None:
    if isinstance(tree, str):
        counts[tree] += slots
    else:
        left = tree.to_left(slots)
        _add_slots(tree.left, left, counts)
        _add_slots(tree.right, slots - left, counts)


def _tree(rates: Mapping[str, float]) -> _Tree:
    """Huffman's tree over the rates.

    A fork rounds by 1/2 at most, and what comes to it too much or too little is passed on by the fraction. In this tree
    a fork has at most 2/3 of the fork above it (its own two parts are no larger than its sibling), so what a fork gets
    is off by at most 1/2 + 1/3 + 2/9 + ... = 3/2, and what a data set gets by less than 2.
    """
    # Names break ties: they are compared before trees would be, and no two are alike.
    heap: list[tuple[Fraction, str, _Tree]] = [(Fraction(str(rate)), name, name) for name, rate in rates.items()]
    heapq.heapify(heap)
    while len(heap) > 1:
        small, name, right = heapq.heappop(heap)
        large, other, left = heapq.heappop(heap)
        fraction = large / (small + large)
        fork = _Fork(left, right, fraction.numerator, fraction.denominator)
        heapq.heappush(heap, (small + large, min(name, other), fork))
    return heap[0][2]
