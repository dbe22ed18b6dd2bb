"""Which tests cost too much for the default run, as measured, and which of the slow ones a part of a session takes."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["ALWAYS", "TESTS", "SlowTest", "in_part", "mark_listed", "read_list"]

TESTS = Path(__file__).parents[1]
ALWAYS = ("engine/", "stream/")  # folders whose slow tests every part has
UNLISTED = 1.0  # seconds that a slow test is taken for which is not in the list


class SlowTest(NamedTuple):
    """A line of `tests/slow.txt`."""

    seconds: float  # of a processor, for all its cases in a session
    in_default: int  # cases that the default run has
    name: str  # path below `tests`, and the test


def read_list() -> list[SlowTest]:
    """Read `tests/slow.txt`."""
    lines = (TESTS / "slow.txt").read_text(encoding="utf-8").splitlines()
    fields = [line.split() for line in lines if line and not line.startswith("#")]
    return [SlowTest(float(seconds), int(count), name) for seconds, count, name in fields]


def name_of(item: pytest.Item) -> str:
    """Return the name that a test has in `tests/slow.txt`."""
    return item.nodeid.partition("[")[0].removeprefix("tests/")


def mark_listed(items: Iterable[pytest.Item]) -> None:
    """Mark the tests of the list as slow, but for the cases that stay in the default run, evenly spaced."""
    listed = {test.name: test for test in read_list()}
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        name = name_of(item)
        if name in listed and not any(map(item.get_closest_marker, ("slow", "exhaustive"))):
            cases[name].append(item)
    for name, every in cases.items():
        count = min(listed[name].in_default, len(every))
        kept = {number * len(every) // count for number in range(count)}
        for number, item in enumerate(every):
            if number not in kept:
                item.add_marker(pytest.mark.slow)


def in_part(items: Iterable[pytest.Item], part: str) -> list[pytest.Item]:
    """Choose what a part of a session has of these: `part` is its number and how many there are, `2/12`.

    Slow tests are dealt out, the costliest first and each to the part that has least. All else is in every part.
    """
    number, count = map(int, part.split("/"))
    seconds = {test.name: test.seconds for test in read_list()}
    slow = {name_of(item) for item in items if is_slow(item)}
    dealt = [name for name in slow if not name.startswith(ALWAYS)]
    dealt.sort(key=lambda name: (-seconds.get(name, UNLISTED), name))
    parts: list[set[str]] = [set() for _ in range(count)]
    spent = [0.0] * count
    for name in dealt:
        least = spent.index(min(spent))
        parts[least].add(name)
        spent[least] += seconds.get(name, UNLISTED)
    elsewhere = {*dealt} - parts[number - 1]
    return [item for item in items if not is_slow(item) or name_of(item) not in elsewhere]


def is_slow(item: pytest.Item) -> bool:
    """Whether a session has a test that the default run has not."""
    return (
        item.get_closest_marker("slow") is not None
        and item.get_closest_marker("exhaustive") is None
    )
