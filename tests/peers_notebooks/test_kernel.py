"""Every notebook runs in a kernel of Jupyter, as a user runs it: `tox -e notebooks`."""

import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from triednotebooks import NOTEBOOKS, tried, write_model


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path, tmp_path: Path) -> None:
    write_model(tmp_path)
    cells = nbformat.reads(json.dumps(tried(notebook)), as_version=4)
    ran = NotebookClient(
        cells, timeout=240, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    printed = "".join(
        output.get("text", "")
        for cell in ran.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    )
    assert (
        "bitwise the same" if notebook.stem == "proof" else "What stays on the device?\n    "
    ) in printed
