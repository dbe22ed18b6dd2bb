"""A file being written lies under a name of its own, locked, until it is complete; what a kill leaves is swept later.

The lock goes with the process that holds it. So a partial file that can be locked has no writer any more.
"""

import errno
import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["open_partial"]


def open_partial(file: Path) -> tuple[int, Path]:
    """Make a new file that is to become `file`, and remove those that killed runs meant to become it.

    Returns:
        Its descriptor, open for reading and writing, and its name, to be renamed to `file` or removed.

    Raises:
        OSError: it could not be made.
    """
    for left in _partials(file):
        _remove_if_abandoned(left)
    while True:
        partial = file.with_name(f".{file.name}.{secrets.token_hex(4)}.partial")
        # 0o666 and not mkstemp's 0o600: the file gets the permissions the umask gives any other.
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        _lock(descriptor, wait=True)
        if os.fstat(descriptor).st_nlink:
            return descriptor, partial
        os.close(descriptor)  # another run swept it between its making and its locking


def _partials(file: Path) -> Iterator[Path]:
    pattern = re.compile(rf"\.{re.escape(file.name)}\.[0-9a-f]{{8}}\.partial")
    with suppress(FileNotFoundError):
        yield from (other for other in sorted(file.parent.iterdir()) if pattern.fullmatch(other.name))


def _remove_if_abandoned(partial: Path) -> None:
    # What vanishes meanwhile, is a link or a directory, or is another user's, is not ours to remove.
    with suppress(OSError):
        descriptor = os.open(partial, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if _lock(descriptor, wait=False):
                partial.unlink()
        finally:
            os.close(descriptor)


def _lock(descriptor: int, wait: bool) -> bool:
    """Take the lock of a file; False: another has it, or this file system has none."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise
        return False
    return True
