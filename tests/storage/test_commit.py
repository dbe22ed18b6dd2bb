"""A directory is there whole or not at all: after a kill at any moment, on a bad disk, beside
another process.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lema.errors import DiskError
from lema.storage import atomic as module
from lema.storage.atomic import appearing, commit, discard, sweep
from lema.storage.manifest import MANIFEST, check_manifest, write_manifest

# A process that kills itself before its n-th change to the disk; without one it prints how many it
# has made.
KILLED = """
import os, signal, sys
from pathlib import Path
from lema.storage.atomic import commit, discard
directory, last, what = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
count, busy = 0, False
def seen(event, arguments):
    global count
    changes = event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir") or (
        event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR))
    if changes:
        count += 1
        if count == last:
            os.kill(os.getpid(), signal.SIGKILL)
def fill(part):
    for name in ("a", "b"):
        (part / name).write_text("new")
sys.addaudithook(seen)
discard(directory) if what == "discard" else commit(directory, fill)
print(count)
"""


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", *arguments], capture_output=True, text=True, timeout=60
    )


def filled(word: str, *names: str) -> Callable[[Path], None]:
    def fill(part: Path) -> None:
        for name in names or ("a", "b"):
            (part / name).write_text(word)

    return fill


def words(directory: Path) -> set[str]:
    check_manifest(directory)
    return {path.read_text() for path in directory.iterdir() if path.name != MANIFEST}


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_it_is_whole_with_a_manifest_and_nothing_beside_it(tmp_path: Path) -> None:
    commit(tmp_path / "new" / "out" / "checkpoint-1", filled("one"))
    assert names(tmp_path / "new" / "out") == ["checkpoint-1"]
    assert names(tmp_path / "new" / "out" / "checkpoint-1") == ["a", "b", MANIFEST]
    assert words(tmp_path / "new" / "out" / "checkpoint-1") == {"one"}


@pytest.mark.parametrize(
    ("mask", "file", "folder"),
    [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700), (0o002, 0o664, 0o775)],
)
def test_files_have_the_permissions_that_the_umask_gives_any_other(
    mask: int, file: int, folder: int, tmp_path: Path
) -> None:
    def fill(part: Path) -> None:
        (part / "private").touch(mode=0o600)  # as safetensors writes its own
        (part / "below").mkdir()
        (part / "below" / "private").touch(mode=0o600)

    before = os.umask(mask)
    try:
        commit(tmp_path / "one", fill)
    finally:
        os.umask(before)
    found = {
        path.name: path.stat().st_mode & 0o777
        for path in (tmp_path / "one").rglob("*")
        if path.is_file()
    }
    assert found == {"private": file, MANIFEST: file}
    assert (
        (tmp_path / "one").stat().st_mode & 0o777,
        (tmp_path / "one/below").stat().st_mode & 0o777,
    ) == (folder,) * 2
    assert (tmp_path / "one/below/private").stat().st_mode & 0o777 == file


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc which file a descriptor is of")
def test_every_file_and_directory_is_flushed_before_the_name_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync = os.fsync
    rename = os.rename

    def flushed(descriptor: int) -> None:
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def renamed(old: Path, new: Path) -> None:
        events.append(f"-> {Path(new).name}")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "rename", renamed)

    def fill(part: Path) -> None:
        filled("new")(part)
        (part / "below").mkdir()
        filled("new", "c")(part / "below")

    commit(tmp_path / "one", fill)
    named = events.index("-> one")
    before = [name.rpartition(".")[2] for name in events[:named]]
    assert {"a", "b", "below", "c", "json", "part"} <= set(before) and before[-2:] == [
        "json",
        "part",
    ]
    assert events[named + 1 :] == [tmp_path.name]


@pytest.mark.parametrize("replaces", [False, True])
def test_what_fails_leaves_what_was_there_and_nothing_else(replaces: bool, tmp_path: Path) -> None:
    if replaces:
        commit(tmp_path / "one", filled("old"))

    def fail(part: Path) -> None:
        filled("new")(part)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        commit(tmp_path / "one", fail)
    assert names(tmp_path) == (["one"] if replaces else [])
    if replaces:
        assert words(tmp_path / "one") == {"old"}


def test_what_does_not_read_back_never_gets_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(tmp_path / "one", filled("old"))

    def on_a_bad_disk(directory: Path) -> None:
        write_manifest(directory)
        (directory / "b").write_text("neW")

    monkeypatch.setattr(module, "write_manifest", on_a_bad_disk)
    with pytest.raises(DiskError, match="the disk returns other bytes than were written") as caught:
        commit(tmp_path / "one", filled("new"))
    assert caught.value.where == str(tmp_path / "one" / "b")
    assert names(tmp_path) == ["one"] and words(tmp_path / "one") == {"old"}


@pytest.mark.slow
@pytest.mark.parametrize("what", ["replace", "discard"])
def test_a_kill_at_any_moment_leaves_a_whole_directory_after_a_sweep(
    what: str, tmp_path: Path
) -> None:
    """A discarded one is there whole, or gone; a replaced one is there whole, old or new."""
    directory = tmp_path / "count" / "checkpoint-7"
    commit(directory, filled("old"))
    changes = int(run(KILLED, str(directory), "0", what).stdout)
    assert changes == {"replace": 11, "discard": 5}[what]
    seen = set()
    for last in range(1, changes + 1):
        place = tmp_path / f"{last}"
        commit(place / "checkpoint-7", filled("old"))
        assert (
            run(KILLED, str(place / "checkpoint-7"), str(last), what).returncode == -signal.SIGKILL
        )
        there = (place / "checkpoint-7").exists()
        if there:
            words(place / "checkpoint-7")  # whole, even before anything is swept
        sweep(place)
        assert names(place) in (["checkpoint-7"], []), last
        if what == "replace":
            seen |= words(place / "checkpoint-7")
        else:
            seen.add("there" if names(place) else "gone")
    assert seen == ({"old", "new"} if what == "replace" else {"there", "gone"})


@contextmanager
def saving(directory: Path) -> Iterator[None]:
    """Have another process be in the midst of writing a directory."""
    slow = (
        "import sys; from pathlib import Path; from lema.storage.atomic import commit\n"
        "def fill(part): print('begun', flush=True); sys.stdin.read()\n"
        "commit(Path(sys.argv[1]), fill)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", slow, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "begun\n"
        try:
            yield
        finally:
            other.kill()


def test_what_another_process_is_writing_is_not_swept_until_it_is_gone(tmp_path: Path) -> None:
    with saving(tmp_path / "checkpoint-3"):
        before = names(tmp_path)
        sweep(tmp_path)
        assert names(tmp_path) == before and before[0].endswith(".part")
    sweep(tmp_path)
    assert names(tmp_path) == []


def test_a_sweep_touches_only_what_it_is_about(tmp_path: Path) -> None:
    mine = [".mine.part", ".checkpoint-4.old", "checkpoint-4", ".other.0123abcd.part", ".git"]
    for name in mine:
        (tmp_path / name).mkdir()
    (tmp_path / ".checkpoint-5.0123abcd.part").write_text("a file")
    (tmp_path / ".checkpoint-6.0123abcd.part").symlink_to(tmp_path / "checkpoint-4")
    # as the version before this one called them, with a process's number
    for kind in (
        "part",
        "gone",
        "old",
    ):
        (tmp_path / f".checkpoint-4.1234.{kind}").mkdir()
    sweep(tmp_path)
    assert names(tmp_path) == sorted(
        [*mine, ".checkpoint-5.0123abcd.part", ".checkpoint-6.0123abcd.part"]
    )
    sweep(tmp_path / "nowhere")


def test_one_save_sweeps_what_another_of_the_same_name_has_left(tmp_path: Path) -> None:
    (tmp_path / ".saved.0123abcd.part").mkdir()
    commit(tmp_path / "saved", filled("new"))
    assert names(tmp_path) == ["saved"]


def test_discarding_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        discard(tmp_path / "nothing")


def test_a_model_appears_in_the_directory_that_a_commit_fills(tmp_path: Path) -> None:
    """A phase of all weights ends so: both know how to appear whole, and the one does not wait
    for the other.
    """

    def fill(part: Path) -> None:
        with appearing(part) as inner:
            (inner / "file").write_text("text")

    commit(tmp_path / "out", fill)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert (tmp_path / "out" / "file").read_text() == "text"
