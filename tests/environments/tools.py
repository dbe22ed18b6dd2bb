"""Installs the built wheel by name, as `uv tool`, `pipx` and `uvx` do, and runs what they install:
`tox -e tools`.

Nothing is taken from the clone. The torch that the tests run with is the one that pip finds here,
which may be a build for the CPU on this machine's disk; uv does not look where pip does, so it gets
the file.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
TORCH = re.compile(r"^torch==\S+$", re.MULTILINE)
PLACES = "UV_TOOL_DIR", "UV_TOOL_BIN_DIR", "PIPX_HOME", "PIPX_BIN_DIR"
SCRIPTS = Path(sys.executable).parent


def call(*command: str | Path, place: Path) -> None:
    """Run a command of this environment, elsewhere than in the clone, and show what it prints."""
    program, *arguments = map(str, command)
    sys.stdout.write(f"+ {Path(program).name} {' '.join(arguments)}\n")
    sys.stdout.flush()
    ours = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PIP_CONSTRAINT")
    }
    tools = {name: str(place / name.lower()) for name in PLACES}
    subprocess.run(
        [program, *arguments], cwd=place, env=ours | tools | {"HF_HUB_OFFLINE": "1"}, check=True
    )


def files(place: Path) -> tuple[str, list[str]]:
    """Build the wheel and fetch torch; return LEMA's requirement, and the options of uv and pip
    for both files.
    """
    (torch,) = TORCH.findall((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    call(sys.executable, "-m", "build", "--wheel", "--outdir", place, ROOT, place=place)
    call(
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        place,
        torch,
        place=place,
    )
    pinned = []
    for name in ("lema_lora", "torch"):
        (wheel,) = place.glob(f"{name}-*.whl")
        pinned.append("==".join(wheel.name.split("-")[:2]).replace("_", "-"))
    (place / "constraints.txt").write_text(f"{pinned[1]}\n", encoding="utf-8")
    return pinned[0], [f"--find-links={place}", f"--constraint={place / 'constraints.txt'}"]


def commands(requirement: str, options: Sequence[str], place: Path) -> list[list[str | Path]]:
    """What users type, with the place of the files, and what they then run."""
    python = f"--python={sys.executable}"
    uv_options = [option.replace("--constraint=", "--constraints=") for option in options]
    return [
        [SCRIPTS / "uv", "tool", "install", "--quiet", python, *uv_options, requirement],
        [place / "uv_tool_bin_dir" / "lema", "doctor", "--quick"],
        [SCRIPTS / "pipx", "install", python, f"--pip-args={' '.join(options)}", requirement],
        [place / "pipx_bin_dir" / "lema", "--version"],
        [place / "pipx_bin_dir" / "lema", "init", "--help"],
        [
            SCRIPTS / "uvx",
            "--quiet",
            python,
            *uv_options,
            "--from",
            requirement,
            "lema-lora",
            "demo",
        ],
    ]


def main() -> None:
    """Install and run, and raise `CalledProcessError` where a command fails."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        for command in commands(*files(place), place):
            call(*command, place=place)


if __name__ == "__main__":
    main()
