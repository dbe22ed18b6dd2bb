"""A disk that is full costs a checkpoint, and neither the run nor the checkpoints before; one
run writes at a time.
"""

import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest
from disks import Disk
from safetensors.torch import load_file
from smallrun import batch, logged, opened, run_fit, same, settings, token_rows, write_model
from torch import Tensor

from lema.config import LemaConfig
from lema.errors import ConfigError, DiskFull
from lema.storage import diskspace as freespace
from lema.storage.manifest import check_manifest
from lema.train.checkpoint import format as checkpoint
from lema.train.metrics import MetricsLog
from lema.train.stop import STOP_FILE, StopOnSignal

ROWS = token_rows(16)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


Straight = tuple[LemaConfig, dict[str, Tensor]]


@pytest.fixture(scope="module")
def straight(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """Four steps on a disk with room enough, and the adapter that they end with."""
    config = settings(llama, tmp_path_factory.mktemp("straight"), save_steps=1, max_steps=4)
    return config, run_fit(config, ROWS)[1]


def before_it_is_written(disk: Disk, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(freespace, "free_bytes", disk.free)


def while_it_is_written(disk: Disk, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checkpoint, "save_file", disk.save_file)


@pytest.mark.slow
@pytest.mark.parametrize("found", [before_it_is_written, while_it_is_written])
def test_a_run_goes_on_without_the_checkpoint_that_there_is_no_room_for(
    found: Callable[[Disk, pytest.MonkeyPatch], None],
    llama: Path,
    straight: Straight,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = Disk(2, 3)
    config = settings(llama, tmp_path / "out", save_steps=1, max_steps=4)
    found(disk, monkeypatch)
    with pytest.warns(
        UserWarning, match=r"no checkpoint after step [23]: .*The run goes on"
    ) as warned:
        _, adapter = run_fit(config, ROWS, callbacks=[disk])
    assert len(warned) == 2 and disk.saved == [1, 4]
    assert same(adapter, straight[1]) and logged(config) == logged(straight[0])
    kept = sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir())
    assert kept == ["checkpoint-1", "checkpoint-4"], "and nothing is left of the others"
    for name in kept:
        check_manifest(tmp_path / "out" / name)


@pytest.mark.slow
@pytest.mark.parametrize("found", [before_it_is_written, while_it_is_written])
def test_without_room_for_its_last_checkpoint_a_run_fails_and_the_one_before_stays(
    found: Callable[[Disk, pytest.MonkeyPatch], None],
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = Disk(2)
    config = settings(llama, tmp_path / "out", save_steps=1, max_steps=2)
    found(disk, monkeypatch)
    with pytest.raises(DiskFull, match=r"full|No space left") as caught:
        run_fit(config, ROWS, callbacks=[disk])
    assert caught.value.exit_code == 6
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "checkpoint-1",
        "metrics.jsonl",
    ]
    check_manifest(tmp_path / "out" / "checkpoint-1")


@pytest.mark.slow
@pytest.mark.parametrize("found", [before_it_is_written, while_it_is_written])
def test_stopped_on_a_full_disk_a_run_fails_and_goes_on_from_the_checkpoint_before(
    found: Callable[[Disk, pytest.MonkeyPatch], None],
    llama: Path,
    straight: Straight,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Asked by the file, which would stop the run that goes on if it were left there."""
    disk = Disk(2, 3)
    config = settings(llama, tmp_path / "out", save_steps=1, max_steps=4)
    with monkeypatch.context() as full:
        found(disk, full)
        file = tmp_path / "out" / STOP_FILE
        with (
            pytest.warns(UserWarning, match="no checkpoint after step 2"),
            pytest.raises(
                DiskFull, match=r"stopped by the file .*stop after step 2, which is not saved: "
            ) as caught,
            StopOnSignal(file, clock=count().__next__) as stop,
        ):

            def why() -> str | None:
                if disk.now == 3:
                    file.touch()
                return stop.why()

            run_fit(config, ROWS, callbacks=[disk], stop=why)
    assert caught.value.exit_code == 6 and disk.now == 3
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "checkpoint-1",
        "metrics.jsonl",
    ]
    check_manifest(tmp_path / "out" / "checkpoint-1")
    _, adapter = run_fit(config, ROWS, resume=True)
    assert same(adapter, straight[1]) and logged(config) == logged(straight[0])


@pytest.mark.slow
def test_a_run_does_not_begin_without_room_for_two_checkpoints(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_fit(settings(llama, tmp_path / "out", save_steps=1, max_steps=1), ROWS)
    adapter = load_file(tmp_path / "out" / "checkpoint-1" / "adapter_model.safetensors")
    two = 2 * 3 * sum(tensor.nbytes for tensor in adapter.values())  # each with two moments
    monkeypatch.setattr(freespace, "free_bytes", lambda _: two + two // 64 + freespace.MARGIN - 1)
    config = settings(llama, tmp_path / "other", save_steps=1, max_steps=1)
    with pytest.raises(DiskFull, match="too full for 2 checkpoints"):
        run_fit(config, ROWS)
    assert not (tmp_path / "other").exists()
    run_fit(config.model_copy(update={"save_steps": 0}), ROWS)  # which writes none
    again = settings(llama, tmp_path / "out", save_steps=1, max_steps=2)
    run_fit(again, ROWS, resume=True)  # one is there already


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_line_of_metrics_is_not_worth_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        closing(MetricsLog(tmp_path / "m.jsonl")) as metrics,
        Path("/dev/full").open("ab+", buffering=0) as full,
    ):
        metrics._file.close()
        monkeypatch.setattr(metrics, "_file", full)
        with pytest.warns(
            UserWarning, match="No space left on device.*this line of step 7 is lost"
        ):
            metrics.note({"step": 7, "loss": 1.0})
        with pytest.raises(DiskFull):
            metrics.write({"step": 7})


@pytest.mark.slow
def test_a_second_run_in_the_same_directory_is_refused(llama: Path, tmp_path: Path) -> None:
    hold = (
        "import sys; from pathlib import Path; from lema.storage.locks import run_lock\n"
        "with run_lock(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    config = settings(llama, tmp_path / "out", save_steps=1, max_steps=1)
    with subprocess.Popen(
        [sys.executable, "-c", hold, config.output_dir],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(
            ConfigError, match=f"another run writes to this directory: process {other.pid}"
        ):
            run_fit(config, ROWS)
        assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]
        with opened(config) as model, pytest.raises(ConfigError, match=f"process {other.pid}"):
            model.get_trainer().train_step(batch(1))  # which saves
        assert not list((tmp_path / "out").glob("checkpoint-*"))
        other.kill()
    run_fit(config, ROWS)
    assert (tmp_path / "out" / "checkpoint-1").is_dir() and not list((tmp_path / "out").glob(".*"))
