"""What a process has taken and may take of memory and files, as far as its system tells."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import psutil

__all__ = ["Limit", "bounded_memory", "limit", "peak_memory"]

resource: ModuleType | None
try:
    import resource
except ModuleNotFoundError:  # Windows
    resource = None

MAX_GROWTH = 3 << 28  # bytes that the process may ask for in `bounded_memory`

Limit = tuple[int | None, int | None]
"""What a process may take now, and how far it may raise that itself; None: any number."""


def limit(name: str) -> Limit:
    """Return a limit of this process by the end of its name, as `MEMLOCK` or `NOFILE`; none where
    the system has none of that name."""
    kind = getattr(resource, f"RLIMIT_{name}", None)
    if resource is None or kind is None:
        return None, None
    soft, hard = (
        None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(kind)
    )
    return soft, hard


def peak_memory() -> int:
    """Return the most bytes that have been resident in this process."""
    if resource is None:
        memory = psutil.Process().memory_info()
        return int(getattr(memory, "peak_wset", memory.rss))
    peak: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Bound the address space of the process, where the system tells how large that is (Linux):
    what asks for more than 768 MiB in the block gets no memory."""
    pages = _pages()
    if resource is None or pages is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + MAX_GROWTH
    bounds = [bound for bound in (soft, hard) if bound != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([most, *bounds]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _pages() -> int | None:
    """Return how many pages the address space of this process has; None: the system does not
    tell.
    """
    try:
        with open("/proc/self/statm", "rb", buffering=0) as counts:  # noqa: PTH123 - a third of the time, for each chat
            return int(counts.read(64).split()[0])
    except OSError:
        return None
