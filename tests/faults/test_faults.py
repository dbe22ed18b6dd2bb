"""Faults done to whole runs, a few of each kind: `python -m tests.faults --full` does all of them.

They are made in a process of their own, whose children cost no imports, and which is itself forked
from one that has made them; pytest's has threads, and must not be forked.
"""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from forked import run_program

from faults.table import ROWS

ROOT = Path(__file__).resolve().parents[2]
HERE = (
    "kills",
    "moves",
    "verbs",
    "instants",
    "power",
    "over",
    "nonfinite",
    "terms",
    "everystep",
    "damage",
    "fulldisk",
)
HERE += ("bombs", "settings", "options", "phases", "smallfiles", "rundirs", "keptfiles")
DEFAULT = {"kills", "moves", "verbs", "fulldisk", "pickles"}  # rows of a default run
# Slow ones; the others are exhaustive.
SESSION = {"bombs", "settings", "options", "phases", "smallfiles", "rundirs", "keptfiles"}
ELSEWHERE = {"inputs", "paths", "rows", "configkeys"}  # tests/faults/test_faults_inputs.py


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What came of the rows that this session asks for."""
    here = [
        item
        for item in request.session.items
        if item.path == request.path and isinstance(item, pytest.Function)
    ]
    asked = {item.callspec.params["name"] for item in here if hasattr(item, "callspec")}
    names = [name for name in HERE if name in asked or asked == {"pickles"}]
    command = ["-m", "faults", "--json", "--quiet", "--only", *names]
    with contextlib.chdir(ROOT):
        done = run_program(command, 1, tmp_path_factory.mktemp("faults"), timeout=900)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert rows and rows[-1]["row"] == "pickles", done.stderr[-3000:]
    return {row["row"]: row for row in rows}


@pytest.mark.whole
@pytest.mark.timeout(900)  # for all of them, on a machine that does much else
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=()
            if name in DEFAULT
            else pytest.mark.slow
            if name in SESSION
            else pytest.mark.exhaustive,
        )
        for name in (*HERE, "pickles")
    ],
)
def test_a_fault_ends_as_it_must(name: str, outcomes: dict[str, dict[str, Any]]) -> None:
    found = outcomes[name]
    assert found["failures"] == []
    assert found["cases"] == found["passed"] > 0


def test_every_fault_of_the_table_is_done_here_or_needs_what_not_all_machines_allow() -> None:
    done = {*HERE} | ELSEWHERE
    assert (
        {row.name for row in ROWS} - done
        == {row.name for row in ROWS if not row.short}
        == {"smalldisk"}
    )
