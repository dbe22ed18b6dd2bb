"""Which data set gives the i-th sample: by rate, as a pure function of (key, i), with no count kept along the way.

Were data sets drawn at random, only a replay could tell how many draws one has had before the i-th sample, and so which
of its rows comes next. Here slots are dealt out such that this number is a formula, and are shuffled afterwards, within
windows: the formula counts up to a window, and the rest is counted. Rates hold better so than by drawing: see
`Interleaving`.
"""

import heapq
from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import TypeAlias

from lema.data.fade import Fade
from lema.data.permutation import Permutation
from lema.data.sampling import rates_of

__all__ = ["WINDOW", "Interleaving"]

WINDOW = 1024  # samples that are shuffled among each other; another number is another order of every run
FADING = 16  # windows in a fade, at least, where it has so many samples: shuffling must not even it out


@dataclass(frozen=True, slots=True)
class _Fork:
    """Of the first n slots that come here, `round(n * part / whole)` go left, halves up, and the others right."""

    left: "_Tree"
    right: "_Tree"
    part: int
    whole: int

    def to_left(self, slots: int) -> int:
        return (2 * slots * self.part + self.whole) // (2 * self.whole)


@dataclass(frozen=True, slots=True)
class _Fading:
    """Of the first n slots that come here, `fade.given(n)` go left, to the mixture before, and the others right."""

    left: "_Tree"
    right: "_Tree"
    fade: Fade

    def to_left(self, slots: int) -> int:
        return self.fade.given(slots)


_Tree: TypeAlias = _Fork | _Fading | str


class Interleaving:
    """Data sets that take turns, each as often as its rate says.

    Of the first n slots a data set has its rate of n, give or take less than 2 (with two data sets: at most 1/2), for
    every n: rates are exact in the long run, however small. Samples are the slots, shuffled in windows of 1024; so the
    same holds for samples up to the end of any window. The order in which data sets are listed changes nothing.

    Under a fade a data set has, of the first n slots, the sum of its rates at each of them, give or take less than 5
    (with two data sets in both mixtures: at most 2), during the fade and ever after. The samples of a fade are
    shuffled in windows of their own, a sixteenth of the fade at most; windows of 1024 begin where it ends.

    Args:
        rates: of each data set by name; they are taken for what they are as decimals, and divided by their sum.
        key: numbers and words that decide how slots are shuffled.
        fade: from the mixture before; None: the rates hold from the first sample on.
    """

    def __init__(self, rates: Mapping[str, float], *key: int | str, fade: Fade | None = None) -> None:
        self._tree, self._names, self._key = _tree(rates), list(rates), key
        self._fade_samples, self._fade_window = 0, 1
        if fade is not None:
            before = rates_of(fade.before)
            self._tree = _Fading(_tree(before), self._tree, fade)
            self._names += [name for name in before if name not in rates]
            self._fade_samples = fade.samples
            self._fade_window = min(WINDOW, max(1, fade.samples // FADING))

    def slot(self, slot: int) -> tuple[str, int]:
        """Return who has this slot, and how many of the slots before were theirs."""
        name = _owner(self._tree, slot)
        return name, self._slots(slot)[name]

    def sample(self, index: int) -> tuple[str, int]:
        """Return who gives this sample, and how many of the samples before were theirs."""
        first, order = self._window(index)
        which = order[index - first]
        name = self._names[which]
        return name, self._slots(first)[name] + order[: index - first].count(which)

    def counts(self, count: int) -> dict[str, int]:
        """Return how many of the first `count` samples each data set gives."""
        first, order = self._window(count)
        given, part = self._slots(first), order[: count - first]
        return {name: given[name] + part.count(which) for which, name in enumerate(self._names)}

    def _slots(self, slots: int) -> Counter[str]:
        """How many of the first slots are whose."""
        given: Counter[str] = Counter()
        _add_slots(self._tree, slots, given)
        return given

    def _window(self, index: int) -> tuple[int, "array[int]"]:
        """The first sample of the window that a sample is in; who gives each of the window, by place in `names`."""
        if index < self._fade_samples:
            window = index // self._fade_window
            first = window * self._fade_window
            count, key = min(self._fade_window, self._fade_samples - first), (*self._key, "fade", window)
        else:
            window = (index - self._fade_samples) // WINDOW
            first, count, key = self._fade_samples + window * WINDOW, WINDOW, (*self._key, window)
        return first, _order(self._tree, tuple(self._names), first, count, key)


@lru_cache(maxsize=16)
def _order(tree: _Tree, names: tuple[str, ...], first: int, count: int, key: tuple[int | str, ...]) -> "array[int]":
    """Who gives the samples of a window, by place in `names`; the latest are kept, as samples are asked for in turn."""
    shuffled, places = Permutation(count, *key), {name: place for place, name in enumerate(names)}
    return array("L", (places[_owner(tree, first + shuffled(place))] for place in range(count)))


def _owner(tree: _Tree, slot: int) -> str:
    while not isinstance(tree, str):
        left = tree.to_left(slot)
        goes_left = tree.to_left(slot + 1) > left
        tree, slot = (tree.left, left) if goes_left else (tree.right, slot - left)
    return tree


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
