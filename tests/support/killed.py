"""A run that is killed at a given change of its disk, in this process: from then on nothing reaches
the disk any more.

It costs no start of Python, and so can be done at every change. What the system holds for a process
(locks, open files) goes as the exception passes through, and cleaning up fails, as it never happens
after a kill.
"""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults.diskseam import DiskSeam
from phaseruns import Killed


def of_the_run(kind: str, path: Path) -> bool:
    """Whether a change is of the record, or makes something appear under its name, or go."""
    return path.name == "metrics.jsonl" or (
        kind in ("rename", "replace") and ".part" not in path.parent.name
    )


def killed(
    root: Path, patch: pytest.MonkeyPatch, work: Callable[[], Any], at: int, *, last: bool = False
) -> list[str]:
    """Do `work`, and let its change number `at` be its last; return those that came to be. Below 0
    it is not killed; and it may come to its end before, if it is the `last`."""
    seen: list[str] = []
    dead = False

    def look(kind: str, path: Path, done: float) -> None:
        nonlocal dead
        if dead:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        if of_the_run(kind, path):
            seen.append(f"{kind} {path.name} {done}")
            if len(seen) - 1 == at:
                dead = True
                raise Killed

    root.mkdir(parents=True, exist_ok=True)
    with patch.context() as within:
        DiskSeam(root, look).install(within.setattr)
        try:
            work()
        except BaseException:  # because cleaning up fails, in whatever way it does
            if not dead:
                raise
    assert dead or last or at < 0, f"{len(seen)} changes are fewer than {at}"
    return seen
