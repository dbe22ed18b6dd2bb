"""Rows with media read as a run reads them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lema import LemaConfig
from lema.model.files import ModelFiles, read_data


def reading(model: Path, folder: Path) -> Callable[..., Any]:
    """Return what reads rows for a model as a run with these settings does. A list of rows is
    written to a file in the folder first, beside which its files are.
    """

    def data(rows: Any, **changes: Any) -> Any:
        given: Any = rows
        if isinstance(rows, list):
            file = folder / "rows.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
            given = str(file)
        elif not isinstance(rows, str):
            given = list(rows)
        settings = {"device": "cpu", "modalities": "all", "max_length": 64, **changes}
        config = LemaConfig(str(model), **settings)
        return read_data(config, ModelFiles(config), given)

    return data
