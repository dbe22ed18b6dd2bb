"""Several processes on this machine, all cases in one launch for each number of them."""

import json
from collections.abc import Callable

import neuronranks
import pytest
from forked import run_forked

Measured = dict[str, list[dict[str, float] | str]]


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Measured]:
    """What each case measured on each of so many ranks."""
    known: dict[int, Measured | str] = {}  # or why there is nothing: then no test starts the processes again

    def run(count: int) -> Measured:
        if count not in known:
            directory = tmp_path_factory.mktemp("ranks")
            known[count] = "the processes did not end"
            run_forked(neuronranks.main, [str(directory / "measured.json")], count, directory, 500)
            known[count] = json.loads((directory / "measured.json").read_text())
        measured = known[count]
        assert not isinstance(measured, str), measured
        return measured

    return run
