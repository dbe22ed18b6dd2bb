"""Faults done to whole runs, a few of each kind: `python -m tests.faults --full` does all of them.

They are made in two processes of their own, whose children cost no imports; pytest's has threads, and must not be
forked.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from faults.table import ROWS

ROOT = Path(__file__).resolve().parents[2]
GROUPS = (
    ("kills", "instants", "power", "over", "nonfinite"),
    ("terms", "everystep", "damage", "fulldisk", "bombs", "settings", "phases", "smallfiles"),
)
DEFAULT = {"kills", "fulldisk", "pickles"}  # rows of a default run
SESSION = {"bombs", "settings", "phases", "smallfiles"}  # slow ones; the others are exhaustive
ELSEWHERE = {"inputs", "paths", "rows", "configkeys"}  # tests/faults/test_faults_inputs.py


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, list[dict[str, Any]]]:
    """What came of the rows that this session asks for."""
    here = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
    asked = {item.callspec.params["name"] for item in here if hasattr(item, "callspec")}
    groups = [[name for name in names if name in asked or asked == {"pickles"}] for names in GROUPS]
    command = [sys.executable, "-m", "tests.faults", "--json", "--quiet", "--only"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    started = [
        subprocess.Popen(
            [*command, *names], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for names in groups
        if names
    ]
    found: dict[str, list[dict[str, Any]]] = {}
    for process in started:
        out, said = process.communicate()
        rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        assert rows and rows[-1]["row"] == "pickles", said[-3000:]
        for row in rows:
            found.setdefault(row["row"], []).append(row)
    return found


@pytest.mark.whole
@pytest.mark.timeout(900)  # for all of them, on a machine that does much else
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=() if name in DEFAULT else pytest.mark.slow if name in SESSION else pytest.mark.exhaustive
        )
        for name in (*(name for group in GROUPS for name in group), "pickles")
    ],
)
def test_a_fault_ends_as_it_must(name: str, outcomes: dict[str, list[dict[str, Any]]]) -> None:
    for found in outcomes[name]:
        assert found["failures"] == []
        assert found["cases"] == found["passed"] > 0


def test_every_fault_of_the_table_is_done_here_or_needs_what_not_all_machines_allow() -> None:
    done = {name for group in GROUPS for name in group} | ELSEWHERE
    assert {row.name for row in ROWS} - done == {row.name for row in ROWS if not row.short} == {"smalldisk"}
