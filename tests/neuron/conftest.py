"""Several processes on this machine, all cases in one launch for each number of them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import run_processes

Measured = dict[str, list[dict[str, float] | str]]


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Measured]:
    """What each case measured on each of so many ranks."""
    known: dict[int, Measured | str] = {}  # or why there is nothing: then no test starts the processes again

    def run(count: int) -> Measured:
        if count not in known:
            here, file = Path(__file__).parent, tmp_path_factory.mktemp("ranks") / "measured.json"
            known[count] = "the processes did not end"
            done = run_processes([str(here / "neuronranks.py"), str(file)], count)
            known[count] = json.loads(file.read_text()) if done.returncode == 0 else done.stderr[-3000:]
        measured = known[count]
        assert not isinstance(measured, str), measured
        return measured

    return run
