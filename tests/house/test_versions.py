"""The releases that tests ran with are the same in `lema/compat.py`, `tox.ini`, `constraints.txt`,
`pyproject.toml` and the page about environments."""

import re
import tomllib
from configparser import ConfigParser
from pathlib import Path

import newreleases
import pytest
from libraryversions import constrained
from packaging.requirements import Requirement
from packaging.version import Version

from lema.compat import TESTED

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
RANGES = {one.name: one.specifier for one in map(Requirement, PROJECT["dependencies"])}


def pins(environment: str) -> dict[str, str]:
    """The releases that an environment of tox installs, by library."""
    tox = ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini", encoding="utf-8")
    lines = re.sub(r"\{env:\w+:([^}]*)\}", r"\1", tox[f"testenv:{environment}"]["deps"]).split()
    wanted = list(map(Requirement, lines))
    return {one.name: str(one.specifier).removeprefix("==").removesuffix(".*") for one in wanted}


def test_the_oldest_environment_has_the_lowest_releases_that_are_taken() -> None:
    lowest = {name: re.findall(r">=([\d.]+)", str(RANGES[name])) for name in TESTED}
    assert pins("oldest") == {name: bounds[0] for name, bounds in lowest.items()}
    assert {name: min(releases, key=Version) for name, releases in TESTED.items()} == pins("oldest")


def test_the_newest_environment_has_no_constraint() -> None:
    assert not pins("newest")


@pytest.mark.parametrize("library", TESTED)
def test_what_environments_install_is_among_the_tested_releases(library: str) -> None:
    default = ".".join(constrained()[library].split(".")[:2])
    others = {pins(name)[library] for name in ("oldest", "middle") if library in pins(name)}
    assert set(TESTED[library]) >= {default, *others}
    assert all(RANGES[library].contains(release) for release in TESTED[library])


@pytest.mark.parametrize("library", TESTED)
def test_the_page_says_which_releases_were_tested(library: str) -> None:
    page = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    (row,) = (line for line in page.splitlines() if line.startswith(f"| `{library}` | "))
    assert row.split(" | ")[-1].removesuffix(" |") == ", ".join(TESTED[library])


def test_releases_are_tested_again_where_one_is_not_that_of_the_constraints(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert {*newreleases.LIBRARIES} == {*TESTED}
    monkeypatch.setattr(newreleases, "is_constrained", lambda _: True)
    assert newreleases.main(["platform"]) == 0
    told = capfd.readouterr().out
    assert told.startswith("not run")
    monkeypatch.setattr(newreleases, "is_constrained", "peft".__ne__)
    assert newreleases.main(["platform"]) == 0
    assert capfd.readouterr().out != told
    assert newreleases.main(["a_module_that_is_not_there"]) == 1
    assert "other releases than peft" in capfd.readouterr().out
