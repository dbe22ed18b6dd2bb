"""The visit of a head in pieces, which are leased after the layers as layers are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lema.engine.engine import Engine
from lema.engine.head.gradients import detached
from lema.engine.head.loss import LossChunks
from lema.engine.head.pieces import PiecedHead, piece_passes

__all__ = ["visit_head"]


def visit_head(
    engine: Engine, head: PiecedHead, chunks: LossChunks, hidden: Sequence[Tensor]
) -> Tensor:
    """Return the loss of all micro-batches, an fp32 scalar; gradients formed here are handed on
    in the backward.
    """
    formed = list[Tensor]()

    def forward(hidden: Sequence[Tensor], _: Sequence[bool]) -> Tensor:
        with (
            engine.retry.at("in the head and the loss"),
            engine.stream.trace.span("forward", "head and loss"),
        ):
            poll = engine.stop.poll
            values, formed[:] = piece_passes(
                head, engine.stream.lease, chunks, hidden, differentiate=True, poll=poll
            )
        engine.observe(engine.split.num_layers, formed)
        return torch.stack(values).sum()

    def backward(gradients: Sequence[Tensor]) -> list[Tensor]:
        factor = gradients[0] / chunks.scale
        scaled = [state * factor.to(state.dtype) for state in formed]
        formed.clear()
        return scaled

    return detached(forward, backward, engine.anchor, hidden)
