"""The memory and the operations of a real step, as the plan counts them: beside weights, buffers
and batches.
"""

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lema import LemaModel
from lema.plan.work.meter import Tally

__all__ = ["device_bytes", "second_step"]


def second_step(model: LemaModel, micro_batches: Sequence[dict[str, Any]]) -> Tally:
    """Take two steps without an optimizer and return the meter of the second: the first makes what
    later ones use again. The model has an adapter and trains."""
    for _ in range(2):
        tally = _metered(Tally(), model, micro_batches)
    return tally


def device_bytes(model: LemaModel, micro_batches: Sequence[dict[str, Any]]) -> int:
    """Return the most bytes of a step that would be on a device which has memory of its own: what
    is in buffers of the host is not among them. The model has taken a step before."""
    backend = model.adapter.backend
    tally = Tally(only_memory=True)
    allocate = backend.host_buffer

    def host_buffer(nbytes: int) -> Tensor:
        with _disable_current_modes():
            memory = allocate(nbytes)
        tally.leave_out([memory])
        return memory

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "host_buffer", host_buffer)
        # made again, because it holds on to what allocates
        model.adapter.activations.arena.close()
        patch.setattr(model.adapter.activations.pool, "_free", [])
        if model.adapter.engine.host_keys is not None:
            model.adapter.engine.host_keys.store.clear()
        return _metered(tally, model, micro_batches).peak


def _metered(tally: Tally, model: LemaModel, micro_batches: Sequence[dict[str, Any]]) -> Tally:
    for parameter in model.get_trainable_parameters():
        parameter.grad = None
    with tally:
        tally.leave_out([*model.skeleton.parameters(), *model.skeleton.buffers()])
        tally.leave_out([one for batch in micro_batches for one in batch.values()])
        tally.leave_out([buffer.memory for buffer in model.memory._ring.buffers])
        model.adapter.loss([*micro_batches]).backward()
    return tally
