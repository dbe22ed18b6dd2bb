"""How one mixture goes over into the next: the weight of the one before, sample by sample, and the sum of weights.

The weight at sample i of n is a function of x = i / n that falls from 1 to 0: `1 - x` (linear), `(1 + cos(pi x)) / 2`
(cosine), or `1 / (1 + exp(10 (x - 1/2)))`, stretched so that it begins at 1 and ends at 0 (sigmoid). Data sets are
dealt out by sums of weights, which must be the same on every machine, while cosines are not to the last bit. So the
function is taken at 257 places, rounded to 2**-20, and is a straight line between them; sums are exact from there on.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from types import MappingProxyType

from lema.data.sampling import Sampling, check_rates, rates_of
from lema.errors import ConfigError

__all__ = ["SHAPES", "Fade", "faded_rates"]

PIECES = 256
UNIT = 2**20  # a weight of 1
STEEPNESS = 10.0  # of the sigmoid: a tenth of the fade before its middle, the weight is 0.73


def _sigmoid(x: float) -> float:
    def bent(place: float) -> float:
        return 1.0 / (1.0 + math.exp(STEEPNESS * (place - 0.5)))

    return (bent(x) - bent(1.0)) / (bent(0.0) - bent(1.0))


SHAPES: Mapping[str, Callable[[float], float]] = MappingProxyType(
    {
        "linear": lambda x: 1.0 - x,
        "cosine": lambda x: (1.0 + math.cos(math.pi * x)) / 2.0,
        "sigmoid": _sigmoid,
    }
)
"""The weight of the mixture before, as a function of how much of the fade is over."""


@lru_cache(maxsize=len(SHAPES))
def _tables(shape: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Weights at the ends of the pieces in units of 2**-20, and twice the sum of all pieces before each end."""
    weights = tuple(round(UNIT * SHAPES[shape](place / PIECES)) for place in range(PIECES + 1))
    return weights, tuple(accumulate((one + other for one, other in pairwise(weights)), initial=0))


@dataclass(frozen=True)
class Fade:
    """The first samples of a stage, over which its mixture comes in for the one before.

    Args:
        before: the data sets of the mixture before.
        samples: over which.
        shape: one of `SHAPES`.

    Raises:
        ConfigError: `before` is no mixture, there are no samples, or there is no such shape.
    """

    before: tuple[Sampling, ...]
    samples: int
    shape: str = "linear"

    def __post_init__(self) -> None:
        check_rates(self.before, "fade")
        if self.samples < 1:
            raise ConfigError(f"a fade over {self.samples} samples is none", where="fade", how="leave it out")
        if self.shape not in SHAPES:
            how = f"use one of {', '.join(SHAPES)}"
            raise ConfigError(f"there is no fade {self.shape!r}", where="shape", how=how)

    def weight(self, index: int) -> float:
        """Return the weight of the mixture before at a sample; 0 after the fade."""
        if index >= self.samples:
            return 0.0
        weights, _ = _tables(self.shape)
        piece, rest = divmod(index * PIECES, self.samples)
        return (weights[piece] + (weights[piece + 1] - weights[piece]) * rest / self.samples) / UNIT

    def given(self, count: int) -> int:
        """Return how many of the first `count` slots are the mixture's before: the sum of weights, halves up.

        It is the integral of the weight from 0 to `count`, exactly, so no slot is given twice and none is left out.
        """
        weights, sums = _tables(self.shape)
        count = min(count, self.samples)
        piece, rest = divmod(count * PIECES, self.samples)
        # In units of UNIT * PIECES * 2 * samples: whole pieces are trapezoids, and so is the part of the last one.
        total = self.samples**2 * sums[piece]
        if rest:
            total += 2 * self.samples * weights[piece] * rest + (weights[piece + 1] - weights[piece]) * rest**2
        whole = 2 * UNIT * PIECES * self.samples
        return (2 * total + whole) // (2 * whole)


def faded_rates(samplings: Sequence[Sampling], fade: Fade | None, index: int) -> dict[str, float]:
    """Return the rate of each data set at a sample of a stage: between those before and its own, while it fades.

    Args:
        samplings: the data sets of the stage.
        fade: from the mixture before; None: there is none.
        index: of the sample, in its stage.
    """
    rates = rates_of(samplings)
    if fade is None:
        return rates
    weight, before = fade.weight(index), rates_of(fade.before)
    names = [*rates, *(name for name in before if name not in rates)]
    return {name: weight * before.get(name, 0.0) + (1 - weight) * rates.get(name, 0.0) for name in names}
