"""Processes that cost no imports: forked from one that has made them, and that runs no thread of
its own.
"""

import contextlib
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from mmap import mmap
from pathlib import Path

import pickles

from faults.outcome import Outcome

__all__ = [
    "CRASHED",
    "HUNG",
    "UNPICKLED",
    "Child",
    "Ended",
    "Marks",
    "fork",
    "import_noted",
    "note_imports",
    "run",
]
__all__ += ["unpickled", "warm"]

CRASHED = 99  # the exit code of a child whose work raised
HUNG = 98  # of one that was killed because it took too long
UNPICKLED = 97  # of one in which a file was read through pickle
PATIENCE = 120.0  # seconds that a child may take, on a machine that does much else


@dataclass(frozen=True)
class Ended:
    """How a child ended: its exit code, minus the number of the signal that killed it, or
    `HUNG`; and what it said.
    """

    code: int
    said: str


class Marks:
    """Numbers that a child writes and its parent reads, at once and whatever becomes of the
    child.
    """

    def __init__(self, count: int = 8) -> None:
        self._memory = mmap(-1, 8 * count)  # shared with what is forked
        self._numbers = memoryview(self._memory).cast("q")

    def __getitem__(self, index: int) -> int:
        return self._numbers[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._numbers[index] = value

    def clear(self) -> None:
        for index in range(len(self._numbers)):
            self._numbers[index] = 0


class Child:
    """A forked process."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid = pid
        self._log = log
        self._status = -1

    def ended(self) -> bool:
        """Whether it has ended by now."""
        if self._status < 0:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = status
        return self._status >= 0

    def send(self, number: signal.Signals) -> bool:
        """Send a signal, unless the child has ended already; say whether it was sent."""
        if self.ended():
            return False
        os.kill(self.pid, number)
        return True

    def wait(self, patience: float = PATIENCE) -> Ended:
        """Wait for the end; a child that does not come to it is killed."""
        until = time.monotonic() + patience
        hung = False
        while not self.ended():
            if time.monotonic() > until:
                hung = True
                os.kill(self.pid, signal.SIGKILL)
                until += patience
            time.sleep(0.002)
        code = HUNG if hung else os.waitstatus_to_exitcode(self._status)
        said = self._log.read_text(encoding="utf-8", errors="replace")
        if code >= 0:
            _looked.append(said if code == UNPICKLED else "")
        return Ended(code, said)


_looked: list[str] = []  # of each child that came to its own end: what was found of pickles


def unpickled() -> Outcome:
    """Return what was found of pickles in the children that have come to an end of their own,
    all being watched.
    """
    failures = tuple(said for said in _looked if said)
    fault = "a file read through pickle in any of these runs, by audit hook"
    required = "none"
    return Outcome(fault, required, len(_looked), len(_looked) - len(failures), failures)


def fork(work: Callable[[], int], log: Path) -> Child:
    """Start `work` in a child whose output goes to `log`; its result is the exit code."""
    sys.stdout.flush()
    sys.stderr.flush()
    # because a collection in the child writes to every object's page, which is then no longer
    # shared
    gc.freeze()
    pid = os.fork()
    if pid:
        return Child(pid, log)
    code = CRASHED
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(descriptor, number)
        pickles.watch()
        code = work()
        if told := pickles.found():
            print("\n".join(told))  # noqa: T201 - to the log
            code = UNPICKLED
    except BaseException:  # noqa: BLE001 - told in the log, by which the parent sees it
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def run(work: Callable[[], int], log: Path, patience: float = PATIENCE) -> Ended:
    """Run `work` in a child to its end."""
    return fork(work, log).wait(patience)


def note_imports(names: Path) -> None:
    """Write down what this child has imported, for `import_noted` of its parent."""
    names.write_text("\n".join(list(sys.modules)), encoding="utf-8")


def import_noted(names: Path) -> None:
    """Import here what a child has noted, so that later children need not.

    Raises:
        RuntimeError: it left a thread in this process, which must not be forked then.
    """
    for name in names.read_text(encoding="utf-8").split():
        if name not in sys.modules:
            # made in the child, or imported under another name
            with contextlib.suppress(ImportError):
                import_module(name)
    if (threads := len(os.listdir("/proc/self/task"))) > 1:  # noqa: PTH208 - there is no Path for one's own threads
        raise RuntimeError(f"{threads - 1} threads run beside the one that forks")


def warm(work: Callable[[], int], log: Path) -> Ended:
    """Run `work` in a child and import here what it imported; `RuntimeError` as of
    `import_noted`.
    """
    names = log.with_suffix(".modules")

    def noted() -> int:
        code = work()
        note_imports(names)
        return code

    ended = run(noted, log, 5 * PATIENCE)
    if ended.code == 0:
        import_noted(names)
    return ended
