"""The page of environments tells what a resolver said, of the requirements that LEMA has now."""

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from environments import beside
from environments.beside import Answer, Unresolvable
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/environments.md").read_text(encoding="utf-8")
OWN = {
    asked.name: asked
    for asked in map(
        Requirement, tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    )
}
LEMA = ["transformers>=5.17,<6", "peft>=0.20,<1", "torch>=2.9"]


def rows() -> dict[str, list[str]]:
    """The cells of the page's table behind the name of each project."""
    (table,) = re.findall(
        rf"^{re.escape(beside.HEAD)}\n{re.escape(beside.RULE)}\n((?:\|.*\n)+)", PAGE, re.MULTILINE
    )
    cells = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()]
    return {release.rpartition(" ")[0]: rest for release, *rest in cells}


def test_the_page_has_every_project_and_enough_fit() -> None:
    assert [*rows()] == [*beside.PROJECTS.values()]
    assert sum("yes" in fits for _, fits, *_ in rows().values()) >= beside.LEAST


@pytest.mark.parametrize("title", beside.PROJECTS.values())
def test_a_row_is_of_the_ranges_that_lema_has_now(title: str) -> None:
    _, fits, *versions, conflict = rows()[title]
    if "yes" in fits:
        assert not conflict
        assert all(
            OWN[name].specifier.contains(version)
            for name, version in zip(beside.SHOWN, versions, strict=True)
        )
    else:
        needed = conflict.partition("; LEMA needs ")[2].split(" and ")
        assert needed == [beside.requirement(OWN[one.split()[0]]) for one in needed]


def test_every_project_that_does_not_fit_has_a_hand_over() -> None:
    apart = {title for title, (_, fits, *_) in rows().items() if "yes" not in fits}
    section = PAGE.partition("\n## Handing over\n")[2].partition("\n## ")[0]
    assert apart and not [
        title
        for title in apart
        if not re.search(rf"^\| {re.escape(title)} \|", section, re.MULTILINE)
    ]


def index(
    monkeypatch: pytest.MonkeyPatch, alone: dict[str, str], both: dict[str, str] | None
) -> None:
    """Put a resolver in place that knows one project, for Python 3.11: what it takes alone, and
    with LEMA.
    """

    def resolve(requirements: Sequence[str], python: str, *options: str) -> beside.Pins:
        pins = alone if len(requirements) == 1 else both
        if pins is None or (python != "3.11" and "--no-deps" in options):
            raise Unresolvable("No solution found")
        return {name: Version(version) for name, version in pins.items()}

    monkeypatch.setattr(beside, "resolve", resolve)


def test_a_project_that_fits_is_told_with_the_versions_of_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = {"transformers": "5.20.1", "peft": "0.21.2", "torch": "2.14.1"}
    index(monkeypatch, {"trl": "1.16.0", "transformers": "5.24.0"}, both)
    assert (
        beside.ask("trl", LEMA).row()
        == "| TRL 1.16.0 | 3.11 | **yes** | 5.20.1 | 0.21.2 | 2.14.1 |  |"
    )


def test_what_stands_in_the_way_is_told_from_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    index(
        monkeypatch,
        {"trl": "1.16.0", "transformers": "5.6.0", "peft": "0.18.1", "torch": "2.14.1"},
        None,
    )
    answer = beside.ask("trl", LEMA)
    assert answer.conflict == (
        "takes transformers 5.6.0 and peft 0.18.1 at most; LEMA needs transformers "
        ">=5.17,<6 and peft >=0.20,<1"
    )
    assert "| no |" in answer.row()


def test_what_each_side_meets_alone_is_a_conflict_too(monkeypatch: pytest.MonkeyPatch) -> None:
    index(monkeypatch, {"trl": "1.16.0", "transformers": "5.20.0"}, None)
    assert beside.ask("trl", LEMA).conflict == "No solution found"
    assert "a \\| b" in Answer("TRL", Version("1"), "3.12", {}, "a | b").row()


def test_an_index_that_does_not_answer_is_not_a_conflict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolver = tmp_path / "uv"
    resolver.write_text("#!/bin/sh\necho 'Failed to fetch' >&2\nexit 2\n")
    resolver.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(SystemExit, match="Failed to fetch"):
        beside.resolve(["trl"], "3.12")
