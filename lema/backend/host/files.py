"""Open files as every system has them: how they are opened, bytes at an offset, and what is let go
of the cache.

Linux has calls for all of this, macOS for most of it, and Windows for little: there a file is
opened as bytes or its ends of lines are changed, no directory is opened, nothing is read or written
but at the file's own place, and a file that is open keeps its name.
"""

import os
import threading
from collections.abc import Sequence
from io import FileIO
from pathlib import Path

__all__ = [
    "BINARY",
    "NONBLOCK",
    "NO_FOLLOW",
    "OPEN_NAMES_LOCKED",
    "drop_cached",
    "flush",
    "open_directory",
    "read_into",
]
__all__ += ["write_from"]

# What `os.open` takes; 0: this system has none. Descriptors are never inherited by programs,
# without a flag (PEP 446).
BINARY: int = getattr(os, "O_BINARY", 0)
# where there is none, who opens looks first for a link
NO_FOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
NONBLOCK: int = getattr(os, "O_NONBLOCK", 0)

OPEN_NAMES_LOCKED = os.name == "nt"
"""Whether a file that is open can be neither renamed, replaced nor deleted, nor a directory in
which one is open.
"""

# of descriptors whose own place is moved, by one thread at a time
_OFFSET_LOCKS: dict[int, threading.Lock] = {}


def open_directory(path: Path) -> int | None:
    """Open a directory, to lock it or to have it on disk; no link to one. None: this system
    opens none.
    """
    if not hasattr(os, "O_DIRECTORY"):
        return None
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | NO_FOLLOW)


def flush(path: Path) -> None:
    """Have a file or directory on disk, and, of a file, let what is read of it next come from
    there. Where no directory can be opened, the system alone decides when a name is on the disk."""
    if path.is_dir() and not hasattr(os, "O_DIRECTORY"):
        return
    # Windows flushes only what may be written to.
    descriptor = os.open(path, (os.O_RDWR if OPEN_NAMES_LOCKED else os.O_RDONLY) | BINARY)
    try:
        os.fsync(descriptor)
        drop_cached(descriptor)
    finally:
        os.close(descriptor)


def drop_cached(descriptor: int, offset: int = 0, nbytes: int = 0) -> None:
    """Let bytes of a file, or all of them, go from the page cache, as far as they are on the disk.
    macOS and Windows cannot be told to, and keep them until memory is short."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)


def read_into(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
    """Fill views one after the other from an offset, by one call of the system; return how many
    bytes came.
    """
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, views, offset)
    with (
        _OFFSET_LOCKS.setdefault(descriptor, threading.Lock()),
        FileIO(descriptor, "rb", closefd=False) as file,
    ):
        file.seek(offset)
        return file.readinto(views[0]) or 0


def write_from(descriptor: int, view: memoryview, offset: int) -> int:
    """Write bytes at an offset, by one call of the system; return how many were written."""
    if hasattr(os, "pwrite"):
        return os.pwrite(descriptor, view, offset)
    with (
        _OFFSET_LOCKS.setdefault(descriptor, threading.Lock()),
        FileIO(descriptor, "r+b", closefd=False) as file,
    ):
        file.seek(offset)
        return file.write(view) or 0
