"""Gives freed memory back to the system where memory is scarce.

Here malloc is the device's allocator. glibc's keeps most of what is freed, for the next allocation.
Where tensors that wait for the backward lie between others that are freed, some hundred megabytes
of that fit no later allocation, and no plan counts them. That does no harm while the machine has
memory left. In a control group with little more memory than the plan needs, the system would end
the process. To give memory back always would cost time: it is soon taken again.
"""

from __future__ import annotations

from collections.abc import Callable

import psutil

from lema.backend.host.clibrary import c_function
from lema.backend.hostmemory import memory_available

__all__ = ["Heap"]

LEAST = 256 << 20  # bytes; where fewer are available, memory is scarce
PART = 6  # or where fewer are available than this part of what the process has
# bytes by which the process grows before it looks again, because looking takes half a millisecond
GROWTH = 16 << 20


class Heap:
    """The memory that malloc manages in this process. Nothing is given back where malloc is not
    glibc's.
    """

    def __init__(self) -> None:
        self._seen = 0  # the process's own bytes when it looked last
        self._process = psutil.Process()
        self._trim: Callable[[int], int] | None = c_function("malloc_trim")

    def check(self) -> None:
        """Give free memory back if the process has grown and memory is scarce."""
        if self._trim is None:
            return
        if (nbytes := self._own_bytes()) < self._seen + GROWTH:
            self._seen = min(self._seen, nbytes)
            return
        if memory_available() < max(LEAST, nbytes // PART):
            self._trim(0)
            nbytes = self._own_bytes()
        self._seen = nbytes

    def _own_bytes(self) -> int:
        """Return the resident bytes that are no pages of files."""
        memory = self._process.memory_info()
        return int(memory.rss - memory.shared)
