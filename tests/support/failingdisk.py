"""A disk whose reads fail, or return fewer bytes than were asked for, as the files of some names
have it.

What Python reads is seen at the system call: by descriptor and place, or in files that are opened
unbuffered below the buffers they always have. What a library reads past Python is not seen.
"""

import builtins
import errno
import io
import os
from collections.abc import Callable
from typing import Any

__all__ = ["FailingDisk"]


class FailingDisk:
    """What `install` puts between this process and the files that have `name` in their paths.

    Args:
        name: a part of the path of each file that is meant.
        begin: bytes from which on a read fails; None: no read fails.
        short: whether a read returns a third of what it is asked for.
    """

    def __init__(self, name: str, *, begin: int | None = None, short: bool = False) -> None:
        self.name = name
        self.begin = begin
        self.short = short
        self.reads = 0  # that were seen

    def install(self, put: Callable[[Any, str, Any], None]) -> "FailingDisk":
        """Take the place of the calls; `put` sets an attribute."""
        put(os, "pread", self._pread(os.pread))
        put(os, "preadv", self._preadv(os.preadv))
        opened = self._opened(io.open)
        put(io, "open", opened)
        put(builtins, "open", opened)
        return self

    def allowed(self, offset: int, nbytes: int) -> int:
        """Return how many bytes a read of them gives; `OSError`: it fails."""
        self.reads += 1
        if self.begin is not None and offset + nbytes > self.begin:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return max(1, nbytes // 3) if self.short else nbytes

    def _meant(self, descriptor: int) -> bool:
        return self.name in os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 - the name alone

    def _pread(self, call: Callable[..., bytes]) -> Callable[..., bytes]:
        def read(descriptor: int, nbytes: int, offset: int) -> bytes:
            return call(
                descriptor,
                self.allowed(offset, nbytes) if self._meant(descriptor) else nbytes,
                offset,
            )

        return read

    def _preadv(self, call: Callable[..., int]) -> Callable[..., int]:
        def read(descriptor: int, views: Any, offset: int, *flags: int) -> int:
            if not self._meant(descriptor):
                return call(descriptor, views, offset, *flags)
            first = views[0]
            nbytes = self.allowed(offset, sum(map(len, views)))
            if not self.short:
                return call(descriptor, views, offset, *flags)
            # as a read past the page cache ends
            whole = max(nbytes // PAGE * PAGE, min(len(first), PAGE))
            return call(descriptor, [first[:whole]], offset, *flags)

        return read

    def _opened(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def opened(
            file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, errors: Any = None,
            newline: Any = None, closefd: bool = True, opener: Any = None,
        ) -> Any:  # fmt: skip
            is_meant = (
                self._meant(file) if isinstance(file, int) else self.name in os.fsdecode(file)
            )
            if not is_meant or set(mode) & set("wax+"):
                return call(file, mode, buffering, encoding, errors, newline, closefd, opener)
            raw = _Raw(file, "r", closefd, opener)
            raw.disk = self
            if buffering == 0:
                return raw
            buffer = io.BufferedReader(raw)
            return (
                buffer
                if "b" in mode
                else io.TextIOWrapper(buffer, encoding or "utf-8", errors, newline)
            )

        return opened


PAGE = 4096


class _Raw(io.FileIO):
    """A file whose every read is seen."""

    disk: FailingDisk

    def readinto(self, buffer: Any) -> int | None:
        view = memoryview(buffer).cast("B")
        return super().readinto(view[: self.disk.allowed(self.tell(), len(view))])

    def read(self, size: int | None = -1) -> bytes:
        if size is None or size < 0:
            return self.readall()
        return super().read(self.disk.allowed(self.tell(), size))

    def readall(self) -> bytes:
        pieces = []
        while piece := self.read(1 << 16):
            pieces.append(piece)
        return b"".join(pieces)
