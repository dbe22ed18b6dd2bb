"""The code cells of every notebook run, in order, in one process as a kernel runs them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
# Lines for the shell become calls; this Python's lema is called, and nothing is installed again.
SHELL = 'import subprocess, sys\nsubprocess.run([sys.executable, "-m", *f"""{}""".split()], check=True)'


def program(notebook: Path) -> str:
    """The code of a notebook, with its lines for the shell as Python."""
    lines = []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            for line in "".join(cell["source"]).splitlines():
                if line.startswith("!"):
                    lines += SHELL.format(line[1:]).splitlines()
                elif not line.startswith("%pip install"):
                    lines.append(line)
    return "\n".join(lines)


def test_there_is_one() -> None:
    assert [path.name for path in NOTEBOOKS] == ["proof.ipynb"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_keeps_no_output(notebook: Path) -> None:
    found = json.loads(notebook.read_text(encoding="utf-8"))
    assert len(notebook.read_bytes()) < 8000 and found["nbformat"] == 4
    code = [cell for cell in found["cells"] if cell["cell_type"] == "code"]
    assert code and not any(cell["outputs"] or cell["execution_count"] for cell in code)


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_cells_run(notebook: Path, tmp_path: Path) -> None:
    """Two processes of `lema prove` and what they import take most of its time."""
    done = subprocess.run(
        [sys.executable, "-c", program(notebook)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "bitwise the same: every loss, all 168 gradients" in done.stdout
    assert json.loads((tmp_path / "proof/certificate.json").read_text())["bitwise"]
