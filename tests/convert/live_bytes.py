"""How many bytes of tensors are alive at once while something is written."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lema.backend.hostmemory import anonymous
from lema.model import outer_weights


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of CPU tensors alive at once while a file is being written in `place`: the
    largest sum seen.

    Building a model without weights allocates each weight for a moment, untouched; that is not
    counted.
    """

    def __init__(self, place: Path) -> None:
        super().__init__()
        self.place = place
        self.peak = 0
        self._alive = dict[int, tuple[StorageWeakRef, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # a file, or a directory of files, that is being written
        if not any(self.place.glob(".*.part*")):
            return result
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {key: value for key, value in self._alive.items() if not value[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._alive.values()))
        return result


class AssembledBytes:
    """Counts the bytes of memory alive at once that tensors are put together in: now, and at
    most.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.peak = 0
        self._made = list[StorageWeakRef]()
        self._bytes: list[int] = []
        monkeypatch.setattr(outer_weights, "anonymous", self._take)

    @property
    def now(self) -> int:
        return sum(
            nbytes
            for made, nbytes in zip(self._made, self._bytes, strict=True)
            if not made.expired()
        )

    def _take(self, nbytes: int) -> torch.Tensor:
        memory = anonymous(nbytes)
        self._made.append(StorageWeakRef(memory.untyped_storage()))
        self._bytes.append(nbytes)
        self.peak = max(self.peak, self.now)
        return memory
