"""What the doctor does to a disk: it writes, reads with LEMA's own reader, and leaves nothing
behind.
"""

import errno
import os
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest

from lema.backend import Finding, Level
from lema.cli.app import app
from lema.cli.exitcodes import run
from lema.stream.reader import LayerReader
from lema_tools.doctor import device as doctor_disk
from lema_tools.doctor.device import disk, disk_speeds

MB = 1 << 20


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_disk, "LARGEST", 3 * MB)
    monkeypatch.setattr(doctor_disk, "RUN", MB)
    monkeypatch.setattr(doctor_disk, "CHUNK", MB)


def found(directory: Path, **settings: Any) -> dict[str, Finding]:
    return {finding.name: finding for finding in disk(directory, **settings)}


def ticking(seconds: float) -> Callable[[], float]:
    ticks = count()
    return lambda: next(ticks) * seconds


def test_speeds_are_the_bytes_by_the_clock(tmp_path: Path) -> None:
    # Looked at when writing begins, before the second and third chunk, at its end, and at both ends
    # of reading.
    assert disk_speeds(tmp_path, 3 * MB, ticking(0.5)) == (3 * MB, 3 * MB / 1.5, 3 * MB / 0.5)


def test_writing_ends_after_some_seconds(tmp_path: Path) -> None:
    assert disk_speeds(tmp_path, 3 * MB, ticking(10.0))[0] == MB


def test_what_is_read_is_on_the_disk_and_not_in_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    sync = os.fsync
    advise = os.posix_fadvise
    submit = LayerReader.submit
    monkeypatch.setattr(os, "fsync", lambda number: (order.append("sync"), sync(number)))

    def dropped(number: int, offset: int, length: int, advice: int) -> None:
        assert (offset, length, advice) == (0, 0, os.POSIX_FADV_DONTNEED)
        order.append("drop")
        advise(number, offset, length, advice)

    def read(reader: LayerReader, *arguments: Any) -> Any:
        order.append("read")
        return submit(reader, *arguments)

    monkeypatch.setattr(os, "posix_fadvise", dropped)
    monkeypatch.setattr(LayerReader, "submit", read)
    disk_speeds(tmp_path, 3 * MB)
    assert order == ["sync", "drop", "read", "read", "read"]


def test_no_block_is_written_twice(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b") as file:
        assert doctor_disk._write(file.fileno(), 3 * MB, lambda: True) == 3 * MB
        data = (tmp_path / "file").read_bytes()
    assert len(data) == 3 * MB
    assert (
        len({data[start : start + 4096] for start in range(0, len(data), 4096)}) == 3 * MB // 4096
    )


@pytest.mark.parametrize("nameless", [True, False])
@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError])
def test_nothing_is_left_when_reading_is_interrupted(
    failure: type[BaseException], nameless: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: list[int] = []

    def interrupted(*_: Any) -> None:
        there.append(len(list(tmp_path.iterdir())))
        raise failure

    monkeypatch.setattr(LayerReader, "submit", interrupted)
    if not nameless:
        monkeypatch.setattr(doctor_disk, "DESCRIPTORS", tmp_path / "none")
    with pytest.raises(failure):
        disk_speeds(tmp_path, 3 * MB)
    # without a name there is nothing that a kill could leave
    assert there == [0 if nameless else 1]
    assert not list(tmp_path.iterdir())


def test_ctrl_c_ends_the_command_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LayerReader, "submit", interrupted)
    assert run(app, ["doctor", "--directory", str(tmp_path)]) == 130
    assert not list(tmp_path.iterdir())
    assert "Traceback" not in "".join(capsys.readouterr())


def test_of_this_disk_everything_is_told(tmp_path: Path) -> None:
    told = found(tmp_path)
    assert list(told) == ["space", "direct", "read", "hub cache"]
    assert told["read"].facts["file_bytes"] == 3 * MB
    assert told["space"].facts["free_bytes"] > 0  # type: ignore[operator]
    assert not list(tmp_path.iterdir())


def test_nothing_is_timed_unless_it_is_asked_for(tmp_path: Path) -> None:
    assert list(found(tmp_path, measure=False)) == ["space", "direct", "hub cache"]


def test_a_file_system_without_direct_reads_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refuse(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)
    told = found(tmp_path, measure=False)["direct"]
    assert (told.level, told.facts["works"]) == (Level.NOTE, False)


def test_a_file_system_that_refuses_a_direct_read_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "preadv", refuse)
    assert found(tmp_path, measure=False)["direct"].facts["works"] is False


def test_a_directory_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: Any) -> tuple[int, str]:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    told = found(tmp_path)
    assert list(told) == ["space", "write", "hub cache"]
    assert told["write"].level is Level.WARNING
    assert "Read-only file system" in told["write"].what


@pytest.mark.parametrize(
    ("free", "level", "written"), [(8 * MB, Level.OK, MB), (4096, Level.WARNING, None)]
)
def test_a_part_of_the_free_space_is_written_and_no_more(
    free: int, level: Level, written: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type(psutil.disk_usage("/"))(100 * MB, 100 * MB - free, free, 99.0)
    monkeypatch.setattr(psutil, "disk_usage", lambda _: usage)
    told = found(tmp_path)
    assert told["space"].level is Level.WARNING  # less than a gigabyte is free
    assert (told["read"].level, told["read"].facts.get("file_bytes")) == (level, written)


@pytest.mark.parametrize(
    ("kind", "level"),
    [("nfs4", Level.NOTE), ("tmpfs", Level.NOTE), ("xfs", Level.OK), ("", Level.OK)],
)
def test_what_is_no_disk_of_this_machine_is_noted(
    kind: str, level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = [
        type("Mount", (), {"mountpoint": point, "fstype": name})()
        for point, name in [
            ("/", "ext4"),
            (str(tmp_path), "ext4"),
            (str(tmp_path), kind),
            ("/elsewhere", "xfs"),
        ]
    ]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    told = found(tmp_path, measure=False)["space"]
    assert (told.level, told.facts["file_system"]) == (level, kind)


def test_the_hubs_cache_is_told_before_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "to" / "be" / "made")
    )
    told = found(tmp_path, measure=False)["hub cache"]
    assert told.facts["directory"] == str(tmp_path / "to" / "be" / "made")
    assert (told.facts["exists"], told.facts["writable"]) == (False, True)
    monkeypatch.setattr(os, "access", lambda *_: False)
    told = found(tmp_path, measure=False)["hub cache"]
    assert (told.level, told.facts["writable"]) == (Level.WARNING, False)
