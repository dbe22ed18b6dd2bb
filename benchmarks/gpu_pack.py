"""Pack what a machine with a GPU and without a network lacks: wheels of LEMA and of its
requirements.

    python benchmarks/gpu_pack.py            # makes .gpu/ in the project's directory, in about a minute

The wheels are for Python 3.12 on x86-64 Linux. LEMA's own wheel says what it asks for; what the
machine has already (`--there`, a list as `pip freeze` prints it) stays out, and so on with the
requirements of each wheel that is packed. Versions are those of constraints.txt. The folder travels
with a copy of the checkout, whose benchmarks/gpu_day.sh installs from it; both together are at most
60 MiB, or this ends with an error.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Mapping
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

__all__ = ["missing_wheels", "pinned", "requirements_of", "versions_in"]

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".gpu"
THERE = Path(__file__).with_name("gpu_machine.txt")
LARGEST = 60  # MiB, of the folder and the checkout together
PYTHON = "3.12"
# pip takes each tag by its exact name, so the older tags that wheels still carry are named as well.
TAGS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")
# The machine that a requirement's marker is read for, which is not the one that packs.
TARGET = {
    "python_version": PYTHON,
    "python_full_version": f"{PYTHON}.3",
    "implementation_name": "cpython",
    "implementation_version": f"{PYTHON}.3",
    "platform_python_implementation": "CPython",
    "platform_machine": "x86_64",
    "platform_system": "Linux",
    "sys_platform": "linux",
    "os_name": "posix",
}

Fetch = Callable[[Requirement], Path]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--there", type=Path, default=THERE, help="what the machine has, as `pip freeze` prints it"
    )
    parser.add_argument(
        "--extras", nargs="*", default=["kernels"], help="of LEMA, such as quantize"
    )
    parser.add_argument(
        "--out", type=Path, default=FOLDER, help="the folder; what was in it is deleted"
    )
    options = parser.parse_args()
    wheels: Path = options.out / "wheels"
    shutil.rmtree(options.out, ignore_errors=True)
    wheels.mkdir(parents=True)
    _pip("wheel", "--no-deps", "--wheel-dir", str(wheels), str(ROOT))
    (lema,) = wheels.glob("*.whl")
    there = versions_in(options.there.read_text())
    constraints = versions_in((ROOT / "constraints.txt").read_text())
    missing_wheels(
        lema, options.extras, there, constraints, lambda requirement: _download(requirement, wheels)
    )
    for wheel in sorted(wheels.iterdir()):
        print(f"{wheel.stat().st_size / 2**20:6.1f} MiB  {wheel.name}")
    folder = sum(wheel.stat().st_size for wheel in wheels.iterdir()) / 2**20
    checkout = _checkout_bytes() / 2**20
    print(
        f"{folder:6.1f} MiB in {options.out}, {checkout:.1f} MiB in the checkout, "
        f"{folder + checkout:.1f} together"
    )
    if folder + checkout > LARGEST:
        raise SystemExit(
            f"that is more than {LARGEST} MiB: leave out --extras, or untracked files of "
            "the checkout"
        )


def missing_wheels(
    lema: Path,
    extras: Iterable[str],
    there: Mapping[str, str],
    constraints: Mapping[str, str],
    fetch: Fetch,
) -> list[Path]:
    """Fetch what LEMA needs and the machine lacks, and what that needs in turn; return the files.

    Args:
        lema: LEMA's own wheel.
        extras: of LEMA, whose requirements are fetched too.
        there: versions that the machine has, by canonical name; empty: the version is not known.
        constraints: the versions to fetch, by canonical name; a package that is not listed is
            fetched by its range.
        fetch: downloads one requirement without its own, and returns the wheel.
    """
    wheels: dict[str, Path] = {"lema-lora": lema}
    waiting = requirements_of(lema, extras)
    while waiting:
        requirement = waiting.pop(0)
        name = canonicalize_name(requirement.name)
        version = there.get(name)
        if name in wheels or (version is not None and _suffices(version, requirement)):
            continue
        wheels[name] = fetch(pinned(requirement, constraints))
        waiting += requirements_of(wheels[name], requirement.extras)
    return [wheel for name, wheel in wheels.items() if name != "lema-lora"]


def requirements_of(wheel: Path, extras: Iterable[str] = ()) -> list[Requirement]:
    """Return what a wheel asks for on the machine with the GPU, with some of its extras."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        header = HeaderParser().parsestr(archive.read(metadata).decode())
    asked = map(Requirement, header.get_all("Requires-Dist", []))
    return [requirement for requirement in asked if _applies(requirement, ("", *extras))]


def versions_in(freeze: str) -> dict[str, str]:
    """Return the versions in a list as `pip freeze` prints it, by canonical name; empty: the
    line has a name alone.
    """
    lines = (line.partition("#")[0].strip() for line in freeze.splitlines())
    pairs = (line.partition("==") for line in lines if line)
    return {canonicalize_name(name): version for name, _, version in pairs}


def pinned(requirement: Requirement, constraints: Mapping[str, str]) -> Requirement:
    """Return the requirement at the version that the tests run with, if its range has that
    version.
    """
    version = constraints.get(canonicalize_name(requirement.name))
    if version is None or not _suffices(version, requirement):
        return requirement
    return Requirement(f"{requirement.name}=={version}")


def _suffices(version: str, requirement: Requirement) -> bool:
    return not version or requirement.specifier.contains(version, prereleases=True)


def _applies(requirement: Requirement, extras: Iterable[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({**TARGET, "extra": extra}) for extra in extras)


def _download(requirement: Requirement, folder: Path) -> Path:
    before = set(folder.iterdir())
    target = ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
    for tag in TAGS:
        target += ["--platform", f"{tag}_x86_64"]
    # without its extras and its marker, which pip reads for here
    name = f"{requirement.name}{requirement.specifier}"
    _pip("download", "--no-deps", *target, "--dest", str(folder), name)
    (wheel,) = set(folder.iterdir()) - before
    return wheel


def _pip(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"pip {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")


def _checkout_bytes() -> int:
    """Return the bytes of the files that travel: tracked ones, and untracked ones that git does
    not ignore.
    """
    command = [
        "git",
        "-C",
        str(ROOT),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    names = subprocess.run(command, capture_output=True, check=True).stdout.split(b"\0")
    files = {ROOT / name.decode() for name in names if name}
    return sum(file.lstat().st_size for file in files if file.is_file())


if __name__ == "__main__":
    main()
