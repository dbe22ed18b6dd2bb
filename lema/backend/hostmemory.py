"""Host memory by the page, and the limits that control groups (version 1 or 2) set to this process
and others together.

`anonymous` returns untouched memory at a page boundary, in huge pages where the system has them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from lema.backend.host.clibrary import c_function
from lema.backend.host.groups import groups

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "anonymous",
    "mapped",
    "memory_available",
    "memory_left",
    "memory_limit",
    "private_pages",
    "read_only",
    "relabelled",
]

HUGE_PAGE = 2 << 20


def anonymous(nbytes: int) -> Tensor:
    """Return uint8 `[nbytes]`, page-aligned, untouched (so not yet resident) memory of this process
    alone. In huge pages, as far as whole ones go: a disk fills them in fewer, larger requests, at a
    fraction of the work."""
    import torch

    huge = nbytes // HUGE_PAGE * HUGE_PAGE if hasattr(mmap, "MADV_HUGEPAGE") else 0
    # addresses, not memory: what is never touched takes none
    mapped_bytes = max(nbytes, 1) + (HUGE_PAGE if huge else 0)
    private = private_pages(mapped_bytes)
    start = -torch.frombuffer(private, dtype=torch.uint8).data_ptr() % HUGE_PAGE if huge else 0
    if huge:
        with suppress(OSError):  # a system without them has pages all the same
            private.madvise(mmap.MADV_HUGEPAGE, start, huge)
    return torch.frombuffer(private, dtype=torch.uint8, count=max(nbytes, 1), offset=start)[:nbytes]


def private_pages(nbytes: int) -> mmap.mmap:
    """Return memory of this process alone, which the system finds when it is first written."""
    if not hasattr(mmap, "MAP_PRIVATE"):  # on Windows no other process can have it
        return mmap.mmap(-1, nbytes)
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def mapped(descriptor: int, nbytes: int) -> Tensor:
    """Return uint8 `[nbytes]`, page-aligned: the first bytes of a file, as every process sees
    and changes them.
    """
    import torch

    shared = mmap.mmap(descriptor, max(nbytes, 1))
    return torch.frombuffer(shared, dtype=torch.uint8)[:nbytes]


def read_only(memory: Tensor) -> None:
    """Protect `memory`, whole pages of this process: the system ends a process that writes there
    (SIGSEGV). Where the C library has no such call, nothing keeps anyone from writing."""
    protect = c_function("mprotect")
    if protect is None:
        return
    if protect(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.numel()), mmap.PROT_READ):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def relabelled(memory: Tensor, device: torch.device) -> Tensor:
    """Return the same bytes as a tensor of a device that can compute in them; they stay until both
    tensors are dropped.

    DLPack says of a tensor where it is: in a capsule, after the address
    (https://dmlc.github.io/dlpack/latest/c_api.html). What torch says there of a tensor on the
    device is put in the place of what it says of `memory`. `RuntimeError`: torch knows that the
    device cannot.
    """
    import torch
    from torch.utils import dlpack

    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype = ctypes.c_void_p
    pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    here = dlpack.to_dlpack(memory)  # type: ignore[attr-defined] # torch does not declare it
    there = dlpack.to_dlpack(torch.empty(1, dtype=memory.dtype, device=device))  # type: ignore[attr-defined] # torch does not declare it
    kind_and_index = ctypes.c_int32 * 2
    address = ctypes.sizeof(ctypes.c_void_p)
    source, target = (
        kind_and_index.from_address(pointer(capsule, b"dltensor") + address)
        for capsule in (there, here)
    )
    ctypes.memmove(target, source, ctypes.sizeof(target))
    return dlpack.from_dlpack(here)


ROOT = Path("/")
UNLIMITED = 1 << 60  # groups of the first version say a number near 2 ** 63 when they mean none


def memory_limit(root: Path = ROOT) -> int | None:
    """Return the bytes that this process's control groups may have; None: as many as there are."""
    return min((limit for _, limit in _limits(root)), default=None)


def memory_left(root: Path = ROOT) -> int | None:
    """Return the bytes that this process's control groups may still take; None: as many as there
    are. Files in memory count as free, because the system drops them when memory is short."""
    return min((limit - _used(group) for group, limit in _limits(root)), default=None)


def memory_available() -> int:
    """Return the bytes that the machine can still give this process, and its control groups, if
    they are limited.
    """
    available = int(psutil.virtual_memory().available)
    left = memory_left()
    return available if left is None else min(available, left)


def _limits(root: Path) -> Iterator[tuple[Path, int]]:
    for group in groups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # not there, or "max"
                if (limit := int((group / name).read_text(encoding="utf-8"))) < UNLIMITED:
                    yield group, limit


def _used(group: Path) -> int:
    used = 0
    for name in ("memory.current", "memory.usage_in_bytes"):
        with suppress(OSError, ValueError):
            used = int((group / name).read_text(encoding="utf-8"))
    with suppress(OSError, ValueError):
        stat = dict(
            line.split()
            for line in (group / "memory.stat").read_text(encoding="utf-8").splitlines()
        )
        files = int(stat.get("total_cache", stat.get("file", 0)))
        # Memory that processes share is counted among files, and is not dropped.
        used -= files - int(stat.get("total_shmem", stat.get("shmem", 0)))
    return max(used, 0)
