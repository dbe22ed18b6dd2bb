"""The machine itself: system, processors, memory, and the limits that this process is under.

Files such as those of `/proc` are read below `root`, which tests put elsewhere.
"""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from lema.backend import Fact, Finding, Level
from lema.backend.hostmemory import groups, memory_limit
from lema.config.units import human_bytes

__all__ = ["SECTION", "machine"]


SECTION = "machine"
ROOT = Path("/")
ENOUGH_FILES = 1024  # a large model has some hundred, and two descriptors are open of each
ENOUGH_SHARED = 1 << 30
MAY_LOCK = 1 << 14  # CAP_IPC_LOCK
Limits = Callable[[int], tuple[int, int]]


def machine(root: Path = ROOT, limits: Limits = resource.getrlimit) -> Iterator[Finding]:
    """Tell what the machine is and what this process may take of it."""
    yield Finding(
        SECTION,
        "system",
        Level.OK,
        f"{platform.system()} {platform.release()} on {platform.machine()}.",
        facts={"system": platform.system(), "kernel": platform.release(), "architecture": platform.machine()},
    )
    yield processors(root)
    yield memory(root)
    yield huge_pages(root)
    yield locked_memory(root, limits)
    yield open_files(limits)
    yield shared_memory(root)


def processors(root: Path = ROOT) -> Finding:
    """Tell how many processors there are, and how many of them this process may use."""
    total, usable = os.cpu_count() or 1, usable_processors(root)
    facts: dict[str, Fact] = {
        "model": _model(root),
        "cores": psutil.cpu_count(logical=False),
        "threads": total,
        "usable_threads": usable,
    }
    what = f"{facts['model'] or 'unknown processor'}, {total} hardware threads"
    if usable < total:
        what = f"{what}, of which this process may use {usable:g}"
        return Finding(SECTION, "processors", Level.NOTE, f"{what}.", facts=facts)
    return Finding(SECTION, "processors", Level.OK, f"{what}.", facts=facts)


def usable_processors(root: Path = ROOT) -> float:
    """Return how many hardware threads this process may keep busy, by its affinity and its control group."""
    threads: float = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in groups(root, "cpu"):
        with suppress(OSError, ValueError):
            if (group / "cpu.max").exists():
                quota, period = (group / "cpu.max").read_text().split()
            else:
                quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if quota != "max" and int(quota) > 0:
                threads = min(threads, int(quota) / int(period))
    return threads


def memory(root: Path = ROOT) -> Finding:
    """Tell the memory there is, and the limit of this process's control group, if it is less."""
    known = psutil.virtual_memory()
    limit = memory_limit(root)
    facts: dict[str, Fact] = {
        "total_bytes": known.total,
        "available_bytes": known.available,
        "swap_bytes": psutil.swap_memory().total,
        "limit_bytes": limit,
    }
    what = f"{human_bytes(known.total)} of memory, {human_bytes(known.available)} of it available"
    if limit is None or limit >= known.total:
        return Finding(SECTION, "memory", Level.OK, f"{what}.", facts=facts)
    return Finding(
        SECTION,
        "memory",
        Level.WARNING,
        f"{what}; this process's control group may have {human_bytes(limit)}, which a fraction or auto in a config "
        "does not know.",
        f"set host_memory in bytes, below {human_bytes(limit)}",
        facts=facts,
    )


def huge_pages(root: Path = ROOT) -> Finding:
    """Tell whether memory for layers can be in huge pages."""
    setting = _chosen(root / "sys/kernel/mm/transparent_hugepage/enabled")
    facts: dict[str, Fact] = {"setting": setting}
    if setting in ("always", "madvise"):
        return Finding(SECTION, "huge pages", Level.OK, f"Huge pages: {setting}.", facts=facts)
    return Finding(
        SECTION,
        "huge pages",
        Level.NOTE,
        "Memory for layers is not in huge pages: filling it costs more requests and more work.",
        "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled" if setting else "",
        facts=facts,
    )


def locked_memory(root: Path = ROOT, limits: Limits = resource.getrlimit) -> Finding:
    """Tell how much memory this process may lock."""
    soft, hard = limits(resource.RLIMIT_MEMLOCK)
    exempt = bool(_capabilities(root) & MAY_LOCK)
    facts: dict[str, Fact] = {"limit_bytes": _limit(soft), "hard_limit_bytes": _limit(hard), "exempt": exempt}
    if soft == resource.RLIM_INFINITY or exempt:
        why = "this process is exempt from the limit" if exempt else "there is no limit"
        return Finding(SECTION, "locked memory", Level.OK, f"Any memory may be locked: {why}.", facts=facts)
    return Finding(
        SECTION,
        "locked memory",
        Level.NOTE,
        f"This process may lock {human_bytes(soft)} of memory; some systems hold page-locked copies to that.",
        "ulimit -l unlimited (memlock in /etc/security/limits.conf; --ulimit memlock=-1 for a container)",
        facts=facts,
    )


def open_files(limits: Limits = resource.getrlimit) -> Finding:
    """Tell how many files this process may have open."""
    soft, hard = limits(resource.RLIMIT_NOFILE)
    facts: dict[str, Fact] = {"limit": _limit(soft), "hard_limit": _limit(hard)}
    if soft == resource.RLIM_INFINITY:
        return Finding(SECTION, "open files", Level.OK, "Any number of files may be open.", facts=facts)
    what = f"{soft:,} files may be open"
    if soft >= ENOUGH_FILES:
        return Finding(SECTION, "open files", Level.OK, f"{what}.", facts=facts)
    return Finding(
        SECTION,
        "open files",
        Level.WARNING,
        f"Only {what}, and a model may lie in some hundred of them.",
        f"ulimit -n {ENOUGH_FILES}",
        facts=facts,
    )


def shared_memory(root: Path = ROOT) -> Finding:
    """Tell whether several processes of this machine can share memory."""
    directory = root / "dev/shm"
    size = free = None
    with suppress(OSError):
        status = os.statvfs(directory)
        size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    anonymous = hasattr(os, "memfd_create")
    facts: dict[str, Fact] = {"total_bytes": size, "free_bytes": free, "memfd": anonymous}
    if not anonymous:
        return Finding(
            SECTION,
            "shared memory",
            Level.WARNING,
            "Processes of this machine cannot share host memory: this system has no memfd_create.",
            "start one process per machine",
            facts=facts,
        )
    if size is not None and size < ENOUGH_SHARED:
        return Finding(
            SECTION,
            "shared memory",
            Level.NOTE,
            f"/dev/shm has {human_bytes(size)}; weights are shared without it, but libraries that carry tensors "
            "between processes use it.",
            "--shm-size=1g for a container",
            facts=facts,
        )
    amount = "" if size is None else f", and /dev/shm has {human_bytes(size)}"
    return Finding(SECTION, "shared memory", Level.OK, f"Processes can share host memory{amount}.", facts=facts)


def _model(root: Path) -> str:
    with suppress(OSError):
        for line in (root / "proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model"):
                return value.strip()
    return platform.processor()


def _chosen(file: Path) -> str:
    """Return the setting in brackets: `always [madvise] never`; empty: there is no such setting."""
    with suppress(OSError):
        return file.read_text().partition("[")[2].partition("]")[0]
    return ""


def _capabilities(root: Path) -> int:
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/status").read_text().splitlines():
            if line.startswith("CapEff:"):
                return int(line.split()[1], 16)
    return 0


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value
