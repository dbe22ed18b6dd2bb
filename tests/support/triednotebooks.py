"""The notebooks as tests run them: nothing is installed, and models are tiny."""

import json
from pathlib import Path
from typing import Any

from lema_tools.demo.run import write_files

__all__ = ["NOTEBOOKS", "TINY", "code_cells", "sources", "tried", "write_model"]

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
# in place of a cell of parameters
TINY = 'MODEL, DEVICE_MEMORY, STEPS, TOKENS = "lema-demo/model", "100MB", 2, 4'
# What a cell's tag replaces it by. LEMA is installed already: `tox -e tools` installs the wheel.
REPLACED = {"install": "", "parameters": TINY}


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells of a notebook that have code."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def tried(notebook: Path) -> dict[str, Any]:
    """A notebook whose cells of parameters are those of a tiny model, and whose cells that
    install are empty.
    """
    content: dict[str, Any] = json.loads(notebook.read_text(encoding="utf-8"))
    for cell in code_cells(content):
        for tag in cell["metadata"].get("tags", []):
            cell["source"] = REPLACED[tag]
    return content


def sources(notebook: dict[str, Any]) -> list[str]:
    """The code of each cell."""
    return ["".join(cell["source"]) for cell in code_cells(notebook)]


def write_model(directory: Path) -> None:
    """Write the demo's model, which `TINY` names, to a directory."""
    (directory / "lema-demo").mkdir()
    write_files(directory / "lema-demo")
