"""What a killed run leaves is swept by the next one to the same place, and nothing else is."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lema.storage import atomic as partial
from lema.storage.atomic import open_partial
from lema.storage.tensorfile import tensor_file

KILLED = """
import os, pathlib, signal, sys
from lema.storage.tensorfile import tensor_file
with tensor_file(pathlib.Path(sys.argv[1]), [("t", "U8", (1 << 25,))]) as out:
    for place in out.space("t"):
        place[:] = bytes(len(place))
        os.kill(os.getpid(), getattr(signal, sys.argv[2]))
"""


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.mark.parametrize("death", ["SIGKILL", "SIGTERM"])
def test_a_killed_run_leaves_no_half_file_and_the_next_run_sweeps_its_remains(
    tmp_path: Path, death: str
) -> None:
    file = tmp_path / "model.safetensors"
    done = subprocess.run([sys.executable, "-c", KILLED, file, death], check=False)
    assert done.returncode == -getattr(signal, death)
    assert len(names(tmp_path)) == 1 and not file.exists()
    with tensor_file(file, [("t", "U8", (1,))]) as out:
        out.write("t", [b"x"])
    assert names(tmp_path) == {"model.safetensors"}


def test_a_run_under_way_keeps_its_file(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    first, theirs = open_partial(file)
    second, ours = open_partial(file)
    assert names(tmp_path) == {theirs.name, ours.name}
    os.close(first)
    os.close(second)
    third, last = open_partial(file)
    assert names(tmp_path) == {last.name}
    os.close(third)


def test_what_is_not_of_this_place_is_not_touched(tmp_path: Path) -> None:
    others = [
        ".model.safetensors.partial",
        ".model.safetensors.0123456.partial",
        ".other.0123abcd.partial",
    ]
    for name in others:
        (tmp_path / name).write_text("mine")
    (tmp_path / ".model.safetensors.00000000.partial").mkdir()
    (tmp_path / ".model.safetensors.00000001.partial").symlink_to(tmp_path / others[0])
    descriptor, ours = open_partial(tmp_path / "model.safetensors")
    os.close(descriptor)
    assert len(names(tmp_path)) == len(others) + 3 and ours.exists()


def test_a_name_with_special_characters_is_no_pattern(tmp_path: Path) -> None:
    (tmp_path / ".aXb.0123abcd.partial").write_text("mine")
    (tmp_path / ".a.b.0123abcd.partial").write_text("left")
    descriptor, ours = open_partial(tmp_path / "a.b")
    os.close(descriptor)
    assert names(tmp_path) == {".aXb.0123abcd.partial", ours.name}


def test_a_file_swept_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = partial.lock
    swept = list[Path]()

    def sweep_first(descriptor: int, **how: bool) -> bool | None:
        if not swept:
            swept.extend(tmp_path.iterdir())
            swept[0].unlink()
        return real(descriptor, **how)

    monkeypatch.setattr(partial, "lock", sweep_first)
    descriptor, ours = open_partial(tmp_path / "file")
    os.close(descriptor)
    assert ours.exists() and ours not in swept


def test_where_nothing_can_be_locked_nothing_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".file.0123abcd.partial").write_text("perhaps another's")

    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(38, os.strerror(38))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    descriptor, ours = open_partial(tmp_path / "file")
    os.close(descriptor)
    assert names(tmp_path) == {".file.0123abcd.partial", ours.name}
