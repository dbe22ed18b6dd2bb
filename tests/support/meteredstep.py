"""The memory and the operations of a real step, as the plan counts them: beside weights, buffers
and batches.
"""

from collections.abc import Sequence
from typing import Any

from lema import LemaModel
from lema.plan.work.meter import Tally

__all__ = ["second_step"]


def second_step(model: LemaModel, micro_batches: Sequence[dict[str, Any]]) -> Tally:
    """Take two steps without an optimizer and return the meter of the second: the first makes what
    later ones use again. The model has an adapter and trains."""
    for _ in range(2):
        for parameter in model.get_trainable_parameters():
            parameter.grad = None
        with Tally() as tally:
            tally.leave_out([*model.skeleton.parameters(), *model.skeleton.buffers()])
            tally.leave_out([one for batch in micro_batches for one in batch.values()])
            tally.leave_out([buffer.memory for buffer in model.memory._ring.buffers])
            model.adapter.loss([*micro_batches]).backward()
    return tally
