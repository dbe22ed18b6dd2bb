"""The lock of an output directory, which lets one run at a time write there, and clears what killed runs left in it.

A second run would rotate the first one's checkpoints away and mix their logs. The lock is the kernel's (`flock`) on a
file in that directory. It goes with the process that holds it, so the file of a killed run locks nothing.
"""

import errno
import fcntl
import os
import re
import shutil
import socket
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from lema.backend import Replicas
from lema.backend.group import first_alone
from lema.errors import ConfigError, DiskError
from lema.storage.atomic import NO_LOCKS, sweep

__all__ = ["LOCK", "one_run", "run_lock"]

LOCK = ".lock"


@contextmanager
def run_lock(output_dir: Path) -> Iterator[bool]:
    """Have a directory to oneself, in a `with` block; it is given whether there is a lock. The directory is made if
    need be. Where the file system knows no locks, a warning says so, and the run goes on without. `ConfigError`:
    another run writes there; says which process it is. `DiskError`: the lock's file cannot be written."""
    file, made = output_dir / LOCK, not output_dir.exists()
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        descriptor = _taken(file)
    except OSError as error:
        what = f"the output directory cannot be written to: {error.strerror}"
        how = "check that the directory exists and is writable, or choose another output_dir"
        raise DiskError(what, where=str(error.filename or output_dir), how=how) from error
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            with suppress(OSError):  # the lock goes with the descriptor, whatever becomes of the file
                file.unlink()
            os.close(descriptor)
        if made:
            with suppress(OSError):  # a run that wrote nothing leaves nothing
                output_dir.rmdir()


def _taken(file: Path) -> int | None:
    """Return the descriptor of the lock's file, locked; None: there are no locks there."""
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another file, or none, has the name where a run that ended meanwhile has taken its file with it.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), file.stat()):
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
                    return descriptor
        except OSError as error:
            pid, _, host = os.pread(descriptor, 256, 0).decode(errors="replace").strip().partition(" ")
            holder = f"process {pid} on {host}" if pid and host else "its process number is not known"
            os.close(descriptor)
            if error.errno == errno.EWOULDBLOCK:
                what = f"another run writes to this directory: {holder}"
                how = "wait until it has ended, or choose another output_dir"
                raise ConfigError(what, where=str(file.parent), how=how) from error
            with suppress(OSError):
                file.unlink()
            if error.errno not in NO_LOCKS:
                raise
            warnings.warn(f"{file.parent}: this file system has no locks to keep a second run out", stacklevel=5)
            return None
        os.close(descriptor)


# The name of the save at a run's end until it is whole, among its checkpoints.
UNFINISHED = re.compile(r"\.adapter-\w+|\.(lema_config\.json|metrics\.jsonl|loss\.png)\.\d+\.part")


@contextmanager
def one_run(replicas: Replicas, output_dir: Path, below: Sequence[Path] = ()) -> Iterator[None]:
    """Have a run write alone to a directory, in a `with` block; of several processes the first has its lock. All
    processes call this. The directories `below` hold checkpoints as well. Every process raises `run_lock`'s errors."""
    with ExitStack() as stack:

        def enter() -> None:
            alone = stack.enter_context(run_lock(output_dir))
            for directory in (output_dir, *below):
                sweep(directory, alone=alone)
            for left in list(output_dir.iterdir()) if alone else ():
                # What a run that was killed while it saved its adapter has left; what another user owns is not ours.
                with suppress(OSError):
                    if UNFINISHED.fullmatch(left.name) and left.is_dir() and not left.is_symlink():
                        shutil.rmtree(left)
                    elif UNFINISHED.fullmatch(left.name):
                        left.unlink()

        first_alone(replicas, enter)
        yield
