"""One run writes to an output directory at a time; a lock goes with the process that held it."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lema.errors import ConfigError, DiskError
from lema.storage.locks import LOCK, run_lock

HOLD = (
    "import sys; from pathlib import Path; from lema.storage.locks import run_lock\n"
    "with run_lock(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
)


@contextmanager
def held(directory: Path) -> Iterator["subprocess.Popen[str]"]:
    """Have another process hold the lock of a directory."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        try:
            yield other
        finally:
            other.kill()


def test_a_second_run_is_refused_and_told_which_process_is_there(tmp_path: Path) -> None:
    with held(tmp_path / "out") as other:
        with pytest.raises(
            ConfigError, match=f"another run writes to this directory: process {other.pid} on "
        ) as caught:
            run_lock(tmp_path / "out").__enter__()
        assert (caught.value.where, caught.value.exit_code) == (str(tmp_path / "out"), 2)
        with run_lock(tmp_path / "elsewhere") as alone:
            assert alone


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_lock_of_a_dead_process_is_no_lock(end: signal.Signals, tmp_path: Path) -> None:
    with held(tmp_path) as other:
        other.send_signal(end)
        other.wait()
        assert (tmp_path / LOCK).is_file(), "the file is left; it locks nothing"
        with run_lock(tmp_path) as alone:
            assert alone


def test_a_run_that_ends_well_leaves_no_lock_and_the_next_one_may_begin(tmp_path: Path) -> None:
    with held(tmp_path) as other:
        other.communicate("")
    assert list(tmp_path.iterdir()) == []
    for _ in range(2):
        with run_lock(tmp_path):
            assert (tmp_path / LOCK).read_text().split()[0] == str(os.getpid())
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_was_taken_away_with_its_file_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the opening of a file and its locking the run before may end, and take the file
    with it.
    """
    flock = fcntl.flock
    files = []

    def late(descriptor: int, how: int) -> None:
        if not files:
            (tmp_path / LOCK).unlink()
        files.append(descriptor)
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with run_lock(tmp_path):
        assert len(files) == 2
        with pytest.raises(ConfigError):
            run_lock(tmp_path).__enter__()


def test_an_error_in_the_run_gives_the_lock_back(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), run_lock(tmp_path / "out"):
        raise KeyboardInterrupt
    assert not (tmp_path / "out").exists(), "a run that wrote nothing leaves nothing"
    with run_lock(tmp_path / "out"):
        (tmp_path / "out" / "metrics.jsonl").touch()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["metrics.jsonl"]


def test_a_file_system_without_locks_is_said_and_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.warns(UserWarning, match="this file system has no locks to keep a second run out"):
        lock = run_lock(tmp_path)
        assert lock.__enter__() is False
    lock.__exit__(None, None, None)
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_is_another_file_too_is_not_written(tmp_path: Path) -> None:
    (mine := tmp_path / "mine").write_text("words")
    (tmp_path / "out").mkdir()
    os.link(mine, tmp_path / "out" / LOCK)
    with pytest.raises(ConfigError, match="is another file, too"):
        run_lock(tmp_path / "out").__enter__()
    assert mine.read_text() == "words"
    (tmp_path / "out" / LOCK).unlink()
    with run_lock(tmp_path / "out"):
        pass


def test_a_place_that_cannot_be_written_to_is_a_disk_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match="cannot be written to") as caught:
        run_lock(tmp_path / "file" / "out").__enter__()
    assert caught.value.exit_code == 6
