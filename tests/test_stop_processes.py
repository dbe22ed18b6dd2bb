"""Of several processes one is told to stop: all do, after the same step, wherever each of them is, and none waits."""

from pathlib import Path

import pytest
from processes import run_processes
from smallrun import write_model


@pytest.mark.parametrize("weights", ["whole", "sharded"])
def test_what_stops_one_process_stops_all_after_the_same_step(weights: str, tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    done = run_processes([str(Path(__file__).with_name("stopped.py")), str(tmp_path), weights], 2)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.count("as if nobody had stopped it") == 2
