"""The lock of an output directory, which lets one run at a time write there, and clears what killed
runs left in it.

A second run would rotate the first one's checkpoints away and mix their logs. The lock is the
system's on a file in that directory. It goes with the process that holds it, so the file of a
killed run locks nothing.
"""

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
from lema.backend.host.filelocks import lock
from lema.backend.host.files import BINARY, NO_FOLLOW, OPEN_NAMES_LOCKED
from lema.errors import ConfigError, DiskError
from lema.storage.atomic import sweep
from lema.storage.regular import check_target

__all__ = ["LOCK", "one_run", "run_lock"]

LOCK = ".lock"


@contextmanager
def run_lock(output_dir: Path) -> Iterator[bool]:
    """Have a directory to oneself, in a `with` block; it is given whether there is a lock. The
    directory is made if need be. Where the file system knows no locks, a warning says so, and the
    run goes on without. `ConfigError`: another run writes there; says which process it is.
    `DiskError`: the lock's file cannot be written."""
    file = output_dir / LOCK
    is_new = not output_dir.exists()
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
            _give_back(descriptor, file)
        if is_new:
            with suppress(OSError):  # a run that wrote nothing leaves nothing
                output_dir.rmdir()


def _give_back(descriptor: int, file: Path) -> None:
    """Remove the lock's file and close it; the lock goes with the descriptor, whatever becomes
    of the file.
    """
    if OPEN_NAMES_LOCKED:
        os.close(descriptor)
    with suppress(OSError):
        file.unlink()
    # where it can, the file goes first, or it could be another run's by then
    if not OPEN_NAMES_LOCKED:
        os.close(descriptor)


def _taken(file: Path) -> int | None:
    """Return the descriptor of the lock's file, locked; None: there are no locks there."""
    if not NO_FOLLOW:
        check_target(file)
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | NO_FOLLOW | BINARY, 0o666)
        try:
            if os.fstat(descriptor).st_nlink > 1:  # as an archive may bring it
                what = (
                    "the file of the directory's lock is another file, too, which would be "
                    "written over"
                )
                raise ConfigError(what, where=str(file), how="delete it")
            locked = lock(descriptor, wait=False)
            if locked is None:
                _give_back(descriptor, file)
                warnings.warn(
                    f"{file.parent}: this file system has no locks to keep a second run out",
                    stacklevel=5,
                )
                return None
            if not locked:
                raise ConfigError(
                    f"another run writes to this directory: {_holder(descriptor)}",
                    where=str(file.parent),
                    how="wait until it has ended, or choose another output_dir",
                )
            # Another file, or none, has the name where a run that ended meanwhile has taken its
            # file with it.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), file.stat()):
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode())
                    return descriptor
        except ConfigError:
            os.close(descriptor)
            raise
        except OSError:
            _give_back(descriptor, file)
            raise
        os.close(descriptor)


def _holder(descriptor: int) -> str:
    """Return which process wrote into the lock's file."""
    pid, _, host = os.read(descriptor, 256).decode(errors="replace").strip().partition(" ")
    return f"process {pid} on {host}" if pid and host else "its process number is not known"


# The name of the save at a run's end until it is whole, among its checkpoints.
UNFINISHED = re.compile(r"\.adapter-\w+|\.(lema_config\.json|metrics\.jsonl|loss\.png)\.\d+\.part")


@contextmanager
def one_run(replicas: Replicas, output_dir: Path, below: Sequence[Path] = ()) -> Iterator[None]:
    """Have a run write alone to a directory, in a `with` block; of several processes the first has
    its lock. All processes call this. The directories `below` hold checkpoints as well. Every
    process raises `run_lock`'s errors."""
    with ExitStack() as stack:

        def enter() -> None:
            alone = stack.enter_context(run_lock(output_dir))
            for directory in (output_dir, *below):
                sweep(directory, alone=alone)
            for left in list(output_dir.iterdir()) if alone else ():
                # What a run that was killed while it saved its adapter has left; what another user
                # owns is not ours.
                with suppress(OSError):
                    if UNFINISHED.fullmatch(left.name) and left.is_dir() and not left.is_symlink():
                        shutil.rmtree(left)
                    elif UNFINISHED.fullmatch(left.name):
                        left.unlink()

        first_alone(replicas, enter)
        yield
