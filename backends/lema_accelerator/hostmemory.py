"""Page-locked host memory for copies from and to the device, exactly as large as requested.

`pin_memory()` takes blocks of the next power of two, up to twice the bytes that are needed. Here memory is mapped as
everywhere in LEMA and then registered with the driver, until the last tensor in it is dropped.
"""

from __future__ import annotations

import resource
import warnings
import weakref
from typing import Protocol

import torch
from torch import Tensor

from lema.backend.hostmemory import anonymous
from lema.errors import MemoryLimitError

__all__ = ["Driver", "HostMemory"]

HOW = (
    "let the process lock more memory (`ulimit -l unlimited`, `docker run --ulimit memlock=-1`, memlock in "
    "/etc/security/limits.conf, LimitMEMLOCK of a service)"
)


class Driver(Protocol):
    """A driver that locks memory."""

    def lock(self, address: int, nbytes: int) -> str | None:
        """Lock memory for the device; return None, or the reason why it cannot be locked."""

    def unlock(self, address: int) -> None:
        """Unlock memory that `lock` locked."""


class HostMemory:
    """Host buffers of one device.

    Memory that is not locked is pageable. A copy from or to it is still right, but the driver moves it through a
    buffer of its own, at a fraction of the speed, and the thread that queues the copy may have to wait.

    Args:
        driver: locks memory.
        page_locked: True: memory that cannot be locked is an error. None: it stays pageable, with one warning.
            False: no memory is locked.
    """

    def __init__(self, driver: Driver, page_locked: bool | None = None) -> None:
        self._driver, self._page_locked = driver, page_locked
        self._warned = False

    def buffer(self, nbytes: int, memory: Tensor | None = None) -> Tensor:
        """Return uint8 `[nbytes]` at a page boundary; `memory`: as in `lema.backend.Backend.host_buffer`.

        Raises:
            MemoryLimitError: it must be locked, and that is not possible.
        """
        memory = anonymous(nbytes) if memory is None else memory
        assert memory.dtype == torch.uint8 and memory.shape == (nbytes,), "memory of another size was given"
        if nbytes == 0 or self._page_locked is False:
            return memory
        # This object is a link between tensors and memory: it is freed after the last tensor, before the memory.
        link = memory.numpy()
        address = link.ctypes.data
        if (refusal := self._driver.lock(address, nbytes)) is not None:
            self._refused(nbytes, refusal)
            return memory
        weakref.finalize(link, self._driver.unlock, address).atexit = False
        return torch.from_numpy(link)

    def _refused(self, nbytes: int, refusal: str) -> None:
        what = f"{nbytes:,} bytes of host memory cannot be page-locked: {refusal}; this process may lock {_limit()}"
        if self._page_locked:
            raise MemoryLimitError(what, where="page_locked: true", how=f"{HOW}, or set page_locked: false")
        if not self._warned:
            self._warned = True
            warnings.warn(f"{what}; copies to and from the device will be slower; to fix it, {HOW}", stacklevel=4)


def _limit() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "any number of bytes" if soft == resource.RLIM_INFINITY else f"{soft:,} bytes"
