"""Several processes on this machine, all cases of a session in one launch for each number of
them.
"""

import json
from collections.abc import Callable

import neuronranks
import pytest
from forked import run_forked

Measured = dict[str, list[dict[str, float] | str]]


@pytest.fixture(scope="session")
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], Measured]:
    """What each case that this session has measured on each of so many ranks."""
    asked = [
        item.callspec.params
        for item in request.session.items
        if "ranks" in getattr(item, "fixturenames", ())
    ]
    # or why there is nothing: then no test starts the processes again
    known: dict[int, Measured | str] = {}

    def run(count: int) -> Measured:
        if count not in known:
            directory = tmp_path_factory.mktemp("ranks")
            known[count] = "the processes did not end"
            names = [case.get("name", "unreduced") for case in asked if case["count"] == count]
            run_forked(
                neuronranks.main, [str(directory / "measured.json"), names], count, directory, 500
            )
            known[count] = json.loads((directory / "measured.json").read_text())
        measured = known[count]
        assert not isinstance(measured, str), measured
        return measured

    return run
