"""Room is looked for before anything is written; what fails for want of it says so, whoever it
comes from.
"""

import errno
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from lema.errors import DiskError, DiskFull
from lema.storage.diskspace import (
    MARGIN,
    check_free_bytes,
    free_bytes,
    is_full,
    is_too_large,
    not_written,
)


def disk_of(monkeypatch: pytest.MonkeyPatch, free: int, blocks: int = 100) -> list[Path]:
    """Let every disk have so many bytes free for a user, and more for the system; return where
    it was asked.
    """
    asked: list[Path] = []

    def statvfs(place: Path) -> SimpleNamespace:
        if not Path(place).exists():
            raise FileNotFoundError(errno.ENOENT, "nothing there", str(place))
        asked.append(Path(place))
        return SimpleNamespace(f_bavail=free, f_bfree=free + 10**12, f_frsize=1, f_blocks=blocks)

    monkeypatch.setattr(os, "statvfs", statvfs)
    return asked


def test_what_a_user_may_still_write_is_asked_of_the_disk_that_will_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = os.statvfs(tmp_path)
    assert abs(free_bytes(tmp_path / "not" / "yet") - found.f_bavail * found.f_frsize) < 1 << 30  # type: ignore[operator]
    asked = disk_of(monkeypatch, 7)
    assert free_bytes(tmp_path / "not" / "yet") == 7 and asked == [tmp_path]


def test_a_full_disk_is_found_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_of(monkeypatch, 64_000_000 + 1_000_000 + MARGIN - 1)
    with pytest.raises(
        DiskFull,
        match=r"too full for two checkpoints: 66,048,576 bytes are needed, and 66,048,575 are",
    ) as caught:
        check_free_bytes(tmp_path / "out", 64_000_000, "two checkpoints")
    assert caught.value.where == str(tmp_path / "out") and caught.value.exit_code == 6
    disk_of(monkeypatch, 64_000_000 + 1_000_000 + MARGIN)
    check_free_bytes(tmp_path / "out", 64_000_000, "two checkpoints")


def test_a_file_system_that_does_not_say_is_taken_to_have_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_of(monkeypatch, 0, blocks=0)
    assert free_bytes(tmp_path) is None
    check_free_bytes(tmp_path, 1 << 60, "it")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_want_of_room_is_told_from_other_failures(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught, Path("/dev/full").open("wb", buffering=0) as file:
        file.write(b"1")
    assert is_full(caught.value) and is_full(OSError(errno.EDQUOT, "quota"))
    assert not is_full(OSError(errno.EIO, "input/output")) and not is_full(ValueError("os error"))
    wrapped = DiskError("the adapter could not be written")
    wrapped.__cause__ = caught.value
    assert type(not_written("the checkpoint could not be written", wrapped, tmp_path)) is DiskFull
    assert type(not_written("it", OSError(errno.EROFS, "read-only"), tmp_path)) is DiskError


def test_safetensors_says_it_in_words(tmp_path: Path) -> None:
    """The words are the library's own: of a file in a directory that is not there it names the
    number likewise.
    """
    with pytest.raises(SafetensorError, match=r"\(os error 2\)") as caught:
        save_file({"one": torch.zeros(1)}, tmp_path / "nowhere" / "file")
    assert not is_full(caught.value)
    assert is_full(
        SafetensorError(str(caught.value).replace("(os error 2)", f"(os error {errno.ENOSPC})"))
    )


def test_a_limit_on_the_size_of_files_is_told_from_a_full_disk(tmp_path: Path) -> None:
    """safetensors meets the limit in a shell that has one, as `ulimit -f` sets it."""
    code = (
        "import resource, signal, sys, torch\n"
        "from safetensors.torch import save_file\n"
        "from lema.cli.exitcodes import run\n"
        "import typer\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "commands = typer.Typer()\n"
        "@commands.command()\n"
        "def save() -> None:\n"
        "    save_file({'one': torch.zeros(4096)}, sys.argv[1])\n"
        "sys.exit(run(commands, []))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "file")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == DiskError.exit_code, ended.stderr
    assert "ulimit -f" in ended.stderr and "does not know this error" not in ended.stderr
    too_large = OSError(errno.EFBIG, "File too large")
    assert is_too_large(too_large) and not is_full(too_large)
    assert "ulimit -f" in not_written("it could not be written", too_large, tmp_path).how
