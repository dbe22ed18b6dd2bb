"""The files, names, tests and examples that CONTRIBUTING.md names for additions are there."""

import ast
import importlib
import re
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
MAP = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
KINDS = ("A rope type", "A quantised form", "An objective", "A backend", "A setting")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


class Row(NamedTuple):
    """A row of a table: what is added, where, and the names that are there already."""

    what: str
    where: str
    names: str


def section(kind: str) -> str:
    """Return the text below the heading of a kind, up to the next heading."""
    (found,) = re.findall(rf"^### {kind}\n(.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL)
    return str(found)


def rows_of(kind: str) -> list[Row]:
    lines = [line for line in section(kind).splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [Row(*row[:3]) for row in cells[2:]]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", cell)


def names_in(file: Path) -> set[str]:
    """Return what a module defines at its top, with functions of classes; headings of a page."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        return set(re.findall(r"^#+ `?([^`\n]+)`?$", text, re.MULTILINE))
    names = set(re.findall(r"^from \S+ import (\w+)$", text, re.MULTILINE))
    for node in ast.parse(text).body:
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                names.add(node.name)
                functions = [one for one in ast.walk(node) if isinstance(one, ast.FunctionDef)]
                names |= {f"{node.name}.{function.name}" for function in functions}
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return names


def is_importable(dotted: str) -> bool:
    """Whether a dotted name of a library is there."""
    module, _, name = dotted.rpartition(".")
    return hasattr(importlib.import_module(module), name)


def is_there(name: str, files: list[Path]) -> bool:
    """Whether a name is a group of entry points, importable, or in each of these files."""
    if name in PROJECT["entry-points"]:
        return True
    if name.startswith(("transformers.", "lema.")):
        return is_importable(name)
    return bool(files) and all(name in names_in(file) for file in files)


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_names_a_file_with_the_names_beside_it(kind: str) -> None:
    for row in rows_of(kind):
        files = [ROOT / name for name in quoted(row.where) if "/" in name or name == "SECURITY.md"]
        assert files or row.where.startswith("your "), row
        assert [str(file) for file in files if not file.is_file()] == []
        assert quoted(row.names), row
        assert [name for name in quoted(row.names) if not is_there(name, files)] == [], row.where


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_table_an_example_and_tests(kind: str) -> None:
    example, _, tests = section(kind).partition("\nTests: ")
    assert len(rows_of(kind)) >= 3
    assert [name for name in quoted(example) if name.startswith("tests/contributing/test_add_")]
    named = [name for name in quoted(tests or example) if name.startswith("tests/")]
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_example_is_on_the_page() -> None:
    examples = {
        f"tests/contributing/{file.name}" for file in Path(__file__).parent.glob("test_add_*.py")
    }
    assert examples == {
        name for name in quoted(PAGE) if name.startswith("tests/contributing/test_add_")
    }
    assert len(examples) >= len(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_the_map_of_the_code_leads_to_every_kind(kind: str) -> None:
    anchor = kind.lower().replace(" ", "-")
    assert f"](../CONTRIBUTING.md#{anchor})" in MAP
