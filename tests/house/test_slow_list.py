"""The list of tests that are too slow for the default run names tests that exist, and its parts are all of it."""

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import slowlist


def names_in(path: Path) -> set[str]:
    """The names of the functions and of the classes of a file; tests of classes may be inherited."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {
        node.name
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, kinds)
    }


def test_every_test_of_the_list_exists_and_is_there_once() -> None:
    names = [test.name for test in slowlist.read_list()]
    assert sorted(set(names)) == sorted(names)
    files = {name.partition("::")[0] for name in names}
    existing = {(file, name) for file in files for name in names_in(slowlist.TESTS / file)}
    assert [name for name in names if tuple(name.split("::")[:2]) not in existing] == []


class Item(SimpleNamespace):
    """A case of a test, as pytest has it."""

    def get_closest_marker(self, name: str) -> Any:
        return name if name in self.marks else None

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.add(mark.name)

    __hash__ = object.__hash__


def cases(test: str, count: int, *marks: str) -> list[Any]:
    return [Item(nodeid=f"tests/{test}[{number}]", marks={*marks}) for number in range(count)]


def test_all_cases_but_those_of_the_default_run_become_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        slowlist, "read_list", lambda: [slowlist.SlowTest(9.0, 2, "train/test_a.py::test_b")]
    )
    listed, exhaustive = (
        cases("train/test_a.py::test_b", 6),
        cases("train/test_a.py::test_b", 2, "exhaustive"),
    )
    other = cases("train/test_a.py::test_c", 2)
    slowlist.mark_listed([*listed, *exhaustive, *other])
    assert [bool(case.marks) for case in listed] == [False, True, True, False, True, True]
    assert [case.marks for case in exhaustive + other] == [{"exhaustive"}] * 2 + [set()] * 2


def test_parts_together_are_all_and_each_slow_test_is_in_one() -> None:
    slow = [
        case
        for letter in "abcdefgh"
        for case in cases(f"train/test_a.py::test_{letter}", 2, "slow")
    ]
    everywhere = [
        *cases("train/test_a.py::test_fast", 3),
        *cases("engine/test_a.py::test_b", 2, "slow"),
    ]
    parts = [slowlist.in_part([*slow, *everywhere], f"{number}/3") for number in (1, 2, 3)]
    assert all(case in part for case in everywhere for part in parts)
    assert [sum(case in part for part in parts) for case in slow] == [1] * len(slow)
    assert {sum(case in part for case in slow) for part in parts} <= {4, 6}
