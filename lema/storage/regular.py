"""Files that are opened by name: nothing blocks, nothing has no end, and what a command reads is
nothing it writes.

What is read may have come from a stranger: it is a regular file, of bounded size where it is read
whole, and, where its directory was handed over, no link out of it. What is written is never written
through a link, nor in place of a device or a pipe, nor over a file or into a directory that the
command reads, whatever name either has.
"""

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from io import BufferedReader, FileIO
from pathlib import Path

from lema.backend.host.files import BINARY, NO_FOLLOW, NONBLOCK
from lema.errors import ConfigError, DataError, WeightsError

__all__ = [
    "append",
    "check_directory",
    "check_inside",
    "check_kind",
    "check_separate",
    "check_target",
    "expanded",
    "is_path",
    "open_appending",
    "open_regular",
    "read_at_most",
    "read_regular",
]

KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
KINDS |= {stat.S_IFDIR: "a directory", stat.S_IFLNK: "a link"}
SHARED_BLOBS_MARK = ".huggingface-shared-blobs"
PIECE_BYTES = 2**20
LARGEST_TEXT = 64 * 2**20  # bytes of a text that a command reads whole: settings, notes, cards


def open_regular(file: Path, *, inside: bool = False) -> BufferedReader:
    """Open a file to read. `inside`: its directory was handed over, and it may not be a link out of
    that. `OSError`: it cannot be opened; `DataError`: it is a device, a pipe or the like;
    `WeightsError`: it is such a link."""
    if inside:
        check_inside(file)
    if not NONBLOCK:
        _check_regular(file, file.stat().st_mode)
    # Without waiting for a pipe's other end. Of a regular file the flag means nothing.
    descriptor = os.open(file, os.O_RDONLY | NONBLOCK | BINARY)
    try:
        _check_regular(file, os.fstat(descriptor).st_mode)
    except DataError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def _check_regular(file: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        what = f"{file.name} is {_kind(mode)}, not a regular file"
        raise DataError(what, where=str(file), how="give a regular file")


def read_regular(file: Path, limit: int = LARGEST_TEXT, *, inside: bool = False) -> bytes:
    """Return what is in a file of at most `limit` bytes. Errors are those of `open_regular`, and
    `DataError` if it has more."""
    with open_regular(file, inside=inside) as opened:
        content = read_at_most(opened, limit + 1)
    if len(content) > limit:
        what = f"{file.name} is larger than the {limit:,} bytes that such a file may have"
        raise DataError(what, where=str(file), how="use the file that was written there at first")
    return content


def read_at_most(file: BufferedReader, most: int) -> bytes:
    """Return what is in an open file, and not more than `most` bytes of it."""
    content = bytearray()
    # In pieces, because as much memory is taken as is asked for, however small the file is.
    while piece := file.read(min(most - len(content), PIECE_BYTES)):
        content += piece
    return bytes(content)


def check_inside(file: Path) -> None:
    """Refuse, with `WeightsError`, a link out of the directory of a file, except into the blobs
    of the hub cache.
    """
    target = file.resolve()
    root = file.parent.resolve()
    if target.is_relative_to(root):
        return
    for snapshot in (root, *root.parents):
        repository = snapshot.parent.parent
        if snapshot.parent.name == "snapshots" and repository.name.startswith("models--"):
            # one store for all repositories, if the hub library has marked it so
            shared = repository.parent / "blobs"
            stores = [
                repository / "blobs",
                *([shared] if (shared / SHARED_BLOBS_MARK).is_file() else []),
            ]
            if any(target.is_relative_to(store) for store in stores):
                return
            break
    what = f"{file.name} is a link that leaves its directory, to {target}"
    raise WeightsError(
        what, where=str(file), how="copy the file into the directory if you trust it"
    )


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return a path with the home that `~` or `~user` stands for; where there is no such user,
    the name stays.
    """
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path's own raises


def is_path(text: str | os.PathLike[str]) -> bool:
    """Return whether something lies where a text says; a text that can be no path, such as a long
    one, says nothing.
    """
    return os.path.exists(expanded(text))  # noqa: PTH110 - Path's own raises where a name is too long


def check_target(file: Path) -> None:
    """Make sure that a new file may take this name: nothing is there, or a regular file.
    `ConfigError` says what is.
    """
    try:
        mode = file.lstat().st_mode
    except (
        FileNotFoundError,
        NotADirectoryError,
    ):  # what is missing above it is told where it is written
        return
    if not stat.S_ISREG(mode):
        raise _taken(file, mode)


def check_directory(path: Path) -> None:
    """Make sure that a name is a directory's, or nothing's yet. `ConfigError`: something else has
    it, such as a file, or a link that leads nowhere."""
    if not path.is_dir() and (path.is_symlink() or path.exists()):
        what = f"{path.name} is no directory, and one would be made there"
        raise ConfigError(what, where=str(path), how="choose another name, or move what is there")


def check_kind(file: Path, *begins: bytes) -> None:
    """Make sure that a file which is to be replaced is of the kind that is written there, which
    begins in one of these ways, or is empty, or is not there. `ConfigError`: it is something else;
    other errors are those of `open_regular`.
    """
    with suppress(FileNotFoundError, NotADirectoryError), open_regular(file) as opened:
        there = opened.read(max(map(len, begins), default=1))
        if there and not there.startswith(begins):
            what = f"{file.name} exists, and is nothing that this option has written"
            raise ConfigError(what, where=str(file), how="give another name, or delete it first")


def open_appending(file: Path) -> FileIO:
    """Open a file to read and to append to, unbuffered, and make it where there is none. `OSError`:
    it cannot be opened; `ConfigError`: it is a link, a device, a pipe or the like."""
    check_target(file)
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | NO_FOLLOW | NONBLOCK | BINARY
    descriptor = os.open(file, flags, 0o666)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):  # it was exchanged meanwhile
        os.close(descriptor)
        raise _taken(file, mode)
    return os.fdopen(descriptor, "ab+", buffering=0)


def append(file: Path, content: bytes) -> None:
    """Write at the end of a file. Errors are those of `open_appending`."""
    with open_appending(file) as opened:
        while content:
            content = content[opened.write(content) :]


def check_separate(target: Path, reads: Iterable[Path], *, below: bool = True) -> None:
    """Make sure that nothing is written over or into what is read: the target is none of the files,
    nor one of the directories, nor one of the files in these, under whatever name; and, unless told
    not to look `below`, it lies at no depth in one of the directories. `ConfigError` names the two.
    """
    identity = _identity(target)
    around = {_identity(folder) for folder in target.resolve().parents} - {None} if below else set()
    for read in reads:
        inner = read.iterdir() if identity and read.is_dir() and not target.is_dir() else ()
        for entry in (read, *inner):
            if identity and _identity(entry) == identity:
                named = str(target) if str(target) == str(entry) else f"{target}, which is {entry}"
                what = "the command would write over what it reads"
                raise ConfigError(what, where=named, how="choose another place for what is written")
        if around and read.is_dir() and _identity(read) in around:
            what = f"the command would write into a directory that it reads, {read}"
            raise ConfigError(what, where=str(target), how="choose a place outside that directory")


def _identity(path: Path) -> tuple[int, int] | None:
    """Return what a file or directory is, whatever its name, links followed; None: there is
    none.
    """
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _taken(file: Path, mode: int) -> ConfigError:
    what = f"{file.name} is {_kind(mode)}, and nothing is written through or over one"
    return ConfigError(what, where=str(file), how="delete it, or choose another name")


def _kind(mode: int) -> str:
    return KINDS.get(stat.S_IFMT(mode), "no regular file")
