"""Every change that a process makes below a directory, seen before and after it is made; and a disk
that is full.

What Python writes is seen at the system call: files are opened unbuffered below the buffers they
always have. What safetensors writes (a sibling with a name of its own, set to its length, filled,
renamed) is done over here in the same steps, so that it can end between them.
"""

import builtins
import errno
import io
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from safetensors import SafetensorError

__all__ = ["DiskSeam", "bytes_below"]

# calls whose first argument is a path
NAMED = (
    "mkdir",
    "rmdir",
    "unlink",
    "remove",
    "chmod",
    "truncate",
    "utime",
)
MOVES = ("rename", "replace", "link", "symlink")
BY_NUMBER = ("fsync", "fdatasync", "ftruncate", "fchmod")
MADE = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class DiskSeam:
    """What `install` puts between this process and the files below `root`.

    Args:
        root: a directory, with no link in its path.
        told: called with what is done, where, and in how far: 0 before, 1 after, 0.5 with a write
            half done.
        limit: bytes that files below `root` may have in all; a write past them fails as on a full
            disk. None: any.
        says_so: whether the file system tells how much is left; else it says that there is plenty,
            as one with quotas.
    """

    def __init__(
        self,
        root: Path,
        told: Callable[[str, Path, float], None] = lambda kind, path, done: None,
        *,
        limit: int | None = None,
        says_so: bool = False,
    ) -> None:
        self.root = root.resolve()
        self._told = told
        self.limit = limit
        self._says_so = says_so
        self.unflushed: set[Path] = set()  # files whose last bytes are not on the disk yet

    def install(self, put: Callable[[Any, str, Any], None] = setattr) -> None:
        """Take the place of the calls; `put` sets an attribute."""
        for name in NAMED:
            put(os, name, self._named(name, getattr(os, name)))
        for name in MOVES:
            put(os, name, self._moving(name, getattr(os, name)))
        for name in BY_NUMBER:
            put(os, name, self._numbered(name, getattr(os, name)))
        put(os, "open", self._opening(os.open))
        for name in ("write", "pwrite"):
            put(os, name, self._writing(name, getattr(os, name)))
        put(os, "statvfs", self._statvfs(os.statvfs))
        opened = self._files(io.open)
        put(io, "open", opened)
        put(builtins, "open", opened)
        put(safetensors.torch, "serialize_file", self._serialize)
        put(shutil, "_USE_CP_SENDFILE", False)  # it copies past the files

    def below(self, path: Any, directory: int | None = None) -> Path | None:
        """Return a path (or the file of a descriptor) as seen from the root; None: it is not
        below it.
        """
        try:
            if isinstance(path, int):
                found = Path(f"/proc/self/fd/{path}").readlink()
            else:
                given = Path(os.fsdecode(path))
                start = (
                    Path.cwd()
                    if directory is None
                    else Path(f"/proc/self/fd/{directory}").readlink()
                )
                found = given if given.is_absolute() else start / given
                found = found.parent.resolve() / found.name
        except (OSError, TypeError):
            return None
        return found if found.is_relative_to(self.root) else None

    def room(self) -> int | None:
        """Return how many bytes there is still room for."""
        return None if self.limit is None else max(0, self.limit - bytes_below(self.root))

    def filled(self, path: Path, data: Any, write: Callable[[Any], int]) -> int:
        """Write what there is room for, told of before, at half, and after."""
        size = len(data)
        room = self.room()
        self._told("write", path, 0)
        if room is not None and size > room:
            if room == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            size = room
        self.unflushed.add(path)
        done = 0
        if size > 1:
            done = write(data[: size // 2])
            self._told("write", path, 0.5)
            if done < size // 2:
                return done
        done += write(data[done:size])
        self._told("write", path, 1)
        return done

    def _named(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def made(path: Any, *arguments: Any, **options: Any) -> Any:
            if (found := self.below(path, options.get("dir_fd"))) is None:
                return call(path, *arguments, **options)
            self._told(name, found, 0)
            result = call(path, *arguments, **options)
            if name in ("unlink", "remove"):
                self.unflushed.discard(found)
            self._told(name, found, 1)
            return result

        return made

    def _moving(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def made(source: Any, target: Any, *arguments: Any, **options: Any) -> Any:
            old = self.below(source, options.get("src_dir_fd"))
            new = self.below(target, options.get("dst_dir_fd"))
            if new is None:
                return call(source, target, *arguments, **options)
            self._told(name, new, 0)
            result = call(source, target, *arguments, **options)
            if old is not None and name in ("rename", "replace"):
                moved = {path for path in self.unflushed if path == old or old in path.parents}
                self.unflushed = self.unflushed - moved | {
                    new / path.relative_to(old) for path in moved
                }
            self._told(name, new, 1)
            return result

        return made

    def _numbered(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def made(number: Any, *arguments: Any, **options: Any) -> Any:
            file = number if isinstance(number, int) else number.fileno()
            if (found := self.below(file)) is None:
                return call(number, *arguments, **options)
            self._told(name, found, 0)
            result = call(number, *arguments, **options)
            if name in ("fsync", "fdatasync"):
                self.unflushed.discard(found)
            self._told(name, found, 1)
            return result

        return made

    def _opening(self, call: Callable[..., int]) -> Callable[..., int]:
        def made(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
            found = self.below(path, options.get("dir_fd")) if flags & MADE else None
            if found is None:
                return call(path, flags, *arguments, **options)
            self._told("open", found, 0)
            number = call(path, flags, *arguments, **options)
            self._told("open", found, 1)
            return number

        return made

    def _writing(self, name: str, call: Callable[..., int]) -> Callable[..., int]:
        def made(number: int, data: Any, *where: int) -> int:
            if (found := self.below(number)) is None:
                return call(number, data, *where)
            if where:  # at a place: in one piece
                self._told(name, found, 0)
                done = call(number, data, *where)
                self._told(name, found, 1)
                return done
            return self.filled(found, memoryview(data).cast("B"), lambda part: call(number, part))

        return made

    def _statvfs(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def made(path: Any) -> Any:
            found = call(path)
            room = self.room()
            if room is None or not self._says_so:
                return found
            blocks = room // found.f_frsize
            names = [name for name in dir(found) if name.startswith("f_")]
            values = {name: getattr(found, name) for name in names} | {
                "f_bavail": blocks,
                "f_bfree": blocks,
            }
            return type("Statvfs", (), values)()

        return made

    def _files(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def made(
            file: Any,
            mode: str = "r",
            buffering: int = -1,
            encoding: str | None = None,
            errors: str | None = None,
            newline: str | None = None,
            closefd: bool = True,
            opener: Any = None,
        ) -> Any:
            found = self.below(file) if set(mode) & set("wax+") else None
            if found is None:
                return call(file, mode, buffering, encoding, errors, newline, closefd, opener)
            self._told("open", found, 0)
            raw = _Raw(file, mode.replace("b", "").replace("t", ""), closefd, opener)
            raw.seam = self
            raw.path = found
            self._told("open", found, 1)
            if buffering == 0:
                return raw
            buffer = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return (
                buffer
                if "b" in mode
                else io.TextIOWrapper(buffer, encoding or "utf-8", errors, newline)
            )

        return made

    def _serialize(self, tensors: Any, filename: Any, metadata: Any = None) -> None:
        data = safetensors.serialize(tensors, metadata)
        target = Path(filename)
        part = target.with_name(f".tmp{secrets.token_hex(3)}")
        try:
            number = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                left = memoryview(data)
                while left:
                    left = left[os.write(number, left) :]
            finally:
                os.close(number)
            part.rename(target)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise SafetensorError(
                f"Error while serializing: I/O error: {error.strerror} (os error 28)"
            ) from error


class _Raw(io.FileIO):
    """A file whose every write is seen; its name and mode are those of any other."""

    seam: DiskSeam
    path: Path

    def write(self, data: Any) -> int:
        return self.seam.filled(self.path, memoryview(data).cast("B"), super().write)


def bytes_below(root: Path) -> int:
    """Return how many bytes the files below a directory have."""
    total = 0
    for directory, _, names in os.walk(root):
        for name in names:
            try:
                total += os.lstat(os.path.join(directory, name)).st_size  # noqa: PTH118 - it is called at every write
            except FileNotFoundError:
                continue
    return total
