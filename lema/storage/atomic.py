"""Files and directories that are there whole or not at all, wherever a kill or a power cut comes.

A directory is filled under a name of its own (`.NAME.<token>.part`) and flushed to disk; then it
takes its name, and the directory above is flushed. `commit` also gives it a manifest, reads it back
and compares it before it gets its name. A directory of that name that was there steps aside
(`.old`) for that moment, and `sweep` puts it back where a kill came in it. What is deleted is
called `.gone` first, so that half a directory never bears the name of a whole one.

A single file is written under the name `.NAME.<token>.partial` (`open_partial`, `replacing`).

The process that works on one holds its lock (`flock`), which goes with it: what can be locked may
be swept.
"""

import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from lema.backend.host.filelocks import lock
from lema.backend.host.files import BINARY, NO_FOLLOW, OPEN_NAMES_LOCKED, flush, open_directory
from lema.errors import AdapterError, ConfigError, DiskError
from lema.storage.diskspace import disk_errors
from lema.storage.manifest import check_manifest, write_manifest
from lema.storage.regular import check_target

__all__ = [
    "appearing",
    "commit",
    "directories_for",
    "discard",
    "discard_unused",
    "free_directory",
    "replace_file",
]
__all__ += ["finish_directory", "replacing", "sweep"]

PART = "part"
OLD = "old"
GONE = "gone"
LEFT = re.compile(rf"\.(?P<name>.+)\.[0-9a-f]+\.(?P<kind>{PART}|{OLD}|{GONE})")


def commit(directory: Path, fill: Callable[[Path], object]) -> None:
    """Have a directory appear under its name, complete; one that is there already is replaced.
    `fill` writes all that is in it, but for the manifest, into the directory it is given. The
    directories above are made where they do not exist. `Exception`: whatever `fill` raises;
    `OSError`: it could not be written; `DiskError`: it does not read back as it was written. What
    was there before is then untouched, and nothing is left behind."""
    with _named_when_whole(directory) as part:
        fill(part)
        finish_directory(part)
        write_manifest(part)
        flush(part)
        try:
            check_manifest(part)
        except AdapterError as error:
            what = f"the disk returns other bytes than were written: {error.what}"
            how = "check the disk; earlier files are untouched"
            raise DiskError(
                what, where=error.where.replace(part.name, directory.name), how=how
            ) from error


@contextmanager
def appearing(directory: Path, part: Path | None = None) -> Iterator[Path]:
    """Give a directory to write a model into, which takes the name `directory` at the end; on
    failure it goes. `part`: one beside it that nobody else writes into, which is taken as it is,
    and stays on failure. `DiskError`: it could not be written; what was there before is untouched.
    """
    with disk_errors(directory), _named_when_whole(directory, part) as part:
        yield part
        finish_directory(part)


@contextmanager
def _named_when_whole(directory: Path, part: Path | None = None) -> Iterator[Path]:
    _make(directory.parent)
    sweep(directory.parent, directory.name)
    if part is not None:
        yield part
        _rename(part, directory)
        flush(directory.parent)
        return
    descriptor, part = _begin(directory, PART, Path.mkdir, open_directory)
    try:
        yield part
        _rename(part, directory)
        flush(directory.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        if descriptor is not None:
            os.close(descriptor)


def discard(directory: Path) -> None:
    """Delete a directory, or raise `OSError`; half of it never bears its name."""
    with _locked(directory):
        gone = _aside(directory, GONE)
        directory.rename(gone)
        shutil.rmtree(gone)


def discard_unused(directory: Path, *files: Path) -> bool:
    """Delete a directory unless a process holds its lock, or that of one of these files in it;
    return whether it did. `OSError`: it cannot be opened, or renamed."""
    if OPEN_NAMES_LOCKED:  # what it is used for is open, so that it keeps its name
        gone = _aside(directory, GONE)
        try:
            directory.rename(gone)
        except PermissionError:
            return False
        shutil.rmtree(gone, ignore_errors=True)
        return True
    with ExitStack() as stack:
        for path in (directory, *files):
            with suppress(FileNotFoundError):
                descriptor = os.open(path, os.O_RDONLY)
                stack.callback(os.close, descriptor)
                if lock(descriptor, wait=False) is False:
                    return False
        shutil.rmtree(directory, ignore_errors=True)
    return True


def sweep(parent: Path, name: str | None = None, *, alone: bool = False) -> None:
    """Remove files that killed runs have left next to directories in `parent`, and restore those
    they moved. Those of checkpoints are always swept, and those of `name`. If `alone`, nothing else
    writes there, locks or none."""
    with suppress(OSError):  # what cannot be listed is not ours to clear
        for left in sorted(parent.iterdir()):
            match = LEFT.fullmatch(left.name)
            if match is None or left.is_symlink() or not left.is_dir():
                continue
            if match["name"] != name and not re.fullmatch(r"checkpoint-\d+", match["name"]):
                continue
            directory = parent / match["name"]
            kind = match["kind"]
            # What another process has cleared meanwhile, or owns, is not ours to touch.
            with suppress(OSError), _locked(left, wait=False) as locked:
                if (locked or alone) and kind == OLD and not directory.exists():
                    left.rename(directory)
                elif locked or alone:
                    shutil.rmtree(left if kind == GONE else left.rename(_aside(directory, GONE)))


def _begin(
    target: Path, kind: str, make: Callable[[Path], object], opened: Callable[[Path], int | None]
) -> tuple[int | None, Path]:
    """Make a directory or a file that is to become `target`, and open and lock it; None: the
    system opens none.
    """
    while True:
        path = _aside(target, kind)
        make(path)
        # another process may sweep it between its making and its locking
        with suppress(FileNotFoundError):
            descriptor = opened(path)
            if descriptor is None:
                return None, path
            lock(descriptor)
            if path.exists():
                return descriptor, path
            os.close(descriptor)


@contextmanager
def _locked(
    path: Path, opened: Callable[[Path], int | None] = open_directory, *, wait: bool = True
) -> Iterator[bool]:
    """Open a directory or a file and take its lock; give whether it was to be had. It is not where
    there are no locks, or where another has it and we do not wait."""
    descriptor = opened(path)
    try:
        yield descriptor is not None and lock(descriptor, wait=wait) is True
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _open_file(file: Path) -> int:
    return os.open(file, os.O_RDWR | NO_FOLLOW | BINARY)


def _rename(part: Path, directory: Path) -> None:
    """Give a directory its name; one that is there already steps aside until then."""
    empty = directory.is_dir() and not directory.is_symlink() and not any(directory.iterdir())
    if empty and OPEN_NAMES_LOCKED:
        directory.rmdir()  # because nothing takes the name of a directory there
    if empty or not directory.exists():
        # over an empty one without its lock, because the `commit` around this one may hold that
        part.rename(directory)
        return
    with _locked(directory):
        old = _aside(directory, OLD)
        directory.rename(old)
        try:
            part.rename(directory)
        except OSError:
            old.rename(directory)
            raise
        with suppress(OSError):  # the new one is there; what is left of the old one is swept later
            shutil.rmtree(old.rename(_aside(directory, GONE)))


def finish_directory(directory: Path) -> None:
    """Flush a directory, and give its files the permissions that any new file would have. A
    library's temporary files are readable by their owner alone; a new directory has what the umask
    lets through. A file that has another name, too, is not new, and keeps those that it has."""
    for folder, _, files in os.walk(directory, topdown=False):
        mode = Path(folder).stat().st_mode & 0o666
        for name in files:
            path = Path(folder, name)
            if path.stat().st_nlink == 1:
                path.chmod(mode)
            flush(path)
        flush(Path(folder))


def _make(directory: Path) -> None:
    """Make a directory and those above it, each on disk in the one it lies in."""
    if not directory.exists():
        _make(directory.parent)
        directory.mkdir(exist_ok=True)
        flush(directory.parent)


def _aside(directory: Path, kind: str) -> Path:
    return directory.with_name(f".{directory.name}.{secrets.token_hex(4)}.{kind}")


def open_partial(file: Path) -> tuple[int, Path]:
    """Make a new file that is to become `file`, or raise `OSError`; remove those that killed runs
    meant to become it. Return its descriptor, open for reading and writing, and its name, to be
    renamed to `file` or removed."""
    pattern = re.compile(rf"\.{re.escape(file.name)}\.[0-9a-f]{{8}}\.partial")
    with suppress(FileNotFoundError):
        for left in filter(
            lambda sibling: pattern.fullmatch(sibling.name), sorted(file.parent.iterdir())
        ):
            # What vanishes meanwhile, is a link or a directory, or is another user's, is not ours
            # to remove.
            with suppress(OSError):
                # no lock is needed to tell: one that is open stays
                if OPEN_NAMES_LOCKED and not left.is_symlink():
                    left.unlink()
                if OPEN_NAMES_LOCKED:
                    continue
                with _locked(left, _open_file, wait=False) as locked:
                    if locked:
                        left.unlink()
    # Not mkstemp, because the file gets the permissions that the umask gives any other.
    descriptor, path = _begin(file, "partial", partial(Path.touch, exist_ok=False), _open_file)
    assert descriptor is not None
    return descriptor, path


def free_directory(out_dir: str | os.PathLike[str], max_shard_size: int) -> Path:
    """Return where a model may be written; `ConfigError`: `out_dir` is not empty, or a link to what
    is not there, or `max_shard_size` is not positive."""
    if max_shard_size < 1:
        what = f"a file cannot hold {max_shard_size} bytes"
        raise ConfigError(what, where="max_shard_size", how="give a size such as 5GB")
    out = Path(out_dir).resolve()
    # what it would make there, nobody has named
    if Path(out_dir).is_symlink() and not out.exists():
        raise ConfigError(
            "this is a link to what is not there", where=str(out_dir), how="choose a new directory"
        )
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(
            "the directory is not empty", where=str(out), how="choose a new or empty directory"
        )
    return out


@contextmanager
def directories_for(file: Path) -> Iterator[None]:
    """Make the directories above a file that is written in the `with` block; on failure those that
    were made go. Raises `DiskError` if one cannot be made."""
    missing = [directory for directory in file.absolute().parents if not directory.exists()]
    with disk_errors(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for directory in missing:
            with suppress(OSError):  # it is not empty, because others have written there
                directory.rmdir()
        raise


@contextmanager
def _closing(descriptor: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(descriptor)


@contextmanager
def partial_file(file: Path) -> Iterator[tuple[int, Path]]:
    """Give what `open_partial` returns; the new file takes the name `file` at the end, on disk, or
    goes on failure. `OSError`: it could not be written; `ConfigError`: the name is that of a link,
    a device or the like. What was there before is untouched."""
    check_target(file)
    descriptor, path = open_partial(file)
    try:
        with _closing(descriptor):
            yield descriptor, path
            os.fsync(descriptor)
            if not OPEN_NAMES_LOCKED:
                path.replace(file)  # before it is closed, because what is not locked may be swept
        if OPEN_NAMES_LOCKED:
            path.replace(file)
    except BaseException:
        with suppress(OSError):  # because the error that brought us here is the one to tell
            path.unlink(missing_ok=True)
        raise
    flush(file.parent)  # the name is on the disk only after its directory is


@contextmanager
def replacing(file: Path) -> Iterator[BinaryIO]:
    """Give a file to write, which takes the name `file` at the end; see `partial_file`."""
    with (
        partial_file(file) as (descriptor, _),
        os.fdopen(descriptor, "wb", closefd=False) as stream,
    ):
        yield stream


def replace_file(file: Path, content: bytes) -> None:
    """Write a small file in one step, or raise `DiskError`: then the file is unchanged."""
    with disk_errors(file), replacing(file) as stream:
        stream.write(content)
