"""The installed packages compared with the requirements in LEMA's own metadata, so that no list is repeated here."""

from __future__ import annotations

import platform
from collections.abc import Collection, Iterator, Mapping
from importlib.metadata import distributions, metadata, requires

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from lema.backend import Fact, Finding, Level
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
    wrong = [*_conflicts(wanted), *known_bad(PAIRS, SECTION)]
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
    for text in requires(name) or []:
        for extra in ("", *extras):
            if (requirement := _applies(text, extra)) is not None:
                found.setdefault(canonicalize_name(requirement.name), (requirement, extra))
                break
    return found


def _applies(text: str, extra: str = "") -> Requirement | None:
    """Return a requirement that holds here, with an extra; None: it does not, or cannot be read."""
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        return None
    return requirement if requirement.marker is None or requirement.marker.evaluate({"extra": extra}) else None


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


def _conflicts(known: Collection[str]) -> Iterator[Finding]:
    """Find what other packages ask of those that LEMA needs, and do not get; `pip check` looks at all the others."""
    others = {canonicalize_name(one.metadata["Name"] or ""): one for one in reversed(list(distributions()))}
    for name, other in sorted(others.items()):  # the first of a name on the path is the one that is imported
        for requirement in map(_applies, other.requires or [] if name != "lema" else []):
            if requirement is None or (of := canonicalize_name(requirement.name)) not in known:
                continue
            found, wanted = installed_version(of), f"{requirement.specifier}"
            if found is not None and not _contains(requirement.specifier, found):
                asked = f"{name} {other.version} asks for {requirement.name}{wanted}, and {found} is installed."
                how = f"give {name} an environment of its own, or another version"
                facts: dict[str, Fact] = {"installed": found, "wanted": wanted}
                yield Finding(SECTION, f"{name} and {of}", Level.WARNING, asked, how, facts=facts)


def _contains(specifier: SpecifierSet, found: str) -> bool:
    try:
        return specifier.contains(found, prereleases=True)
    except InvalidVersion:
        return False


def _facts(installed: str | None, wanted: str = "", required: bool = False) -> dict[str, str | bool | None]:
    return {"installed": installed, "wanted": wanted, "required": required}
