"""Integers that know which sizes of a model they are products and sums of.

A model whose sizes are primes gives each product away: the bytes of a tensor, or the operations of a
product, divide by the sizes that they are made of and by nothing else. `Size` divides, and sums keep
their terms, so that one look at a model says how its costs depend on its sizes.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import Any

__all__ = ["SAMPLE", "SYMBOLS", "Peak", "Size", "total"]

SYMBOLS = ("hidden", "intermediate", "heads", "groups", "width", "rank", "length", "words", "piece")
# primes, one of each size, and all larger than the numbers that formulas have beside them
KEYS = (1009, 1013, 29, 13, 37, 31, 509, 20011, 1019)
HEADS = KEYS[2] * KEYS[3]
# Hidden sizes are a multiple of the number of heads, and a head has an even width. `heads` are those
# that share a key, of which there are as many as `groups`.
SAMPLE = {
    "hidden": 2 * KEYS[0] * HEADS,
    "intermediate": KEYS[1],
    "heads": KEYS[2],
    "groups": KEYS[3],
    "width": 2 * KEYS[4],
    "rank": KEYS[5],
    "length": KEYS[6],
    "words": KEYS[7],
    "piece": KEYS[8],
}
LARGEST = (
    1 << 14
)  # a number beside the sizes, such as bytes of an element and rows of a micro-batch
Term = tuple[int, ...]  # of each symbol, its exponent


class Size(int):
    """An integer with its terms."""

    terms: dict[Term, Fraction]

    @classmethod
    def of(cls, value: int) -> Size:
        """Return a product with the sizes that it is made of. `ValueError`: it is none of these."""
        if isinstance(value, Size):
            return value
        size = cls(value)
        rest = Fraction(value)
        exponents = [0] * len(SYMBOLS)
        # hidden first, because the numbers of heads divide it
        for at, (name, key) in enumerate(zip(SYMBOLS, KEYS, strict=True)):
            while value and rest.numerator % key == 0:
                rest /= SAMPLE[name]
                exponents[at] += 1
        if abs(rest.numerator) > LARGEST or rest.denominator > LARGEST:
            raise ValueError(f"{value} is no product of the sizes, {rest} is left")
        size.terms = {tuple(exponents): rest} if value else {}
        return size

    def _with(self, other: int, sign: int) -> Size:
        other = Size.of(other)
        size = Size(int(self) + sign * int(other))
        size.terms = dict(self.terms)
        for term, factor in other.terms.items():
            size.terms[term] = size.terms.get(term, Fraction(0)) + sign * factor
        size.terms = {term: factor for term, factor in size.terms.items() if factor}
        return size

    def __add__(self, other: int) -> Size:
        return self._with(other, 1)

    __radd__ = __add__

    def __sub__(self, other: int) -> Size:
        return self._with(other, -1)

    def __mul__(self, other: int) -> Size:
        size = Size(int(self) * int(other))
        size.terms = {}
        for term, factor in self.terms.items():
            for exponents, times in Size.of(other).terms.items():
                product = tuple(map(sum, zip(term, exponents, strict=True)))
                size.terms[product] = size.terms.get(product, Fraction(0)) + factor * times
        return size

    __rmul__ = __mul__

    def __floordiv__(self, other: int) -> Size:
        """Return the quotient by one product, which divides every term."""
        ((exponents, by),) = Size.of(other).terms.items()
        size = Size(int(self) // int(other))
        size.terms = {
            tuple(a - b for a, b in zip(term, exponents, strict=True)): factor / by
            for term, factor in self.terms.items()
        }
        return size


class Peak:
    """The sizes of which the largest is the peak: which of them it is depends on the model.

    `max(peak, live)` takes note of what is alive, and is the peak again.
    """

    def __init__(self, sizes: Iterable[Size] = ()) -> None:
        self.sizes: dict[Any, Size] = {}
        for size in sizes:
            self._note(size)

    def _note(self, size: Size) -> None:
        self.sizes[frozenset(size.terms.items())] = size

    def __lt__(self, live: int) -> bool:
        self._note(Size.of(live))
        return False

    def __add__(self, nothing: int) -> Peak:
        assert not nothing, "nothing is beside the peak on one device"
        return self

    @property
    def highest(self) -> list[Size]:
        """The sizes that may be the largest: no other has as much of every term."""
        kept: list[Size] = []
        for size in sorted(self.sizes.values(), reverse=True):
            if not any(_at_most(size, other) for other in kept):
                kept.append(size)
        return kept


def _at_most(size: Size, other: Size) -> bool:
    """Whether a size is at most another, whatever the model: no factor of its terms is larger."""
    terms = size.terms.keys() | other.terms.keys()
    return all(size.terms.get(term, 0) <= other.terms.get(term, 0) for term in terms)


def total(sizes: Iterable[int], start: int = 0) -> Size:
    """Return the sum, as `sum` does, with its terms."""
    result = Size.of(start)
    for size in sizes:
        result = result + Size.of(size)
    return result
