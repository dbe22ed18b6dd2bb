"""Where the quantised base of a run is kept, and the lock of that place."""

import hashlib
import os
import re
import weakref
from pathlib import Path

from lema.backend.host.filelocks import lock
from lema.backend.host.files import BINARY
from lema.config import LemaConfig
from lema.errors import DiskError
from lema.model.files import ModelFiles
from lema.storage.diskspace import make_private, user_cache
from lema.storage.regular import expanded

__all__ = ["cache_directory", "is_locked_here", "locked"]

SNAPSHOTS = re.compile(r"models--(?P<name>.+)/snapshots/(?P<commit>[^/]+)$")


def cache_directory(config: LemaConfig, files: ModelFiles, kind: str, suffix: str) -> Path:
    """Return the directory of a model's quantised weights, which need not be there: beside the
    model's, unless that is in the hub's cache, or cannot be written to; else in the user's cache;
    or in the folder of the settings. `DiskError`: the cache cannot be used.

    Args:
        config: the settings.
        files: the model.
        kind: what the weights are quantised to.
        suffix: the end of the directory's name.
    """
    directory = files.directory.resolve()
    snapshot = SNAPSHOTS.search(directory.as_posix())
    name = directory.name if snapshot is None else f"{snapshot['name']}-{snapshot['commit'][:8]}"
    ending = f"lema-{kind}{suffix}"
    # Two models may have one name, but beside each other they cannot.
    digest = hashlib.sha256(str(directory).encode()).hexdigest()[:8]
    alone = f"{name}-{ending}" if snapshot else f"{name}-{digest}-{ending}"
    if config.quantize_base_cache is not None:
        return expanded(config.quantize_base_cache).absolute() / alone
    sibling = directory.with_name(f"{name}-{ending}")
    if snapshot is None and (sibling.is_dir() or os.access(directory.parent, os.W_OK)):
        return sibling
    folder = user_cache("quantized")
    make_private(folder)
    return folder / alone


class FolderLock:
    """The lock of a directory, until it is closed, or nobody refers to it any more.

    Args:
        target: the directory.
        descriptor: the open file that is locked; None: there is none, and nothing to lock.
    """

    def __init__(self, target: Path, descriptor: int | None) -> None:
        self.target = target
        self._finalizer = (
            None if descriptor is None else weakref.finalize(self, os.close, descriptor)
        )

    def close(self) -> None:
        """Let others have it; twice is harmless."""
        if self._finalizer is not None:
            self._finalizer()

    @property
    def is_open(self) -> bool:
        """Whether it still keeps others out."""
        return self._finalizer is not None and self._finalizer.alive


_taken = weakref.WeakSet[FolderLock]()


def is_locked_here(target: Path) -> bool:
    """Whether this process itself has the lock of a directory."""
    return any(folder.is_open and folder.target == target for folder in _taken)


def locked(target: Path, *, shared: bool) -> FolderLock | None:
    """Take the lock of a directory that is to be made, or used; None: another has it.

    Args:
        target: the directory; the lock is a file beside it.
        shared: others may use it at the same time.
    """
    file = target.with_name(f".{target.name}.lock")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | BINARY, 0o666)
    except OSError as error:
        if shared and target.is_dir():  # on a disk that is only read, nobody replaces it
            return FolderLock(target, None)
        what = f"the quantised base cannot be kept there: {error.strerror}"
        how = "set quantize_base_cache to a folder that may be written to"
        raise DiskError(what, where=str(target.parent), how=how) from error
    if lock(descriptor, shared=shared, wait=False) is False:
        os.close(descriptor)
        return None
    taken = FolderLock(target, descriptor)
    _taken.add(taken)
    return taken
