"""Distributions installed for the length of one test, as pip would leave them: modules, and
metadata beside them.
"""

import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def installed(
    site: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    entry_points: Mapping[str, str],
    modules: Mapping[str, str],
    *,
    version: str = "1.0",
    group: str = "lema.backends",
    requires: Sequence[str] = (),
) -> Iterator[None]:
    """Install a distribution into `site`: entry points of a group, and modules by name and
    source.
    """
    metadata = site / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True)
    needs = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
    )
    lines = [f"{point} = {value}" for point, value in entry_points.items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    for module, source in modules.items():
        (site / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(site)
    try:
        yield
    finally:
        for module in modules:
            sys.modules.pop(module, None)


@contextmanager
def installed_project(site: Path, monkeypatch: pytest.MonkeyPatch, project: Path) -> Iterator[None]:
    """Install what a project's `pyproject.toml` says."""
    declared = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    modules = {file.stem: file.read_text() for file in project.glob("*.py")}
    points = declared["entry-points"]["lema.backends"]
    with installed(site, monkeypatch, declared["name"], points, modules):
        yield
