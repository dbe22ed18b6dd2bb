"""Findings of the doctor: one thing that was looked at, how it stands, in one sentence, and how to
fix it.

A backend returns findings about its own device. `known_bad` and `stubs` make findings of two kinds
of tables: versions that are known not to work together, and packages that only look like the one
they are named after. They compare the tables with what is installed and import nothing, because
importing is what fails with such packages. Every entry names where it is published.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import InvalidVersion

import lema

__all__ = [
    "PAIRS",
    "Fact",
    "Finding",
    "Level",
    "Pair",
    "Stub",
    "installed_version",
    "known_bad",
    "stubs",
]
__all__ += ["program_versions"]

Fact = str | int | float | bool | None


class Level(StrEnum):
    """How a finding stands, from good to bad."""

    OK = "ok"
    NOTE = "note"  # worth knowing; nothing is wrong
    WARNING = "warning"  # something will not work, or be slower than it could be
    PROBLEM = "problem"  # LEMA cannot run

    @property
    def rank(self) -> int:
        """0 for the best."""
        return list(Level).index(self)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    section: str  # its group; for findings of a backend, the backend's name
    name: str  # the object of the check; `section.name` is the same on every machine
    level: Level  # how it stands
    what: str  # one sentence
    how: str = ""  # how to fix it; empty where nothing has to be fixed
    source: str = ""  # where that is published; empty where it was seen here
    # what was measured: name, with its unit where it has one -> plain value; bytes and bytes per
    # second are numbers
    facts: Mapping[str, Fact] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The name that a script asks for it by."""
        return f"{self.section}.{self.name}".replace(" ", "_")

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data: the same keys for every finding."""
        return {"key": self.key, **asdict(self), "level": self.level.value}


@dataclass(frozen=True)
class Pair:
    """Two requirements that must not both be met."""

    first: str  # such as `"a>=2"`
    second: str  # such as `"b<1.5"`
    level: Level  # how bad it is
    what: str  # what goes wrong, as the end of a sentence that begins with the two packages
    how: str  # how to fix it
    source: str  # where it is published


@dataclass(frozen=True)
class Stub:
    """A package that is there to keep a name, and fails when it is imported."""

    name: str  # of the distribution
    version: str  # that is known to be one
    module: str  # that it installs
    mark: str  # what the module says of itself
    what: str  # what it is, as the end of a sentence that begins with the package
    how: str  # how to fix it
    source: str  # where it is published


PAIRS = (
    Pair(
        "torchao>=0.18",
        "torch<2.11",
        Level.WARNING,
        (
            "torchao leaves out the kernels it has compiled: int8 and fp8 models are slower, "
            "if they run"
        ),
        'pip install "torch>=2.11"',
        "https://github.com/pytorch/ao/releases/tag/v0.18.0",
    ),
    Pair(
        "peft>=0.20",
        "torchao<0.16",
        Level.PROBLEM,
        "peft refuses to adapt any layer",
        'pip install "torchao>=0.18", or pip uninstall torchao',
        "https://github.com/daydreamlive/DEMON/pull/325",
    ),
)


def installed_version(name: str) -> str | None:
    """Return the version of a distribution; None: it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def program_versions(*names: str) -> dict[str, str]:
    """Return versions by name: LEMA's as `lema`, and those of some distributions, which have to
    be installed.
    """
    return {"lema": lema.__version__, **{name: version(name) for name in names}}


def known_bad(pairs: Iterable[Pair], section: str) -> Iterator[Finding]:
    """Find the pairs that are installed."""
    for pair in pairs:
        first = _met(pair.first)
        second = _met(pair.second)
        if first is not None and second is not None:
            name = f"{Requirement(pair.first).name} and {Requirement(pair.second).name}"
            what = f"{first} with {second}: {pair.what}."
            facts = {"one": first, "other": second}
            yield Finding(section, name, pair.level, what, pair.how, pair.source, facts)


def stubs(table: Iterable[Stub], section: str) -> Iterator[Finding]:
    """Find the stubs that are installed, by their version or by what their module says."""
    for stub in table:
        installed = installed_version(stub.name)
        if installed is not None and (
            installed == stub.version or stub.mark in _source(stub.module)
        ):
            what = f"{stub.name} {installed} {stub.what}."
            facts = dict[str, Fact](installed=installed, stub=True)
            yield Finding(section, stub.name, Level.WARNING, what, stub.how, stub.source, facts)


def _met(requirement: str) -> str | None:
    """Return the package with its version if it meets the requirement."""
    package = Requirement(requirement)
    installed = installed_version(package.name)
    try:
        met = installed is not None and package.specifier.contains(installed, prereleases=True)
    except InvalidVersion:
        return None
    return f"{package.name} {installed}" if met else None


def _source(module: str) -> str:
    """Return the text of a module that is not imported; empty where it has none."""
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        return ""
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return ""
    return Path(spec.origin).read_text(encoding="utf-8", errors="replace")
