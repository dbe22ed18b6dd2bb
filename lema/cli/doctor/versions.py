"""The installed packages compared with the requirements in LEMA's own metadata, so that no list is repeated here."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import distributions, metadata, requires

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from lema.backend import Finding, Level
from lema.backend.findings import PAIRS, installed_version, known_bad

__all__ = ["SECTION", "versions"]


SECTION = "versions"
DEVELOPERS = {"dev", "test"}  # extras that no run needs
BESIDE = ("datasets", "deepspeed", "flash-attn", "kernels", "triton", "trl")  # that change what torch and others do


def versions() -> Iterator[Finding]:
    """Tell the version of every package that matters, whether it is the one asked for, and which do not go together."""
    own = metadata("lema")
    yield Finding(SECTION, "lema", Level.OK, f"lema {own['Version']}.", facts=_facts(own["Version"]))
    yield _python(own["Requires-Python"])
    wanted = _wanted("lema")
    for requirement, extra in wanted.values():
        yield _standing(requirement, extra)
    for name in BESIDE:
        found = installed_version(name)
        text = f"{name} {found}." if found else f"{name} is not installed; nothing of LEMA needs it."
        yield Finding(SECTION, name, Level.OK, text, facts=_facts(found))
    wrong = [*_conflicts(set(wanted)), *known_bad(PAIRS, SECTION)]
    yield from wrong or [Finding(SECTION, "pairs", Level.OK, "No two packages are installed that do not go together.")]


def _python(wanted: str) -> Finding:
    found = platform.python_version()
    if SpecifierSet(wanted).contains(found, prereleases=True):
        return Finding(SECTION, "python", Level.OK, f"Python {found}.", facts=_facts(found, wanted, True))
    return Finding(
        SECTION,
        "python",
        Level.PROBLEM,
        f"Python {found} is not what LEMA asks for: {wanted}.",
        "make an environment with another Python",
        facts=_facts(found, wanted, True),
    )


def _wanted(name: str) -> Mapping[str, tuple[Requirement, str]]:
    """Return what a distribution requires: name -> the requirement, and the extra that asks for it, if any."""
    extras = [extra for extra in metadata(name).get_all("Provides-Extra") or [] if extra not in DEVELOPERS]
    found: dict[str, tuple[Requirement, str]] = {}
    for requirement in map(Requirement, requires(name) or []):
        for extra in ("", *extras):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                found.setdefault(canonicalize_name(requirement.name), (requirement, extra))
                break
    return found


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


def _conflicts(known: set[str]) -> Iterator[Finding]:
    """Find what other packages ask of those that LEMA needs, and do not get."""
    seen = set()
    for distribution in distributions():
        name = canonicalize_name(distribution.metadata["Name"] or "")
        if name == "lema" or name in seen:
            continue  # the first on the path is the one that is imported
        seen.add(name)
        for text in distribution.requires or []:
            requirement = _parsed(text)
            if requirement is None or canonicalize_name(requirement.name) not in known:
                continue
            found = installed_version(requirement.name)
            if found is not None and not _contains(requirement.specifier, found):
                yield Finding(
                    SECTION,
                    f"{name} and {canonicalize_name(requirement.name)}",
                    Level.WARNING,
                    f"{name} {distribution.version} asks for {requirement.name}{requirement.specifier}, "
                    f"and {found} is installed.",
                    f"give {name} an environment of its own, or another version",
                    facts={"installed": found, "wanted": str(requirement.specifier)},
                )


def _parsed(text: str) -> Requirement | None:
    """Return a requirement that holds here; None: it does not, or cannot be read."""
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        return None
    return requirement if requirement.marker is None or requirement.marker.evaluate({"extra": ""}) else None


def _contains(specifier: SpecifierSet, found: str) -> bool:
    try:
        return specifier.contains(found, prereleases=True)
    except InvalidVersion:
        return False


def _facts(installed: str | None, wanted: str = "", required: bool = False) -> dict[str, str | bool | None]:
    return {"installed": installed, "wanted": wanted, "required": required}
