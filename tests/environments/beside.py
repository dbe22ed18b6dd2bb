"""Asks a resolver which trainers, servers and quantisers LEMA installs beside: `tox -e beside`.

A resolver reads metadata alone, so nothing is downloaded or installed. Every project is pinned to
its newest release: without that, a resolver goes back through the years to a release that asks for
nothing. Prints the table of docs/environments.md, and fails where fewer projects fit than `LEAST`.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

PROJECTS = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "axolotl": "axolotl",
    "unsloth": "Unsloth",
    "nemo-automodel": "NeMo Automodel",
    "llmcompressor": "llm-compressor",
    "trl": "TRL",
    "ms-swift": "ms-swift",
    "llamafactory": "LLaMA-Factory",
    "verl": "verl",
    "oumi": "oumi",
    "optimum-neuron": "optimum-neuron",
    "torchtitan": "torchtitan",
}
LEAST = 7
AT_ONCE = 6
PYTHONS = "3.12", "3.11", "3.13"
# Ubuntu 22.04 and Debian 12; SGLang has no wheel for an older one
PLATFORM = "x86_64-manylinux_2_34"
SHOWN = "transformers", "peft", "torch"
HEAD = f"| newest release | Python | fits | {' | '.join(SHOWN)} | what stands in the way |"
RULE = "|---" * HEAD.count(" | ") + "|---|"

Pins = dict[str, Version]


class Unresolvable(Exception):
    """No set of versions meets all requirements; the message is the resolver's."""


@dataclass(frozen=True)
class Answer:
    """What a resolver says of one project: its newest release, and the versions of both together
    or the conflict.
    """

    title: str
    version: Version
    python: str
    pins: Pins
    conflict: str = ""

    def row(self) -> str:
        """The row of the table."""
        shown = [str(self.pins[name]) if name in self.pins else "" for name in SHOWN]
        fits = "no" if self.conflict else "**yes**"
        cells = [
            f"{self.title} {self.version}",
            self.python,
            fits,
            *shown,
            self.conflict.replace("|", "\\|"),
        ]
        return f"| {' | '.join(cells)} |"


def resolve(requirements: Sequence[str], python: str, *options: str) -> Pins:
    """Return the newest versions that meet all requirements, or raise `Unresolvable`."""
    command = ["uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", *options, "-"]
    command += ["--python-version", python, "--python-platform", PLATFORM]
    done = subprocess.run(
        command, input="\n".join(requirements), capture_output=True, text=True, check=False
    )
    message = " ".join(done.stderr.split())
    if done.returncode and "No solution found" in message:
        raise Unresolvable(message)
    if done.returncode:  # the index is not there: this says nothing of the requirements
        raise SystemExit(message)
    return {
        canonicalize_name(name): Version(version)
        for name, version in re.findall(r"^([\w.-]+)==(\S+)", done.stdout, re.MULTILINE)
    }


def newest(project: str) -> tuple[Version, str]:
    """Return the newest release of a project, and the first Python of `PYTHONS` that it has it
    for.
    """
    releases = {}
    for python in PYTHONS:
        try:
            releases[python] = resolve([project], python, "--no-deps")[project]
        except Unresolvable:
            continue
    version = max(releases.values())
    return version, next(python for python, release in releases.items() if release == version)


def requirement(asked: Requirement) -> str:
    """A requirement as the page says it: the package, and the range from its lower end."""
    return f"{asked.name} {','.join(sorted(map(str, asked.specifier), reverse=True))}"


def conflict(release: str, python: str, own: Sequence[str]) -> str:
    """Return LEMA's requirements that a release does not meet even alone, as a sentence; none,
    if it meets each.
    """
    try:
        alone = resolve([release], python)
    except Unresolvable as error:
        return f"cannot be installed at all: {error}"
    unmet = [asked for asked in map(Requirement, own) if not meets(alone, asked)]
    if not unmet:
        return ""
    taken = [f"{asked.name} {alone[canonicalize_name(asked.name)]}" for asked in unmet]
    return (
        f"takes {' and '.join(taken)} at most; LEMA needs {' and '.join(map(requirement, unmet))}"
    )


def meets(pins: Pins, asked: Requirement) -> bool:
    """Whether the versions have none of this package, or one in the range."""
    version = pins.get(canonicalize_name(asked.name))
    return version is None or asked.specifier.contains(version, prereleases=True)


def ask(project: str, own: Sequence[str]) -> Answer:
    """Resolve LEMA's requirements with the newest release of a project."""
    version, python = newest(project)
    title = PROJECTS[project]
    release = f"{project}=={version}"
    try:
        return Answer(title, version, python, resolve([*own, release], python))
    except Unresolvable as error:
        return Answer(title, version, python, {}, conflict(release, python, own) or str(error))


def main() -> int:
    """Print the table, and return 1 where too few fit."""
    settings = tomllib.loads(
        (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    )
    own = settings["project"]["dependencies"]
    sys.stdout.write(f"{HEAD}\n{RULE}\n")
    fitting = 0
    # a resolver waits for the index nearly all of its time
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for answer in pool.map(lambda project: ask(project, own), PROJECTS):
            sys.stdout.write(answer.row() + "\n")
            sys.stdout.flush()
            fitting += not answer.conflict
    sys.stdout.write(f"\n{fitting} of {len(PROJECTS)} fit; at least {LEAST} have to\n")
    return int(fitting < LEAST)


if __name__ == "__main__":
    sys.exit(main())
