"""`lema` on a command line: data files, a config of a short run, and how a refusal looks."""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file
from smallrun import SENTENCES, settings

from lema.cli.app import app
from lema.cli.exitcodes import run

Rows = list[dict[str, Any]]

TEXTS: Rows = [{"text": sentence} for sentence in SENTENCES[:8]]
PAIRS: Rows = [{"prompt": sentence[:16], "completion": sentence[16:]} for sentence in SENTENCES[:8]]
CHATS: Rows = [
    {
        "messages": [
            {"role": "user", "content": f"who is miller {n}?"},
            {"role": "assistant", "content": "the one"},
        ]
    }
    for n in range(8)
]


def write_rows(file: Path, rows: Rows) -> Path:
    """Write rows in the format the name ends in."""
    if file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif file.suffix == ".json":
        file.write_text(json.dumps(rows, indent=1))
    elif file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    elif file.suffix == ".txt":
        file.write_text("\n".join(row["text"] for row in rows) + "\n")
    else:
        with file.open("w", newline="") as out:
            writer = csv.DictWriter(out, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return file


def config_writer(model: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return what writes a YAML file of settings for a short run in `tmp_path`; None leaves a
    setting out.
    """

    def write(**changes: Any) -> Path:
        given = {
            "model_name_or_path": str(model),
            "train_data": str(tmp_path / "data.jsonl"),
            **settings(model, tmp_path / "out").model_dump(
                exclude_unset=True, exclude={"model_name_or_path"}
            ),
            "max_steps": 2,
            "max_length": 64,
            **changes,
        }
        if not (tmp_path / "data.jsonl").exists():
            write_rows(tmp_path / "data.jsonl", TEXTS)
        file = tmp_path / "run.yaml"
        lines = [
            f"{key}: {json.dumps(value)}\n" for key, value in given.items() if value is not None
        ]
        file.write_text("".join(lines))
        return file

    return write


def lema(*words: Any) -> int:
    return run(app, [str(word) for word in words])


def assert_same_adapter(one: Path, other: Path) -> None:
    found, expected = (
        load_file(directory / "adapter_model.safetensors") for directory in (one, other)
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def assert_refused(
    capfd: pytest.CaptureFixture[str], code: int, words: list[str], *arguments: Any
) -> None:
    capfd.readouterr()
    found = lema(*arguments)
    out, err = capfd.readouterr()
    assert found == code, err
    assert re.search("^error: ", err, re.MULTILINE)
    assert "Traceback" not in out + err
    for word in words:
        assert word in err
