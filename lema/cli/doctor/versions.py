"""The installed packages compared with the requirements in LEMA's own metadata, so that no list is repeated here."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import metadata, requires
from itertools import starmap

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from lema.backend import Finding, Level
from lema.backend.findings import PAIRS, installed_version, known_bad

__all__ = ["versions"]


SECTION = "versions"
DEVELOPERS = {"dev", "test"}  # extras that no run needs
BESIDE = ("datasets", "deepspeed", "flash-attn", "kernels", "triton", "trl")  # that change what torch and others do


def versions() -> Iterator[Finding]:
    """Tell the version of every package that matters, whether it is the one asked for, and which do not go together."""
    own = metadata("lema")
    yield Finding(SECTION, "lema", Level.OK, f"lema {own['Version']}.", facts=_facts(own["Version"]))
    yield _python(own["Requires-Python"])
    yield from starmap(_standing, _wanted("lema"))
    for name in BESIDE:
        found = installed_version(name)
        text = f"{name} {found}." if found else f"{name} is not installed; nothing of LEMA needs it."
        yield Finding(SECTION, name, Level.OK, text, facts=_facts(found))
    yield from list(known_bad(PAIRS, SECTION)) or [
        Finding(SECTION, "pairs", Level.OK, "No two packages are installed that do not go together.")
    ]


def _python(wanted: str) -> Finding:
    found = platform.python_version()
    facts = _facts(found, wanted, True)
    if SpecifierSet(wanted).contains(found, prereleases=True):
        return Finding(SECTION, "python", Level.OK, f"Python {found}.", facts=facts)
    what, how = f"Python {found} is not what LEMA asks for: {wanted}.", "make an environment with another Python"
    return Finding(SECTION, "python", Level.PROBLEM, what, how, facts=facts)


def _wanted(name: str) -> Iterator[tuple[Requirement, str]]:
    """Yield what a distribution requires here, each with the extra that asks for it, if any."""
    extras = [extra for extra in metadata(name).get_all("Provides-Extra") or [] if extra not in DEVELOPERS]
    told: set[str] = set()
    for requirement in map(Requirement, requires(name) or []):
        of = canonicalize_name(requirement.name)
        for extra in ("", *extras):
            if of not in told and (requirement.marker is None or requirement.marker.evaluate({"extra": extra})):
                told.add(of)
                yield requirement, extra


def _standing(requirement: Requirement, extra: str) -> Finding:
    name, wanted = canonicalize_name(requirement.name), str(requirement.specifier)
    found = installed_version(name)
    facts = _facts(found, wanted, not extra)
    how = f'pip install "lema[{extra}]"' if extra else f'pip install "{name}{wanted}"'
    if found is None:
        level, what = (Level.NOTE, f"; extra {extra} brings it") if extra else (Level.PROBLEM, "; LEMA needs it")
        return Finding(SECTION, name, level, f"{name} is not installed{what}.", how, facts=facts)
    if _contains(requirement.specifier, found):
        return Finding(SECTION, name, Level.OK, f"{name} {found}.", facts=facts)
    level = Level.WARNING if extra else Level.PROBLEM
    return Finding(SECTION, name, level, f"{name} {found} is not what LEMA asks for: {wanted}.", how, facts=facts)


def _contains(specifier: SpecifierSet, found: str) -> bool:
    try:
        return specifier.contains(found, prereleases=True)
    except InvalidVersion:
        return False


def _facts(installed: str | None, wanted: str = "", required: bool = False) -> dict[str, str | bool | None]:
    return {"installed": installed, "wanted": wanted, "required": required}
