"""The distribution has a name of its own: no text installs another project's, and who has both
is told.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from installed import installed

from lema.backend import Level
from lema_tools.doctor.machine import versions

ROOT = Path(__file__).parents[2]
TEXTS = (".md", ".py", ".toml", ".ini", ".yml", ".yaml", ".cff", ".ipynb", ".sh", ".txt", "")
# A command that installs or runs a distribution named `lema`, with an extra or without.
OF_ANOTHER = re.compile(
    r"(?:pip install|pip3 install|uv add|tool install|pipx install|pipx run|uvx)\b[^\n`|]*?[ \"']lema(?![\w./-])"
)


def texts() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    names = [Path(name) for name in listed.stdout.splitlines()]
    if not names:  # not a clone
        names = [one.relative_to(ROOT) for one in ROOT.rglob("*") if one.is_file()]
        names = [
            name
            for name in names
            if name.parts[0] == ".github" or not name.parts[0].startswith(".")
        ]
    places = (ROOT / name for name in names if name.suffix in TEXTS)
    return [place for place in places if place.is_file() and place != Path(__file__)]


@pytest.mark.parametrize(
    "command", ["pip install lema", 'pip install "lema[plot]"', "uvx lema demo", "pipx run lema"]
)
def test_a_command_that_installs_the_other_project_is_seen(command: str) -> None:
    assert OF_ANOTHER.search(command)
    assert not OF_ANOTHER.search(command.replace("lema", "lema-lora"))


def test_no_text_installs_another_project() -> None:
    contents = {text: text.read_text(encoding="utf-8", errors="replace") for text in texts()}
    assert len(contents) > 500
    assert not [
        f"{text}: {match[0]}"
        for text, content in contents.items()
        for match in OF_ANOTHER.finditer(content)
    ]


def test_doctor_tells_of_the_other_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not [one for one in versions() if one.name == "same name"]
    with installed(tmp_path / "site", monkeypatch, "lema", {}, {}, version="0.0.1"):
        (told,) = (one for one in versions() if one.name == "same name")
    assert told.level is Level.PROBLEM
    assert "pip uninstall lema" in told.how and "lema-lora" in told.how


@pytest.mark.parametrize("there", ["hides", "overwrites", "took away"])
def test_the_command_tells_of_a_package_of_its_name(there: str, tmp_path: Path) -> None:
    """The other one is found first, or was installed over ours, or was uninstalled after that."""
    (tmp_path / "lema").mkdir()
    if there != "hides":
        (tmp_path / "lema" / "cli").mkdir()
        shutil.copy(ROOT / "lema" / "cli" / "app.py", tmp_path / "lema" / "cli")
    if there != "took away":
        (tmp_path / "lema" / "__init__.py").write_text("raise SystemExit('the other project ran')")
    code = "from lema_tools.command import main; main()"
    path = os.pathsep.join([str(tmp_path), str(ROOT / "tools")])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, "--version"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert f"Python finds another project's package `lema`, in {tmp_path / 'lema'}" in done.stderr
    assert "pip uninstall lema" in done.stderr


@pytest.mark.parametrize("other", ["lema-0.0.1.dev2.dist-info", "LEMA-0.1-py3.11.egg-info", ""])
def test_the_import_warns_where_both_are_in_one_folder(other: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "lema", tmp_path / "lema", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "lema_lora-1.0.dist-info").mkdir()
    if other:
        (tmp_path / other).mkdir()
    done = subprocess.run(
        [
            sys.executable,
            "-S",
            "-c",
            f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import lema",
        ],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ("another project's package `lema` is installed" in done.stderr) == bool(other)
