"""A plugin that measures tests as `tests/slow.txt` counts them, on a machine that may do other things as well.

    pytest -n 0 -p cpuseconds tests/train      # prints a line for each test, the costliest first

Seconds are those of the processors, of this process and of its children that have ended, for all cases of a test with
what was set up for them. What a fixture of a module takes counts for the test that comes first.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

SECONDS: Counter[str] = Counter()
CASES: Counter[str] = Counter()


def spent() -> float:
    """Return the processor seconds of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Count what a case takes."""
    before = spent()
    result = yield
    test = item.nodeid.partition("[")[0].removeprefix("tests/")
    SECONDS[test] += spent() - before
    CASES[test] += 1
    return result


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print seconds, cases and name of each test."""
    terminalreporter.section("seconds of the processors, cases, test")
    for test, seconds in SECONDS.most_common():
        terminalreporter.write_line(f"{seconds:.2f} {CASES[test]} {test}")
