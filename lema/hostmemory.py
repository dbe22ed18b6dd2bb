"""Host memory by the page: untouched, at a page boundary, in huge pages where the system has them."""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["HUGE_PAGE", "anonymous", "mapped", "read_only"]

HUGE_PAGE = 2 << 20


def anonymous(nbytes: int) -> Tensor:
    """Return uint8 `[nbytes]`, page-aligned, untouched (so not yet resident) memory of this process alone.

    In huge pages, as far as whole ones go: a disk fills them in fewer, larger requests, at a fraction of the work.
    """
    import torch

    huge = nbytes // HUGE_PAGE * HUGE_PAGE if hasattr(mmap, "MADV_HUGEPAGE") else 0
    room = max(nbytes, 1) + (HUGE_PAGE if huge else 0)  # addresses, not memory: what is never touched takes none
    private = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # else it is shared memory
    start = -torch.frombuffer(private, dtype=torch.uint8).data_ptr() % HUGE_PAGE if huge else 0
    if huge:
        with suppress(OSError):  # a system without them has pages all the same
            private.madvise(mmap.MADV_HUGEPAGE, start, huge)
    return torch.frombuffer(private, dtype=torch.uint8, count=max(nbytes, 1), offset=start)[:nbytes]


def mapped(descriptor: int, nbytes: int) -> Tensor:
    """Return uint8 `[nbytes]`, page-aligned: the first bytes of a file, as every process sees and changes them."""
    import torch

    shared = mmap.mmap(descriptor, max(nbytes, 1), flags=mmap.MAP_SHARED)
    return torch.frombuffer(shared, dtype=torch.uint8)[:nbytes]


def read_only(memory: Tensor) -> None:
    """Let whoever writes to `memory`, whole pages of this process, be ended by the system (SIGSEGV); reads go on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.numel()), mmap.PROT_READ):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
