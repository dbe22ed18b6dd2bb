"""What a command writes, makes, renames and deletes, and what it leaves running, by Python's audit
hook and by a look.

The hook is told before anything is done, also where it fails then. Libraries in C++ and Rust write
without it: so the files that must stay as they are are compared, too.
"""

import gc
import os
import socket
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from lema.data.chat.process import PROGRAM

__all__ = ["Touched", "listing", "orphans"]

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# How many paths an event is of, by its name; none of them is followed where it is a link itself.
CHANGES = {
    **dict.fromkeys(("os.rename", "os.link", "os.symlink"), 2),
    **dict.fromkeys(("os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"), 1),
}
FOLLOWED = ("os.truncate", "os.chmod", "os.chown", "os.utime")
HARMLESS = ("/dev/null", "/dev/tty", "/proc/")  # where nothing is kept
NETWORK = ("socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo")

_at_work: list["Touched"] = []
_hooked: list[int] = []


class Touched:
    """Looks at what is touched outside of a directory while a `with` block runs.

    Args:
        inside: where everything may be written.
        kept: a directory whose files must stay as they are, apart from what is `inside` and beside
            it.
        spared: the directory that `inside` is one of.
    """

    def __init__(self, inside: Path, kept: Path, spared: Path) -> None:
        self._inside = os.path.realpath(inside)
        self._kept = kept
        self._spared = spared
        self._found: list[str] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look on."""
        if not _hooked:
            _hooked.append(1)
            sys.addaudithook(_hook)
        before = listing(self._kept, self._spared)
        sockets = _sockets()
        children = {one.pid for one in psutil.Process().children(recursive=True)}
        _at_work.append(self)
        try:
            yield
        finally:
            _at_work.clear()
        after = listing(self._kept, self._spared)
        changed = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
        self._found += [f"changed {name}" for name in changed]
        now = psutil.Process().children(recursive=True)
        left = {one.pid: _words(one) for one in now if one.pid not in children}
        self._found += [
            f"left process {pid}: {words}"
            for pid, words in left.items()
            if str(PROGRAM) not in words
        ]
        gc.collect()  # because what nobody can reach any more is not left
        self._found += [f"left socket {one}" for one in _sockets() - sockets]

    def said(self) -> str:
        """Return what was touched, or left; empty: nothing."""
        return "; ".join(dict.fromkeys(self._found))[:2000]

    def look(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Note an event of the hook, if it is one."""
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & WRITES and not isinstance(path, int):
                self._note(event, path, followed=not flags & (os.O_NOFOLLOW | os.O_EXCL))
        elif (count := CHANGES.get(event)) is not None:
            of = arguments[1:2] if event in ("os.link", "os.symlink") else arguments[:count]
            for path in of:
                self._note(event, path, followed=False)
        elif event in FOLLOWED:
            self._note(event, arguments[0], followed=True)
        elif event in NETWORK and getattr(arguments[0], "family", None) != socket.AF_UNIX:
            self._found.append(f"{event} {arguments[1:]}"[:200])

    def _note(self, event: str, path: Any, *, followed: bool) -> None:
        if isinstance(path, int):
            return
        name = os.fsdecode(path)
        head, tail = os.path.split(name.rstrip("/"))
        real = os.path.realpath(name) if followed else f"{os.path.realpath(head or '.')}/{tail}"
        if event == "os.mkdir" and os.path.lexists(real):
            return  # it fails
        if not real.startswith(HARMLESS) and not f"{real}/".startswith(f"{self._inside}/"):
            self._found.append(f"{event} {real[:200]}")


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _at_work:
        _at_work[0].look(event, arguments)


def listing(directory: Path, spared: Path) -> Mapping[str, tuple[int, ...]]:
    """Return what tells whether anything below a directory was changed, but for what is below
    `spared`.
    """
    found = {}
    for place, names, files in os.walk(directory):
        names[:] = [name for name in names if Path(place, name) != spared]
        for name in (*names, *files):
            path = f"{place}/{name}"
            one = os.lstat(path)
            changed = () if stat.S_ISDIR(one.st_mode) else (one.st_size, one.st_mtime_ns)
            found[path] = (one.st_ino, one.st_mode, *changed)
    return found


def orphans(seconds: float = 10.0) -> list[str]:
    """Return the processes that render templates for one that has ended, and do not end in so many
    seconds: each command's process keeps one, which sees that it is alone when it next gets a
    processor."""
    left = {
        one: words
        for one in psutil.process_iter()
        if str(PROGRAM) in (words := _words(one)) and one.ppid() == 1
    }
    _, alive = psutil.wait_procs(left, timeout=seconds)
    return [left[one] for one in alive]


def _sockets() -> set[str]:
    found = set[str]()
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one that the list was read through
            found.add(str(file.readlink()))
    return {target for target in found if target.startswith("socket:")}


def _words(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:200]
    except psutil.Error:  # it ends just now
        return process.name() if process.is_running() else "ended"
