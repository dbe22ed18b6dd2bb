"""Places to write to: whether what is written fits, whether an error was a lack of space, and the user's cache."""

import errno
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lema.errors import DiskError, DiskFull, LemaError, Stopped

__all__ = ["check_room", "disk_errors", "is_full", "not_written", "say_passed_over", "unsaved", "user_cache"]

FULL = (errno.ENOSPC, errno.EDQUOT)
MARGIN = 1 << 20  # for the other files: settings, generators' states, the log so far
MORE_ROOM = "free some space, or choose an output_dir on another disk; earlier files are untouched"


def user_cache(name: str) -> Path:
    """Return the folder of one kind of what later starts read again, below the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lema" / name


def free_bytes(place: Path) -> int | None:
    """Return how many bytes an ordinary user may still write at a place, which need not exist yet; None: unknown."""
    for directory in (place, *place.absolute().parents):
        try:
            found = os.statvfs(directory)
        except FileNotFoundError:
            continue
        except OSError:
            return None
        return found.f_bavail * found.f_frsize if found.f_blocks else None  # some file systems do not say
    return None


def check_room(place: Path, nbytes: int, what: str) -> None:
    """Make sure that a directory, or its place, has room for `nbytes` of tensors; else `DiskFull` names `what`."""
    needed, free = nbytes + nbytes // 64 + MARGIN, free_bytes(place)
    if free is not None and free < needed:
        what = f"the disk is too full for {what}: {needed:,} bytes are needed, and {free:,} are free"
        raise DiskFull(what, where=str(place), how=MORE_ROOM)


def is_full(error: BaseException) -> bool:
    """Whether an error came of a disk, or a quota, that was full; safetensors says so in words alone."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, DiskFull) or (isinstance(seen, OSError) and seen.errno in FULL):
            return True
        if any(f"(os error {number})" in str(seen) for number in FULL):
            return True
        seen = seen.__cause__
    return False


def not_written(what: str, error: BaseException, where: Path) -> DiskError:
    """Return what to raise for a write's `error`, perhaps `DiskFull`. `what` failed, and why; `where` it was to be."""
    kind, how = (DiskFull, MORE_ROOM) if is_full(error) else (DiskError, "check that the directory is writable")
    return kind(what, where=str(where), how=how)


def say_passed_over(error: DiskFull, after: str) -> None:
    """Warn that a checkpoint is not written for want of room, and that the run goes on; `after` says after what."""
    warnings.warn(
        f"no checkpoint after {after}: {error.what} ({error.where}). The run goes on, those before are as they were, "
        "and the next is tried when it is due; free some space before the run ends",
        stacklevel=3,
    )


def unsaved(stopped: Stopped, error: DiskFull) -> DiskFull:
    """Return the error of a run that was stopped, and had no room for its checkpoint; raise it `from stopped`."""
    return DiskFull(f"{stopped.what}, which is not saved: {error.what}", where=error.where, how=error.how)


@contextmanager
def disk_errors(file: Path) -> Iterator[None]:
    """Say what an `OSError` that a `with` block meets while it reads or writes `file` means, and how to fix it; or a
    full disk, which libraries tell in words of their own."""
    try:
        yield
    except LemaError:
        raise
    except Exception as error:
        full, name = is_full(error), file.name
        if not full and not isinstance(error, OSError):
            raise
        why = getattr(error, "strerror", None) or error
        what = f"the disk is full: {name} could not be written" if full else f"{name}: {why}"
        how = "free space, or choose another directory" if full else "check that the directory exists and is writable"
        raise (DiskFull if full else DiskError)(what, where=str(file), how=how) from error
