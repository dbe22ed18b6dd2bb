"""Locks of open files that are the system's: they go with the process that holds them, however
it ends.
"""

import errno
import os
import time
from types import ModuleType

__all__ = ["lock"]

fcntl: ModuleType | None
msvcrt: ModuleType | None
try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None
try:
    import msvcrt
except ModuleNotFoundError:  # everywhere else
    msvcrt = None

# What `flock` says on a file system without locks, or with locks of files alone (a network's).
NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF, errno.EISDIR}
# the place of the byte that Windows locks: nobody else may read or write it, so no file has it
BEYOND = 1 << 30
BETWEEN_TRIES = 0.05  # seconds


def lock(descriptor: int, *, shared: bool = False, wait: bool = True) -> bool | None:
    """Take the lock of an open file, or of an open directory.

    Args:
        shared: others may have it so at the same time. Windows knows no such locks, and needs none:
            while a file is open there, nobody removes it.
        wait: until others have let it go.

    Returns:
        True: it is taken, until the file is closed. False: another has it. None: the file system
            has no locks.
    """
    try:
        if fcntl is not None:
            fcntl.flock(
                descriptor,
                (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB),
            )
            return True
        if msvcrt is None:
            return None
        if not shared:
            _lock_byte(descriptor, msvcrt, wait)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return None
    return True


def _lock_byte(descriptor: int, system: ModuleType, wait: bool) -> None:
    offset = os.lseek(descriptor, 0, os.SEEK_CUR)
    try:
        os.lseek(descriptor, BEYOND, os.SEEK_SET)
        while True:
            try:
                system.locking(descriptor, system.LK_NBLCK, 1)
                return
            except PermissionError:
                if not wait:
                    raise
            time.sleep(BETWEEN_TRIES)
    finally:
        os.lseek(descriptor, offset, os.SEEK_SET)
