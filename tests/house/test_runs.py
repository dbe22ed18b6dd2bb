"""Every script in runs/ prints one row of the README's table. These tests use a tiny model on
the CPU.
"""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from lema.config.printing import hushed

RUNS = Path(__file__).parents[2] / "runs"
SCRIPTS = sorted(path for path in RUNS.glob("*.py") if path.name != "row.py")
FOR_GPUS = [script for script in SCRIPTS if not script.stem.endswith("_cpu")]


def test_each_script_says_what_it_is_and_how_it_is_called() -> None:
    assert len(FOR_GPUS) >= 4
    for script in SCRIPTS:
        text = script.read_text(encoding="utf-8")
        assert f"python runs/{script.name}" in text and "prints the README's row" in text
        for name, size in re.findall(r'main\("([\w.-]+)", (\d+)\)', text):
            assert (RUNS.parent / "configs/models" / name / f"{size}GB.yaml").is_file()


def check_row(printed: str) -> None:
    """Check that one line is the row of a tiny model."""
    (row,) = [line for line in printed.splitlines() if line.startswith("| a tiny model |")]
    assert len(row.strip("|").split(" | ")) == 5 and re.search(r"at the peak", row)


@pytest.mark.parametrize("script", FOR_GPUS, ids=lambda script: script.stem)
def test_the_tiny_form_for_gpu_owners_prints_a_row(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, because imports would take most of the time."""
    monkeypatch.syspath_prepend(str(RUNS))
    monkeypatch.setattr(sys, "argv", [str(script), "--tiny"])
    with hushed():
        runpy.run_path(str(script), run_name="__main__")
    check_row(capsys.readouterr().out)


@pytest.mark.slow
def test_the_tiny_form_for_the_cpu_prints_a_row(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(RUNS / "llama_8b_3gb_cpu.py"),
        "--tiny",
        "--directory",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    check_row(done.stdout)
