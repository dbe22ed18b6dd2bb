"""The cells of every notebook run in order in one process, as in a kernel; `tox -e notebooks`
runs them in one.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from projectaddress import address_of
from triednotebooks import NOTEBOOKS, TINY, code_cells, sources, tried, write_model

# Lines for the shell become calls of this Python's lema.
SHELL = (
    'import subprocess, sys\nsubprocess.run([sys.executable, "-m", *f"""{}""".split()], check=True)'
)
ROOT = Path(__file__).parents[2]
SITES = {
    "colab": "https://colab.research.google.com/github/",
    "kaggle": "https://www.kaggle.com/kernels/welcome?src=",
}
PROOF, *ON_SITES = (
    next(path for path in NOTEBOOKS if path.stem == name) for name in ("proof", *SITES)
)


def run(notebook: Path, place: Path) -> str:
    """Run the code of a notebook, with its lines for the shell as Python, and return what it
    prints.
    """
    lines = [line for source in sources(tried(notebook)) for line in source.splitlines()]
    code = "\n".join(SHELL.format(line[1:]) if line.startswith("!") else line for line in lines)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=place, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_there_are_three() -> None:
    assert [path.stem for path in NOTEBOOKS] == sorted(["proof", *SITES])


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_keeps_no_output(notebook: Path) -> None:
    found = json.loads(notebook.read_text(encoding="utf-8"))
    assert len(notebook.read_bytes()) < 8000 and found["nbformat"] == 4
    code = code_cells(found)
    assert code and not any(cell["outputs"] or cell["execution_count"] for cell in code)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_only_what_installs_is_left_out_of_a_test(notebook: Path) -> None:
    found = json.loads(notebook.read_text(encoding="utf-8"))
    installs = [
        "".join(cell["source"])
        for cell in code_cells(found)
        if "install" in cell["metadata"].get("tags", [])
    ]
    assert len(installs) == 1 and "%pip install -q " in installs[0]
    code = [
        line for line in installs[0].splitlines() if not line.startswith(("#", "%pip install "))
    ]
    assert code in ([], ['PACKAGE = "lema-lora"'])


@pytest.mark.parametrize("notebook", ON_SITES, ids=lambda path: path.stem)
def test_a_notebook_opens_at_its_site_by_one_link_to_the_projects_address(notebook: Path) -> None:
    address = address_of(ROOT)
    links = re.findall(r"\[Open in \w+\]\(([^)]+)\)", notebook.read_text(encoding="utf-8"))
    shown = address.removeprefix("https://github.com/") if notebook.stem == "colab" else address
    assert links == [f"{SITES[notebook.stem]}{shown}/blob/main/notebooks/{notebook.name}"]


def test_two_sites_have_the_same_code() -> None:
    first, second = (sources(json.loads(path.read_text(encoding="utf-8"))) for path in ON_SITES)
    assert first == second and any(line.split(" = ")[0] in first[1] for line in TINY.split(", "))


@pytest.mark.slow
def test_the_proof_runs(tmp_path: Path) -> None:
    """Two processes of `lema prove` and what they import take most of its time."""
    assert "bitwise the same: every loss, all 168 gradients" in run(PROOF, tmp_path)
    assert json.loads((tmp_path / "proof/certificate.json").read_text())["bitwise"]


@pytest.mark.slow
def test_a_model_is_planned_trained_and_asked(tmp_path: Path) -> None:
    """In one of two notebooks, because their code is the same."""
    write_model(tmp_path)
    printed = run(ON_SITES[0], tmp_path)
    assert "What is streamed?\n    " in printed and "What stays on the device?\n    " in printed
    metrics = [
        json.loads(line)
        for line in (tmp_path / "output/notebook/metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in metrics if line["type"] == "train"][-1] == 2
    assert (tmp_path / "output/notebook/adapter_model.safetensors").is_file()
