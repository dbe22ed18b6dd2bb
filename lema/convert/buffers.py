"""Memory that keeps a conversion fast: files read ahead into the page cache, and buffers used again for large tensors.

`ReadAhead` asks the system for the bytes that will be needed next; they go to the page cache, which the system takes
back when memory is short. Large tensors that come and go share memory (`Scratch`), because touching fresh pages for the
first time takes several times as long as filling them.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lema.storage.header import TensorRecord

__all__ = ["WINDOW_BYTES", "LargeInScratch", "ReadAhead", "Scratch"]

WINDOW_BYTES = 256 << 20  # asked for and not read yet, at most
STEP_BYTES = 128 << 10  # of one request: of a longer one some systems read only so much


class ReadAhead:
    """Requests the bytes of tensors in the order they will be read, a bounded way ahead; use it in a `with` block.

    Requests change no result: a file that cannot be opened here is an error where it is read.
    """

    def __init__(self, records: Iterable[TensorRecord]) -> None:
        self._records = list(records)
        self._allowed, self._closed = WINDOW_BYTES, False
        self._moved = threading.Condition()
        self._thread = threading.Thread(target=self._request, name="lema-read-ahead", daemon=True)

    def advance(self, nbytes: int) -> None:
        """`nbytes` more were read."""
        with self._moved:
            self._allowed += nbytes
            self._moved.notify()

    def __enter__(self) -> Self:
        if hasattr(os, "posix_fadvise"):  # macOS has none
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._moved:
            self._closed = True
            self._moved.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _request(self) -> None:
        asked = 0
        with ExitStack() as files:
            descriptors: dict[Path, int | None] = {}
            for record in self._records:
                if record.file not in descriptors:
                    descriptors[record.file] = _opened(record.file, files)
                descriptor = descriptors[record.file]
                for offset, nbytes in _steps(record):
                    asked += nbytes
                    with self._moved:
                        while asked > self._allowed and not self._closed:
                            self._moved.wait()
                        if self._closed:
                            return
                    if descriptor is not None:
                        os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_WILLNEED)


def _opened(file: Path, files: ExitStack) -> int | None:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    files.callback(os.close, descriptor)
    return descriptor


def _steps(record: TensorRecord) -> Iterator[tuple[int, int]]:
    end = record.offset + record.nbytes
    for offset in range(record.offset, end, STEP_BYTES):
        yield offset, min(STEP_BYTES, end - offset)


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
