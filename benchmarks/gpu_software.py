"""The software that gpu.py needs on a machine: what is there, and what has to be installed before
it can begin.

Until everything is there, nothing but the standard library is imported here.
"""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path

__all__ = ["untested_versions", "versions", "what_is_missing"]

PACKAGES = ("torch", "transformers", "peft", "accelerate", "deepspeed", "roundpipe", "lema-lora")
PROJECT = Path(__file__).parents[1] / "pyproject.toml"
OFFLINE = (
    "without a network: benchmarks/gpu_pack.py packs wheels elsewhere, and "
    "benchmarks/gpu_day.sh installs them"
)


def versions() -> dict[str, str]:
    """Return the versions of the packages that are there."""
    there = {name: _version(name) for name in PACKAGES}
    return {name: number for name, number in there.items() if number is not None}


def what_is_missing(device: str) -> list[str]:
    """Return a line for each thing that has to be there first, the device itself last; nothing
    is downloaded here.
    """
    asked = {re.match(r"[\w.-]+", text)[0]: text for text in _requirements()}  # type: ignore[index]
    lines = [
        f"{name} is absent; LEMA asks for {text}: pip install '{text}'"
        for name, text in asked.items()
        if _version(name) is None
    ]
    if find_spec("lema") is None or _version("lema-lora") is None:
        lines.append("lema is not installed: pip install --no-deps . in the project's directory")
    if lines:
        return [*lines, OFFLINE]  # what the backend needs may be absent too
    name = device.partition(":")[0]
    if name not in {point.name for point in entry_points(group="lema.backends")}:
        return [
            f"no backend {name!r} is installed: pip install --no-deps . in the project's directory"
        ]
    from lema.backend import load
    from lema.errors import BackendUnavailable

    try:
        load(device).close()
    except BackendUnavailable as error:
        return [str(error)]
    return []


def untested_versions() -> list[str]:
    """Return a line for each package that is there in a version for which LEMA does not ask; it may
    work all the same.

    The measurements take plain decoders, for which other versions of `transformers` give the same
    numbers: a pin alone is no reason to measure nothing on a machine that is at hand for minutes.
    """
    from packaging.requirements import Requirement

    lines = []
    for asked in map(Requirement, _requirements()):
        there = _version(asked.name)
        if there is not None and not asked.specifier.contains(there, prereleases=True):
            lines.append(
                f"{asked.name} {there}; LEMA asks for {asked}: pip install '{asked}', if "
                "anything fails"
            )
    return lines


def _requirements() -> list[str]:
    dependencies: list[str] = tomllib.loads(PROJECT.read_text())["project"]["dependencies"]
    return dependencies


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
