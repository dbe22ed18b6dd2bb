"""The memory and the operations of a real step, as the plan counts them: beside weights, buffers
and batches.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lema import LemaModel
from lema.plan.work.meter import Tally

__all__ = ["device_bytes", "second_step"]


def second_step(
    model: LemaModel, micro_batches: Sequence[dict[str, Any]], *, only_memory: bool = False
) -> Tally:
    """Take two steps without an optimizer and return the meter of the second: the first makes what
    later ones use again. The model has an adapter and trains. `only_memory`: as in `Tally`."""
    for number in range(2):
        for parameter in model.get_trainable_parameters():
            parameter.grad = None
        with Tally(only_memory=only_memory) as tally:
            tally.leave_out([*model.skeleton.parameters(), *model.skeleton.buffers()])
            tally.leave_out([one for batch in micro_batches for one in batch.values()])
            tally.leave_out([buffer.memory for buffer in model.memory._ring.buffers])
            if only_memory and number:
                tally.leave_out(_in_host(model))
            model.adapter.loss([*micro_batches]).backward()
    return tally


def device_bytes(model: LemaModel, micro_batches: Sequence[dict[str, Any]]) -> int:
    """Return the most bytes of a step that would be on a device which has memory of its own: what
    waits in host memory is not among them."""
    return second_step(model, micro_batches, only_memory=True).peak


def _in_host(model: LemaModel) -> list[Tensor]:
    activations = model.adapter.activations
    tier = activations.arena._storage_tier
    pool = [] if tier is None or activations.arena.tier == "device" else tier._pool._chunks
    return [*pool, *activations.room._free]
