"""Cases of several factors: all of them, or few that have every pair or every triple of levels."""

from itertools import combinations, product
from typing import Any

__all__ = ["Case", "cases", "covering"]

Case = dict[str, Any]


def cases(factors: dict[str, tuple[Any, ...]]) -> list[Case]:
    """Return every combination of levels."""
    return [dict(zip(factors, levels, strict=True)) for levels in product(*factors.values())]


def covering(factors: dict[str, tuple[Any, ...]], strength: int) -> list[Case]:
    """Return cases that have every combination of levels of any `strength` factors.

    Each is the one that covers most of what is still to do.
    """
    every = cases(factors)
    combined = [frozenset(combinations(case.items(), strength)) for case in every]
    wanted = frozenset().union(*combined)
    chosen = []
    while wanted:
        best = max(range(len(every)), key=lambda index: len(combined[index] & wanted))
        wanted -= combined[best]
        chosen.append(every[best])
    return chosen
