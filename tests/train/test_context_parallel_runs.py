"""Runs in which processes divide the sequence of each row: they train as one process does, stop and
go on, and end together.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_program
from processes import run_processes
from smallrun import token_rows, write_model
from test_replicas import adapter, assert_alike, train, written

from lema.cli.app import app
from lema.cli.exitcodes import run


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, rows of different lengths to train on, others to evaluate on."""
    directory = tmp_path_factory.mktemp("divided")
    write_model(directory / "model")
    for name, rows in (("train", token_rows(26)), ("eval", token_rows(9, seed=5))):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


@pytest.fixture(scope="module")
def alone(place: Path) -> Path:
    return train(place, "one", 1)


@pytest.mark.parametrize(
    ("count", "changes"),
    [
        (2, {}),
        (4, {}),
        (2, {"shard_weights": True, "sequence_chunk": 3, "boundary_activations": "host"}),
        (4, {"context_parallel_size": 2}),
    ],
    ids=["2", "4", "2-sharded-chunks", "2-by-2"],
)
def test_processes_that_divide_rows_train_as_one_does(
    place: Path, alone: Path, count: int, changes: dict[str, Any]
) -> None:
    name = f"with-{count}-{len(changes)}"
    settings = {"context_parallel_size": count} | changes
    together = train(place, name, count, **settings)
    assert_alike(alone, together)
    assert sorted(path.name for path in together.iterdir()) == sorted(
        path.name for path in alone.iterdir()
    )
