"""The mean loss of a data set: every trained token counts once, whatever batch it is in."""

from __future__ import annotations

import math
from typing import Any

import torch

from lema.config import LemaConfig
from lema.data import Batches
from lema.loss import split_batch
from lema.nonfinite import non_finite_loss, worst
from lema.streamed import StreamedModel

__all__ = ["evaluate"]


@torch.no_grad()
def evaluate(model: StreamedModel, dataset: Any, config: LemaConfig) -> dict[str, float]:
    """Return `eval_loss` (mean over trained tokens), `eval_perplexity` and `eval_tokens`.

    Raises:
        NonFiniteError: the loss of a batch is NaN or infinite; names its rows and the layer where it began.
        StopRequested: the run it is made in is to stop.
    """
    batches, replicas = Batches(dataset, config.batch_size, shuffle=False), model.backend.replicas
    module = model.split.model
    was_training = module.training
    module.eval()
    total, tokens = 0.0, 0
    try:
        with model.stop.opened():
            for round_first in range(0, batches.steps_per_epoch, replicas.size):  # batches are dealt out in turn
                if (step := round_first + replicas.rank) >= batches.steps_per_epoch:
                    model.accompany(training=False)
                    continue
                batch = batches.batch(step)
                assert batch is not None, "a batch that is nobody's share has rows"
                micro_batches = split_batch(batch, config.micro_batch_size)
                mean, count = model.evaluate(micro_batches)
                loss = worst(replicas, float(mean))
                del mean  # a lazy device would compute it again
                if not math.isfinite(loss):
                    where = f"evaluation, rows {batch.get('rows')} of the data"
                    raise non_finite_loss(model, micro_batches, loss, where)
                total, tokens = total + loss * count, tokens + count
    finally:
        module.train(was_training)
    sums = replicas.exchange((total, tokens))
    total, tokens = sum(one[0] for one in sums), sum(one[1] for one in sums)
    perplexity = math.exp(total / tokens) if total / tokens < 700 else math.inf
    return {"eval_loss": total / tokens, "eval_perplexity": perplexity, "eval_tokens": tokens}
