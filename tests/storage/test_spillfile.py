"""The file without a name: what is read is what was written, nothing is left of it, and no
failure is hidden.
"""

import errno
import fcntl
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lema.activations.boundaries import NUM_BUFFERS
from lema.activations.stepstore import BoundaryArena
from lema.errors import DiskError, ReadError
from lema.storage.directio import BLOCK
from lema.storage.spillfile import OffloadFile, whole_blocks
from lema_cpu import CpuBackend


def memory(fill: int, blocks: int = 3) -> memoryview:
    pages = memoryview(mmap.mmap(-1, blocks * BLOCK))
    pages[:] = bytes([fill]) * len(pages)
    return pages


def offload(directory: Path) -> OffloadFile:
    return OffloadFile(directory, "boundary activations", "free some space")


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the file system be one that has no transfers past the page cache."""
    real = fcntl.fcntl

    def refusing(descriptor: int, command: int, *arguments: int) -> int:
        if command == fcntl.F_SETFL and arguments[0] & os.O_DIRECT:
            raise OSError(errno.EINVAL, "refused")
        return real(descriptor, command, *arguments)

    monkeypatch.setattr(fcntl, "fcntl", refusing)


def refuse_nameless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the file system be one whose files have a name at first."""
    real = os.open

    def refusing(path: Any, flags: int, *mode: int, **how: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "refused")
        return real(path, flags, *mode, **how)

    monkeypatch.setattr(os, "open", refusing)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("direct", [False, True])
def test_what_is_read_is_what_was_written_and_no_name_is_ever_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool, direct: bool
) -> None:
    if named:
        refuse_nameless(monkeypatch)
    if not direct:
        refuse_direct(monkeypatch)
    file = offload(tmp_path / "new" / "place")
    assert not list((tmp_path / "new" / "place").iterdir())
    file.reserve(40 * BLOCK)
    for place in range(10):
        file.write(memory(place), 3 * BLOCK * place).result()
    assert not list((tmp_path / "new" / "place").iterdir())
    for place in reversed(range(10)):
        found = memory(255)
        file.read(found, 3 * BLOCK * place, lambda: None).result()
        assert found == memory(place)
    file.close()
    assert not list((tmp_path / "new" / "place").iterdir())


@pytest.mark.parametrize("refused", [False, True])
def test_what_must_go_through_the_page_cache_does_not_stay_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    calls: list[tuple[object, ...]] = []
    real = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: calls.append(("fsync",)) or real(descriptor)
    )
    monkeypatch.setattr(os, "posix_fadvise", lambda _, *advice: calls.append(advice), raising=False)
    if refused:
        refuse_direct(monkeypatch)
    else:  # the flag is taken, but transfers are refused
        write = os.pwrite
        refusals = iter([OSError(errno.EINVAL, "refused")])

        def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
            for refusal in refusals:
                raise refusal
            return write(descriptor, data, offset)

        monkeypatch.setattr(os, "pwrite", pwrite)
    file = offload(tmp_path)
    file.write(memory(1), 5 * BLOCK).result()
    assert calls == [("fsync",), (5 * BLOCK, 3 * BLOCK, os.POSIX_FADV_DONTNEED)]
    found = memory(0)
    file.read(found, 5 * BLOCK, lambda: None).result()
    assert found == memory(1)
    assert calls[2:] == [(5 * BLOCK, 3 * BLOCK, os.POSIX_FADV_DONTNEED)]
    file.close()


def test_the_space_is_asked_for_before_anything_is_written(tmp_path: Path) -> None:
    file = offload(tmp_path)
    with pytest.raises(DiskError, match="bytes are needed for boundary activations, and") as caught:
        file.reserve(1 << 60)
    assert caught.value.where == str(tmp_path)
    assert caught.value.how == "free some space"
    file.close()


def test_an_arena_on_a_disk_that_is_too_small_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs

    def nearly_full(place: str) -> os.statvfs_result:
        found = list(real(place))
        found[4] = 1  # f_bavail
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", nearly_full)
    arena = BoundaryArena(CpuBackend(), "disk", tmp_path)
    with pytest.raises(DiskError) as caught:
        arena.step([torch.zeros(1, 1024, 8)], range(12))
    assert "393,216 bytes are needed for boundary activations" in caught.value.what
    assert "offload_dir" in caught.value.how
    arena.close()


def test_a_place_where_no_file_can_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(
        DiskError, match="no file can be made for boundary activations: File exists"
    ) as caught:
        offload(tmp_path / "file")
    assert caught.value.where == str(tmp_path / "file")


def failing(number: int, real: Callable[..., int]) -> Callable[..., int]:
    """Fail from the call of this number on."""
    left = [number]

    def fail(*arguments: object) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments)

    return fail


# the last three are still in memory when they are wanted
@pytest.mark.parametrize("number", [0, 1, 7, 16])
def test_a_write_that_fails_is_raised_in_the_training_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "pwrite", failing(number, os.pwrite))
    arena = BoundaryArena(CpuBackend(poison=True), "disk", tmp_path)
    state = torch.randn(1, 8, 4)
    step = arena.step([state], range(20))
    done = []
    with pytest.raises(
        DiskError, match="writing failed for boundary activations: No space left"
    ) as caught:
        for layer in range(20):
            step.keep(layer, 0, state)
            done.append(layer)
        for layer in reversed(range(20)):
            with step.fetch(layer, 0):
                done.append(layer)
    assert caught.value.where == str(tmp_path)
    assert number - 1 <= len(done) <= number + NUM_BUFFERS
    monkeypatch.undo()
    step = arena.step([state], range(20))  # the next step is not the worse for it
    for layer in range(20):
        step.keep(layer, 0, state + layer)
    for layer in reversed(range(20)):
        with step.fetch(layer, 0) as kept:
            assert torch.equal(kept, state + layer)
    arena.close()


@pytest.mark.parametrize("number", [0, 4])
def test_a_read_that_fails_is_raised_in_the_training_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "preadv", failing(number, os.preadv))
    arena = BoundaryArena(CpuBackend(poison=True), "disk", tmp_path)
    state = torch.randn(1, 8, 4)
    step = arena.step([state], range(9))
    # at the turn already, if seen
    with pytest.raises(ReadError, match="reading failed for boundary activations"):
        for layer in range(9):
            step.keep(layer, 0, state)
        for layer in reversed(range(9)):
            with step.fetch(layer, 0):
                pass
    arena.close()


def test_a_file_that_is_dropped_gives_its_space_back(tmp_path: Path) -> None:
    file = offload(tmp_path)
    file.write(memory(1), 0).result()
    descriptor = file._descriptor
    assert os.fstat(descriptor).st_size == 3 * BLOCK
    file._pool.shutdown()
    del file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_killed_process_leaves_nothing_behind(tmp_path: Path) -> None:
    code = (
        "import os, mmap, signal, sys\nfrom pathlib import Path\nfrom "
        "lema.storage.spillfile import OffloadFile\n"
        "file = OffloadFile(Path(sys.argv[1]), 'x', 'y')\n"
        "file.write(memoryview(mmap.mmap(-1, 4096)), 0).result()\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not list(tmp_path.iterdir())


def test_blocks_are_counted_whole() -> None:
    assert [whole_blocks(n) for n in (0, 1, BLOCK, BLOCK + 1)] == [0, BLOCK, BLOCK, 2 * BLOCK]
