"""What Linux has calls for is done where there are none: bytes at an offset, limits, locks,
peaks.
"""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from lema.backend.host import filelocks, files, limits
from lema.backend.host.clibrary import c_function

CALLS = ("preadv", "pwrite", "posix_fadvise")


@pytest.fixture(params=["as it is", "without the calls"])
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "without the calls":
        for name in CALLS:
            monkeypatch.delattr(os, name, raising=False)


def test_threads_write_and_read_at_offsets_of_one_file(tmp_path: Path, calls: None) -> None:
    size = 4096
    count = 64
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    wrong = list[int]()

    def work(first: int) -> None:
        for number in range(first, count, 4):
            content = memoryview(bytes([number]) * size)
            assert files.write_from(descriptor, content, number * size) == size
            into = bytearray(size)
            assert files.read_into(descriptor, [memoryview(into)], number * size) == size
            if into != content:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    files.drop_cached(descriptor)
    os.close(descriptor)
    assert not wrong
    assert (tmp_path / "file").read_bytes() == b"".join(
        bytes([number]) * size for number in range(count)
    )


def test_a_file_that_ends_gives_what_there_is(tmp_path: Path, calls: None) -> None:
    (tmp_path / "file").write_bytes(b"abcdef")
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    into = bytearray(8)
    assert files.read_into(descriptor, [memoryview(into)], 4) == 2 and into[:2] == b"ef"
    assert files.read_into(descriptor, [memoryview(into)], 6) == 0
    os.close(descriptor)


def test_a_directory_that_cannot_be_opened_is_neither_opened_nor_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = list[int]()
    monkeypatch.setattr(os, "fsync", synced.append)
    files.flush(tmp_path)
    assert len(synced) == 1
    monkeypatch.delattr(os, "O_DIRECTORY")
    assert files.open_directory(tmp_path) is None
    files.flush(tmp_path)
    assert len(synced) == 1


def a_console(taken: list[int]) -> ModuleType:
    """Return a `msvcrt` whose locks are of one byte; `taken` are the places that another process
    has.
    """
    module = ModuleType("msvcrt")

    def locking(descriptor: int, mode: int, nbytes: int) -> None:
        if (place := os.lseek(descriptor, 0, os.SEEK_CUR)) in taken:
            raise PermissionError(13, "Permission denied")
        taken.append(place)

    module.LK_NBLCK = 2
    module.locking = locking
    return module


def test_where_bytes_are_locked_it_is_one_that_no_file_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = list[int]()
    monkeypatch.setattr(filelocks, "fcntl", None)
    monkeypatch.setattr(filelocks, "msvcrt", a_console(taken))
    with (tmp_path / "file").open("w+b", buffering=0) as file:
        file.write(b"abc")
        assert filelocks.lock(file.fileno()) is True and taken == [filelocks.BEYOND]
        assert filelocks.lock(file.fileno(), wait=False) is False
        assert filelocks.lock(file.fileno(), shared=True, wait=False) is True
        assert file.tell() == 3, "the file's own place is as it was"


def test_where_nothing_can_be_locked_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filelocks, "fcntl", None)
    with (tmp_path / "file").open("wb") as file:
        assert filelocks.lock(file.fileno()) is None


def test_a_system_without_limits_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    resident = psutil.Process().memory_info().rss
    assert limits.peak_memory() >= resident // 2
    assert limits.limit("NOFILE")[0] is not None or limits.limit("NOFILE") == (None, None)
    assert limits.limit("NO_SUCH") == (None, None)
    monkeypatch.setattr(limits, "resource", None)
    assert limits.limit("NOFILE") == (None, None)
    assert limits.peak_memory() >= resident // 2
    with limits.bounded_memory():
        assert len(bytearray(1 << 20)) == 1 << 20


def test_the_peak_is_told_in_bytes_by_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    here = limits.peak_memory()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert here // 1100 <= limits.peak_memory() <= here // 1000


def test_a_function_that_the_library_lacks_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert c_function("no_such_function") is None
    assert c_function("strlen") is not None


SECOND_SIGNAL = """
import os, signal, threading
from lema.train import stop
stop.c_function = lambda name: None
stop.SAME_SIGNAL = 0.05
with stop.StopOnSignal() as stopping:
    os.kill(os.getpid(), signal.SIGTERM)
    while not stopping._must_exit:
        pass
    print(stopping.why(), flush=True)
    lock = threading.Lock()
    lock.acquire()
    os.kill(os.getpid(), signal.SIGTERM)
    lock.acquire()
"""


def test_a_second_signal_ends_a_run_where_the_c_library_cannot_be_asked() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SECOND_SIGNAL], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "SIGTERM\n"), done.stderr
