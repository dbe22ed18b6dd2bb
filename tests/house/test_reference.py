"""The public reference, docs/api.md, has a table of arguments, results and errors wherever there is
something to tell.

What it lists are functions and classes; of a class also the public methods that the site shows. Who
has two parameters or more names each of them under `Args`; who returns something has `Returns`; and
whose own code raises an error of LEMA has `Raises`, with this error or one above it. Classes of
settings describe each field where it stands, instead.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from lema import errors
from lema.testing.contract import BackendContract

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
NAMES = re.findall(r"^::: (lema[\w.]+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
ERRORS = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}


def listed(name: str) -> Any:
    module, _, member = name.rpartition(".")
    return getattr(import_module(module), member)


def entries() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the callables of the page: functions, constructors, and methods that are public and
    of the class itself.
    """
    for name in NAMES:
        described = listed(name)
        if not isinstance(described, type):
            yield name, described
            continue
        if "__init__" in vars(described) and not (
            is_dataclass(described) or issubclass(described, BaseModel | Enum)
        ):
            yield name, described
        if described is BackendContract:  # a class of tests, whose fixtures are their arguments
            continue
        for member, value in vars(described).items():
            function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
            if inspect.isfunction(function) and not member.startswith("_"):
                yield f"{name}.{member}", function


ENTRIES = dict(entries())


def section(entry: Callable[..., Any], title: str) -> str:
    """Return the lines of a section of its docstring, without their indentation; empty: there is
    none.
    """
    found = re.search(rf"^{title}:\n((?:(?: .*)?\n?)+)", inspect.getdoc(entry) or "", re.MULTILINE)
    return textwrap.dedent(found.group(1)) if found else ""


def headings(text: str) -> list[str]:
    return re.findall(r"^(\w+):", text, re.MULTILINE)


def parameters(entry: Callable[..., Any]) -> list[str]:
    signature = inspect.signature(entry.__init__ if isinstance(entry, type) else entry)  # type: ignore[misc]
    return [name for name in signature.parameters if name not in ("self", "cls")]


def raised(entry: Callable[..., Any]) -> set[str]:
    """Return the errors of LEMA that its own code raises."""
    code = entry.__init__ if isinstance(entry, type) else entry  # type: ignore[misc]
    tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    calls = [
        node.exc.func
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
    ]
    return {call.id for call in calls if isinstance(call, ast.Name) and call.id in ERRORS}


def test_the_page_lists_them() -> None:
    assert len(NAMES) >= 20
    assert len(ENTRIES) >= 60


@pytest.mark.parametrize(
    "name", [name for name, entry in ENTRIES.items() if len(parameters(entry)) >= 2]
)
def test_two_parameters_or_more_are_told(name: str) -> None:
    assert headings(section(ENTRIES[name], "Args")) == parameters(ENTRIES[name])


@pytest.mark.parametrize(
    "name", [name for name, entry in ENTRIES.items() if len(parameters(entry)) >= 2]
)
def test_what_is_returned_is_told(name: str) -> None:
    entry = ENTRIES[name]
    returns = not isinstance(entry, type) and inspect.signature(entry).return_annotation not in (
        None,
        "None",
    )
    assert bool(section(entry, "Returns")) == returns


@pytest.mark.parametrize("name", [name for name, entry in ENTRIES.items() if raised(entry)])
def test_errors_that_are_raised_are_told(name: str) -> None:
    told = [
        ERRORS[heading]
        for heading in headings(section(ENTRIES[name], "Raises"))
        if heading in ERRORS
    ]
    for error in raised(ENTRIES[name]):
        assert issubclass(ERRORS[error], tuple(told)), error


@pytest.mark.parametrize("name", ENTRIES)
def test_no_error_is_hidden_in_prose(name: str) -> None:
    text = (inspect.getdoc(ENTRIES[name]) or "").partition("\nRaises:")[0]
    assert not re.search(r"\bRaises `", text)
