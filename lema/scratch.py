"""Memory for large tensors that come and go, used again by the next ones.

A tensor of a few hundred megabytes is mapped anew each time, and touching its pages for the first time takes several
times as long as filling them. Here the memory of tensors that are gone serves again.
"""

from __future__ import annotations

import mmap
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["LargeInScratch", "Scratch"]

LARGE = 2 << 20  # bytes; smaller tensors are left to torch

_aten = torch.ops.aten


class Scratch:
    """Memory that is used again. It never has more than the tensors alive at once have needed so far."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def bytes(self, nbytes: int) -> Tensor:
        """Return uninitialised memory, uint8 `[nbytes]`; it may be used again when no tensor lies in it any more."""
        if nbytes < LARGE:
            return torch.empty(nbytes, dtype=torch.uint8)
        memory = next((free for free in self._free if len(free) == nbytes), None)
        if memory is None:
            self._free.clear()  # before more is taken: what is free and what is needed shall not add up
            memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            self._free.remove(memory)
        array = np.frombuffer(memory, np.uint8)  # torch keeps it as long as a tensor lies in it
        weakref.finalize(array, self._free.append, memory).atexit = False
        return torch.from_numpy(array)


class LargeInScratch(TorchDispatchMode):
    """Puts what the copying operations make of large tensors into `memory`; the values are the same.

    Tensors that lie one after the other in one allocation are stacked without being copied: the result shares their
    memory. Nothing under this mode may write into its inputs.
    """

    def __init__(self, memory: Scratch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is _aten.stack.default and (whole := _adjacent(*args, **given)) is not None:
            return whole
        into = {_aten.cat.default: _aten.cat.out, _aten.stack.default: _aten.stack.out}.get(func)
        copied = func is _aten.clone.default and given.get("memory_format") is torch.contiguous_format
        if (into is None and not copied) or (like := _large_result(func, args, given)) is None:
            return func(*args, **given)
        result = self._memory.bytes(like.nbytes).view(like.dtype).view(like.shape)
        return _copy(args[0], result) if into is None else into(*args, **given, out=result)


def _adjacent(tensors: list[Tensor], dim: int = 0) -> Tensor | None:
    """Return the stack of tensors that lie one after the other in memory already; None: they do not."""
    first = tensors[0]
    if dim != 0 or first.device.type != "cpu" or first.nbytes == 0:
        return None
    for number, tensor in enumerate(tensors):
        same = tensor.shape == first.shape and tensor.dtype == first.dtype and tensor.is_contiguous()
        if not same or tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        if tensor.data_ptr() != first.data_ptr() + number * first.nbytes:
            return None
    return first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))


def _large_result(func: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Tensor | None:
    """Return the result of an operation without its bytes; None: it is small, or not of plain tensors in memory."""
    tensors = [args[0]] if isinstance(args[0], Tensor) else list(args[0])
    if any(tensor.device.type != "cpu" or tensor.layout != torch.strided for tensor in tensors):
        return None
    if sum(tensor.nbytes for tensor in tensors) < LARGE or len({tensor.dtype for tensor in tensors}) > 1:
        return None
    on_meta = [torch.empty_like(tensor, device="meta") for tensor in tensors]
    like: Tensor = func(on_meta[0] if isinstance(args[0], Tensor) else on_meta, *args[1:], **given)
    return like


def _copy(source: Tensor, target: Tensor) -> Tensor:
    """Copy into contiguous memory. torch turns matrices over in tiles, but a stack of matrices element by element."""
    if source.dim() > 2 and source.stride(-1) != 1 and source.stride(-2) == 1:
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # turning one over is not divided among threads
            list(pool.map(_copy, source, target))
    else:
        bits = {2: torch.int16, 4: torch.int32}.get(source.itemsize, source.dtype)
        target.view(bits).copy_(source.view(bits))
    return target
