"""Places to write to: whether what is written fits, whether an error was a lack of space, and
the user's cache.
"""

import errno
import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from lema.errors import FAILING_DISK, WHOLE_DISK, DiskError, DiskFull, LemaError, Stopped

__all__ = [
    "check_free_bytes",
    "disk_errors",
    "is_full",
    "is_too_large",
    "make_private",
    "not_written",
    "unsaved",
    "warn_passed_over",
]
__all__ += ["free_bytes", "own_number", "user_cache"]

FULL = (errno.ENOSPC, errno.EDQUOT)
MARGIN = 1 << 20  # for the other files: settings, generators' states, the log so far
FREE_SPACE_HINT = (
    "free some space, or choose an output_dir on another disk; earlier files are untouched"
)
SMALLER_FILES_HINT = (
    "raise the limit on a file's size (ulimit -f), or choose a directory on a filesystem that "
    "takes larger files; earlier files are untouched"
)


def user_cache(name: str) -> Path:
    """Return the folder of one kind of what later starts read again, below the user's cache
    directory: XDG_CACHE_HOME, if it is absolute, or ~/.cache; for a user without a home, below the
    directory of temporary files."""
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if configured.is_absolute():  # what is relative is to be ignored, as the XDG specification says
        return configured / "lema" / name
    try:
        return Path("~/.cache").expanduser() / "lema" / name
    # HOME is not set, and the system does not know the user, as in a container
    except RuntimeError:
        user_id = own_number()
        return Path(tempfile.gettempdir(), "lema" if user_id is None else f"lema-{user_id}", name)


def own_number() -> int | None:
    """Return the number of the user that this process runs for; None: users have none, as on
    Windows, where a user's folders are that user's own."""
    return os.geteuid() if hasattr(os, "geteuid") else None


def make_private(folder: Path) -> None:
    """Make a folder of the user's cache, and the one above it, in which nobody else writes: what is
    kept there is trusted. A user's own group may, whose number is the user's. `DiskError`: it
    cannot be made, or others may write."""
    user_id = own_number()
    try:
        for directory in (folder.parent, folder):
            directory.parent.mkdir(parents=True, exist_ok=True)
            directory.mkdir(mode=0o700, exist_ok=True)
            status = directory.stat()
            shared = stat.S_IWOTH | (0 if status.st_gid == status.st_uid else stat.S_IWGRP)
            if user_id is not None and (
                status.st_uid not in (0, user_id) or status.st_mode & shared
            ):
                how = f"chmod go-w {directory}, or set XDG_CACHE_HOME to a directory of your own"
                raise DiskError(
                    "other users may write to this cache", where=str(directory), how=how
                )
    except OSError as error:
        how = "set XDG_CACHE_HOME to a directory that may be written to"
        raise DiskError(
            f"the cache cannot be used: {error.strerror}", where=str(folder), how=how
        ) from error


def free_bytes(path: Path) -> int | None:
    """Return how many bytes an ordinary user may still write at a place, which need not exist
    yet; None: unknown.
    """
    for directory in (path, *path.absolute().parents):
        try:
            usage = shutil.disk_usage(directory)
        except FileNotFoundError:
            continue
        except OSError:
            return None
        return usage.free if usage.total else None  # some file systems do not say
    return None


def check_free_bytes(path: Path, nbytes: int, what: str, how: str = FREE_SPACE_HINT) -> None:
    """Make sure that a directory, or its place, has room for `nbytes` of tensors; else
    `DiskFull` names `what`, and says `how` to mend it.
    """
    needed = nbytes + nbytes // 64 + MARGIN
    free = free_bytes(path)
    if free is not None and free < needed:
        what = (
            f"the disk is too full for {what}: {needed:,} bytes are needed, and {free:,} are free"
        )
        raise DiskFull(what, where=str(path), how=how)


def is_full(error: BaseException) -> bool:
    """Whether an error came of a disk, or a quota, that was full; safetensors says so in words
    alone.
    """
    return any(isinstance(cause, DiskFull) for cause in _causes(error)) or _says(error, FULL)


def is_too_large(error: BaseException) -> bool:
    """Whether an error came of a file that became larger than the shell (`ulimit -f`) or the
    filesystem allows; safetensors says so in words alone.
    """
    return _says(error, (errno.EFBIG,))


def _says(error: BaseException, numbers: Collection[int]) -> bool:
    """Whether an error, or what it came of, has one of these numbers of the system."""
    return any(
        (isinstance(cause, OSError) and cause.errno in numbers)
        or any(f"(os error {number})" in str(cause) for number in numbers)
        for cause in _causes(error)
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def not_written(what: str, error: BaseException, where: Path) -> DiskError:
    """Return what to raise for a write's `error`, perhaps `DiskFull`. `what` failed, and why;
    `where` it was to be.
    """
    failing = isinstance(error, OSError) and error.errno in FAILING_DISK
    how = WHOLE_DISK if failing else "check that the directory is writable"
    if is_too_large(error):
        how = SMALLER_FILES_HINT
    kind, how = (DiskFull, FREE_SPACE_HINT) if is_full(error) else (DiskError, how)
    return kind(what, where=str(where), how=how)


def warn_passed_over(error: DiskFull, after: str) -> None:
    """Warn that a checkpoint is not written for want of room, and that the run goes on; `after`
    says after what.
    """
    warnings.warn(
        f"no checkpoint after {after}: {error.what} ({error.where}). The run goes on, "
        "those before are as they were, "
        "and the next is tried when it is due; free some space before the run ends",
        stacklevel=3,
    )


def unsaved(stopped: Stopped, error: DiskFull) -> DiskFull:
    """Return the error of a run that was stopped, and had no room for its checkpoint; raise it
    `from stopped`.
    """
    return DiskFull(
        f"{stopped.what}, which is not saved: {error.what}", where=error.where, how=error.how
    )


@contextmanager
def disk_errors(file: Path) -> Iterator[None]:
    """Say what an `OSError` that a `with` block meets while it reads or writes `file` means, and
    how to fix it; or a full disk, which libraries tell in words of their own."""
    try:
        yield
    except LemaError:
        raise
    except Exception as error:
        full = is_full(error)
        name = file.name
        if not full and not isinstance(error, OSError):
            raise
        why = getattr(error, "strerror", None) or error
        what = f"the disk is full: {name} could not be written" if full else f"{name}: {why}"
        how = (
            "free space, or choose another directory"
            if full
            else "check that the directory exists and is writable"
        )
        raise (DiskFull if full else DiskError)(what, where=str(file), how=how) from error
