"""Test modules that are imported by their bare names have names of their own."""

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_no_two_test_modules_have_one_name() -> None:
    bare = [
        path.name for path in TESTS.rglob("test_*.py") if not (path.parent / "__init__.py").exists()
    ]
    assert [name for name, times in Counter(bare).items() if times > 1] == []
