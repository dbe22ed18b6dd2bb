"""The seam through which `tests/faults` sees what a save does on the disk, and fills it."""

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from faults.diskseam import DiskSeam, bytes_below

TENSORS = {"one": torch.arange(64.0), "two": torch.ones(3, dtype=torch.int64)}


@pytest.fixture
def told() -> list[tuple[str, str, float]]:
    return []


@pytest.fixture
def seam(
    tmp_path: Path, told: list[tuple[str, str, float]], monkeypatch: pytest.MonkeyPatch
) -> DiskSeam:
    made = DiskSeam(tmp_path, lambda kind, path, done: told.append((kind, path.name, done)))
    made.install(monkeypatch.setattr)
    return made


def test_every_change_is_told_of_before_and_after(
    seam: DiskSeam, told: list[tuple[str, str, float]], tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("four")
    (tmp_path / "folder").rename(tmp_path / "moved")
    assert (tmp_path / "moved" / "file").read_text() == "four"
    shutil.rmtree(tmp_path / "moved")
    whole = [("mkdir", "folder"), ("open", "file"), ("write", "file"), ("rename", "moved")]
    assert [(kind, name) for kind, name, done in told if done == 1] == [
        *whole,
        ("unlink", "file"),
        ("rmdir", "moved"),
    ]
    assert [done for kind, _, done in told if kind == "write"] == [0, 0.5, 1]
    assert all(told[place + 1][2] for place, one in enumerate(told) if one[2] == 0)


def test_what_lies_elsewhere_is_not_looked_at(
    seam: DiskSeam, told: list[tuple[str, str, float]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    (tmp_path_factory.mktemp("elsewhere") / "file").write_text("four")
    assert told == []


def test_bytes_are_unflushed_until_they_are_flushed_also_under_another_name(
    seam: DiskSeam, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("one", "two"):
        with (tmp_path / "folder" / name).open("w") as file:
            file.write("text")
            file.flush()
            if name == "one":
                os.fsync(file.fileno())
    (tmp_path / "folder").rename(tmp_path / "moved")
    assert seam.unflushed == {tmp_path / "moved" / "two"}
    (tmp_path / "moved" / "two").unlink()
    assert not seam.unflushed


@pytest.mark.parametrize("room", [0, 1, 700, 2000])
def test_a_full_disk_takes_what_fits(seam: DiskSeam, room: int, tmp_path: Path) -> None:
    (tmp_path / "before").write_bytes(bytes(100))
    seam.limit = 100 + room
    with pytest.raises(OSError) as caught, (tmp_path / "file").open("wb", buffering=0) as file:
        data = bytes(3000)
        while data:
            data = data[file.write(data) :]
    assert caught.value.errno == errno.ENOSPC
    assert bytes_below(tmp_path) == 100 + room
    (tmp_path / "before").unlink()
    assert seam.room() == 100


def test_tensors_are_written_in_the_steps_of_their_library(
    seam: DiskSeam, told: list[tuple[str, str, float]], tmp_path: Path
) -> None:
    save_file(TENSORS, tmp_path / "a.safetensors")
    kinds = [kind for kind, _, done in told if done == 1]
    assert kinds == ["open", "write", "rename"] and told[-1][1] == "a.safetensors"
    found = load_file(tmp_path / "a.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    assert seam.unflushed == {tmp_path / "a.safetensors"}


def test_tensors_that_do_not_fit_leave_nothing(seam: DiskSeam, tmp_path: Path) -> None:
    seam.limit = 150
    with pytest.raises(SafetensorError, match="No space left on device"):
        save_file(TENSORS, tmp_path / "a.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("says_so", [True, False])
def test_a_disk_may_say_how_much_is_left(
    says_so: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    DiskSeam(tmp_path, limit=1 << 20, says_so=says_so).install(monkeypatch.setattr)
    found = os.statvfs(tmp_path)
    assert (found.f_bavail * found.f_frsize == 1 << 20) is says_so
