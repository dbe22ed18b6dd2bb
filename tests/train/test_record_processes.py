"""Two processes, the first of which is killed again and again, leave the record of a run that nothing disturbed."""

from pathlib import Path

import pytest
from faults.shortrun import record_of
from forked import run_forked
from killedwork import trained
from smallrun import write_model


@pytest.mark.slow
@pytest.mark.parametrize("way", ["plain", "phases"])
def test_two_processes_that_are_killed_leave_the_record_of_the_run(way: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    run_forked(trained, [model, tmp_path / "straight", way, -1], 2, tmp_path, 240)
    for at in (14, 23, 30):
        with pytest.raises(AssertionError, match="exit codes"):
            run_forked(trained, [model, tmp_path / "cut", way, at], 2, tmp_path, 240)
    run_forked(trained, [model, tmp_path / "cut", way, -1], 2, tmp_path, 240)
    assert record_of(tmp_path / "cut") == record_of(tmp_path / "straight")
    adapters = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("cut", "straight")]
    assert adapters[0] == adapters[1]
