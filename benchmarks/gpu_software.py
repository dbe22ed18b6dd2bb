"""The software that gpu.py needs on a machine: what is there, and what has to be installed before it can begin."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

from packaging.requirements import Requirement

__all__ = ["versions", "what_is_missing"]

PACKAGES = ("torch", "transformers", "peft", "accelerate", "deepspeed", "roundpipe", "lema")


def versions() -> dict[str, str]:
    """Return the versions of the packages that are there."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def what_is_missing(device: str) -> list[str]:
    """Return a line for each thing that has to be there first, the device itself last; nothing is downloaded here."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    lines = []
    for said in map(Requirement, project["dependencies"]):
        try:
            there = version(said.name)
        except PackageNotFoundError:
            there = None
        if there is None or not said.specifier.contains(there, prereleases=True):
            lines.append(f"{said.name} {there or 'is absent'}; LEMA asks for {said}: pip install '{said}'")
    name = device.partition(":")[0]
    if name not in {point.name for point in entry_points(group="lema.backends")}:
        lines.append(f"no backend {name!r} is installed: pip install --no-deps . in the project's directory")
    if not lines:  # else what the backend needs may be absent
        from lema.backend import load
        from lema.errors import BackendUnavailable

        try:
            load(device).close()
        except BackendUnavailable as error:
            lines.append(str(error))
    return lines
