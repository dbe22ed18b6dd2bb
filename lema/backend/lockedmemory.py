"""Host memory that the device copies from and to, or computes in.

torch's allocator of page-locked memory takes blocks of the next power of two, up to twice the bytes
that are needed. So where a driver can, memory is mapped as everywhere in LEMA and then registered,
until the last tensor in it is dropped.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Protocol

import torch
from torch import Tensor

from lema.backend.host.limits import limit
from lema.backend.hostmemory import anonymous
from lema.backend.torchstreams import pinned
from lema.errors import MemoryLimitError

__all__ = ["Driver", "HostMemory"]

HOW = (
    "let the process lock more memory (`ulimit -l unlimited`, `docker run --ulimit "
    "memlock=-1`, memlock in "
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

    Memory that is not locked is pageable. A copy from or to it is still right, but the driver moves
    it through a buffer of its own, at a fraction of the speed, and the thread that queues the copy
    may have to wait.

    Args:
        driver: locks memory; None: torch's allocator does, and memory that is given stays as it is.
        page_locked: True: memory that cannot be locked is an error. None: it stays pageable, with
            one warning. False: no memory is locked.
    """

    def __init__(self, driver: Driver | None, page_locked: bool | None = None) -> None:
        self._driver = driver
        self._page_locked = page_locked
        self._warned = False
        self._locked = set[int]()  # addresses of what the driver has locked

    def buffer(self, nbytes: int, memory: Tensor | None = None) -> Tensor:
        """Return uint8 `[nbytes]` at a page boundary; `memory`: as in
        `lema.backend.Backend.host_buffer`.

        Raises:
            MemoryLimitError: it must be locked, and that is not possible.
        """
        if self._driver is None and self._page_locked is not False and nbytes:
            return self._from_allocator(nbytes, memory)
        memory = anonymous(nbytes) if memory is None else memory
        assert memory.dtype == torch.uint8 and memory.shape == (nbytes,), (
            "memory of another size was given"
        )
        if nbytes == 0 or self._page_locked is False or self._driver is None:
            return memory
        # This object is a link between tensors and memory: it is freed after the last tensor,
        # before the memory.
        link = memory.numpy()
        address = link.ctypes.data
        if (refusal := self._driver.lock(address, nbytes)) is not None:
            self._refused(nbytes, refusal)
            return memory
        self._locked.add(address)
        weakref.finalize(link, _unlock, self._driver, self._locked, address).atexit = False
        return torch.from_numpy(link)

    def reached(self, memory: Tensor) -> bool:
        """Return whether memory is in a buffer that the driver has locked."""
        return memory.untyped_storage().data_ptr() in self._locked

    def _from_allocator(self, nbytes: int, memory: Tensor | None) -> Tensor:
        if memory is not None:
            if self._page_locked:
                self._refused(nbytes, "torch locks only memory that it allocates itself")
            return memory
        try:
            return pinned(nbytes)
        except RuntimeError as error:
            self._refused(nbytes, str(error).partition("\n")[0])
            return anonymous(nbytes)

    def _refused(self, nbytes: int, refusal: str) -> None:
        what = (
            f"{nbytes:,} bytes of host memory cannot be page-locked: {refusal}; this process "
            f"may lock {_limit()}"
        )
        if self._page_locked:
            raise MemoryLimitError(
                what, where="page_locked: true", how=f"{HOW}, or set page_locked: false"
            )
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{what}; copies to and from the device will be slower; to fix it, {HOW}",
                stacklevel=4,
            )


def _unlock(driver: Driver, locked: set[int], address: int) -> None:
    locked.discard(address)
    driver.unlock(address)


def _limit() -> str:
    soft, _ = limit("MEMLOCK")
    return "any number of bytes" if soft is None else f"{soft:,} bytes"
