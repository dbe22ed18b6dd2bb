"""Every verb has its line among those that options are tried on, and what a command touches or
leaves is seen.
"""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest

from faults import options
from faults import touched as touched_module
from faults.tinymodel import TinyModel
from faults.touched import Touched, orphans


def touched(place: Path, work: Callable[[], Any]) -> str:
    """Return what is seen of some work in a case's directory."""
    seen = Touched(place / "cases" / "1", place, place / "cases")
    with seen.watched():
        work()
    return seen.said()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    case = tmp_path / "cases" / "1"
    case.mkdir(parents=True)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("kept")
    (case / "link").symlink_to(tmp_path / "kept" / "file")
    (case / "linked").symlink_to(tmp_path / "kept")
    return tmp_path


def test_every_verb_has_a_line_of_its_own() -> None:
    assert set(options.LINES) == set(options.verbs())


def test_a_disk_is_measured_where_the_case_may_write(tmp_path: Path) -> None:
    made = TinyModel(tmp_path.resolve())
    for name in ("model", "out"):
        (made.place / name).mkdir()
    options._make_kept(made)
    drawn = {options._value("--directory", Random(seed)) for seed in range(500)} & set(
        options.PLACES
    )
    assert len(drawn) > 10
    with contextlib.chdir(tmp_path):
        place = made.fresh()
        names = options._places(made, place)
        directories = {
            word for word in (options._filled(word, names) for word in drawn) if Path(word).is_dir()
        }
        assert {str(place / "run"), str(place / "empty")} < directories
        for directory in directories:
            assert options._run(["doctor", "--quick", "--directory", directory], made, place) == ""


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (lambda place: (place / "kept" / "new").write_text("x"), "open"),
        (lambda place: (place / "cases" / "1" / "link").write_text("kept"), "open"),
        (lambda place: (place / "cases" / "1" / "linked" / "new").mkdir(), "os.mkdir"),
        (lambda place: (place / "kept" / "file").unlink(), "os.remove"),
        (
            lambda place: (place / "kept" / "file").rename(place / "cases" / "1" / "moved"),
            "os.rename",
        ),
        (lambda place: os.link(place / "kept" / "file", place / "kept" / "hard"), "os.link"),
        (lambda place: os.truncate(place / "kept" / "file", 0), "os.truncate"),
        (lambda place: (place / "kept" / "file").chmod(0o600), "os.chmod"),
        # What does not go through Python is seen by what comes of it.
        (
            lambda place: subprocess.run(
                ["touch", "-d", "2020-01-01", place / "kept" / "file"], check=True
            ),
            "changed",
        ),
    ],
)
def test_what_is_touched_outside_is_seen(
    work: Callable[[Path], Any], words: str, place: Path
) -> None:
    assert words in touched(place, lambda: work(place))


def test_what_is_made_inside_is_no_fault(place: Path) -> None:
    case = place / "cases" / "1"

    def work() -> None:
        (case / "new").write_text("x")
        (case / "new").rename(case / "newer")
        (case / "link").unlink()
        (place / "kept" / "file").read_text()
        (case / "gone").symlink_to(place / "kept" / "nothing")
        with pytest.raises(FileExistsError):
            (case / "gone").open("x")

    assert touched(place, work) == ""


def test_a_process_and_a_socket_that_stay_are_seen(place: Path) -> None:
    left: list[Any] = []

    def work() -> None:
        left.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        left.append(socket.socket())

    said = touched(place, work)
    left[0].communicate(b"")
    left[1].close()
    assert f"left process {left[0].pid}" in said and "left socket" in said
    assert not psutil.pid_exists(left[0].pid)


# A process whose parent ends before it, with the words of one that renders templates.
ALONE = """
import subprocess, sys
program = "import sys; {work}"
subprocess.Popen([sys.executable, "-c", program, sys.argv[1]], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
"""


def test_a_renderer_that_stays_is_seen_and_one_that_is_about_to_end_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = str(tmp_path / "renderer.py")
    monkeypatch.setattr(touched_module, "PROGRAM", mark)
    ends = "import time; sys.stdin.read(); time.sleep(1)"  # as on a busy machine
    subprocess.run([sys.executable, "-c", ALONE.format(work=ends), mark], check=True)
    assert orphans(60.0) == []
    subprocess.run(
        [sys.executable, "-c", ALONE.format(work="import signal; signal.pause()"), mark], check=True
    )
    (words,) = orphans(0.2)
    assert mark in words
    (left,) = [
        one
        for one in psutil.process_iter(["cmdline"])
        if mark in " ".join(one.info["cmdline"] or [])
    ]
    left.kill()
