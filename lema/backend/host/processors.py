"""The processors that a process may keep busy: those of its affinity, and what its control groups
give it of them.

In a container with a quota of four processors on a machine of sixty-four, sixty-four threads run
for a sixteenth of the time and wait for the rest, and each that waits holds up all others.
Libraries follow the affinity, but not the quota.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from lema.backend.host.groups import groups

__all__ = ["usable_processors", "usable_threads"]

ROOT = Path("/")


def usable_processors(root: Path = ROOT) -> float:
    """Return how many hardware threads this process may keep busy, by its affinity and its control
    groups (version 1 or 2); files such as those of `/proc` are read below `root`."""
    threads: float = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    for group in groups(root, "cpu"):
        with suppress(OSError, ValueError):  # no quota, or none that is a number
            if (group / "cpu.max").exists():
                quota, period = (group / "cpu.max").read_text(encoding="utf-8").split()
            else:
                quota, period = (
                    (group / f"cpu.cfs_{name}_us").read_text(encoding="utf-8")
                    for name in ("quota", "period")
                )
            if quota != "max" and int(quota) > 0:
                threads = min(threads, int(quota) / int(period))
    return threads


def usable_threads(root: Path = ROOT) -> int:
    """Return how many threads or processes of this program can compute at once: whole ones, and
    at least one.
    """
    return max(1, int(usable_processors(root)))
