"""The memory of one arm of `activations.py`, in a process of its own: argument: the task and the
arm, as JSON.

Prints one line of JSON. The device's memory is what tensors hold at the most, weights and what
waits elsewhere left out: on a GPU as its allocator counts, on the CPU by looking at every
operation's results. That takes time: no step is timed here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from activations_arms import Arm, Task, context_of, make_model, set_checkpointing, step_of
from common import PeakAnonymous
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

WARM_UP = 1
MEASURED = 2  # steps; the first makes the optimizer's state, and the room for what waits


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operations made while it is on, alive at once: `peak` is the
    most.

    Memory that is there without an operation, mapped for what waits, is not counted, nor are views
    of it.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.peak = 0
        self._device = device
        self._bound = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            one.untyped_storage()._cdata
            for one in tree_iter((args, kwargs))
            if isinstance(one, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for one in tree_iter(result):
            if isinstance(one, torch.Tensor) and one.device.type == self._device:
                storage = one.untyped_storage()
                if storage._cdata not in given:
                    self._count(storage)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        known = self._alive.get(storage._cdata)
        if known is not None and not known[0].expired():
            return
        self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._bound += storage.nbytes()
        if self._bound > self.peak:  # only then is it worth looking who has gone
            self._alive = {key: one for key, one in self._alive.items() if not one[0].expired()}
            self._bound = sum(nbytes for _, nbytes in self._alive.values())
            self.peak = max(self.peak, self._bound)


class _Allocated:
    """What the device's allocator has given out at the most, beyond what it had at first."""

    peak = 0


@contextmanager
def _watched(device: str) -> Iterator[Any]:
    if device == "cpu":
        with LiveBytes(device) as live:
            yield live
        return
    allocated = _Allocated()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield allocated
    torch.cuda.synchronize()
    allocated.peak = torch.cuda.max_memory_allocated() - before


def main() -> None:
    given = json.loads(sys.argv[1])
    task = Task(**given["task"])
    arm = Arm(**given["arm"])
    model, ids = make_model(task)
    set_checkpointing(model, arm.checkpointing)
    context = context_of(model, arm.mode, task.directory)
    step = step_of(model, ids, context)
    losses = [step() for _ in range(WARM_UP)]
    if context is not None:
        context.counters.reset()
    with PeakAnonymous() as anonymous, _watched(task.device) as device:
        losses += [step() for _ in range(MEASURED)]
    counters = None if context is None else context.counters.to_dict()
    print(
        json.dumps(
            {
                "peak_device": device.peak,
                "peak_anonymous": anonymous.peak,
                "bytes_out": 0 if counters is None else counters["bytes_out"] // MEASURED,
                "bytes_back": 0 if counters is None else counters["bytes_back"] // MEASURED,
                "counters": counters,
                "losses": losses,
            }
        )
    )


if __name__ == "__main__":
    main()
