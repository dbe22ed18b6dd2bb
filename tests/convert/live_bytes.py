"""How many bytes of tensors are alive at once while something is written."""

import mmap
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lema.convert import buffers as scratch


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of CPU tensors alive at once while a file is being written in `place`: the largest sum seen.

    Building a model without weights allocates each weight for a moment, untouched; that is not counted.
    """

    def __init__(self, place: Path) -> None:
        super().__init__()
        self.place, self.peak, self._alive = place, 0, dict[int, tuple[StorageWeakRef, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not any(self.place.glob(".*.part*")):  # a file, or a directory of files, that is being written
            return result
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {key: value for key, value in self._alive.items() if not value[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._alive.values()))
        return result


class ScratchBytes:
    """Counts the bytes that all `lema.convert.buffers.Scratch` together took from the system: now, and at most."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.peak, self._made = 0, list[weakref.ref[mmap.mmap]]()
        known = {**vars(mmap), "mmap": self._map}
        monkeypatch.setattr(scratch, "mmap", SimpleNamespace(**known))

    @property
    def now(self) -> int:
        return sum(len(memory) for reference in self._made if (memory := reference()) is not None)

    def _map(self, *arguments: Any, **options: Any) -> mmap.mmap:
        memory = mmap.mmap(*arguments, **options)
        self._made.append(weakref.ref(memory))
        self.peak = max(self.peak, self.now)
        return memory
