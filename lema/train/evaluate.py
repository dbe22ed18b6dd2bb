"""The mean loss of a data set or of a fixed batch, in which every trained token counts once, whatever batch it is in.

The fixed batch has rows that no phase trains on, and its evaluation leaves no trace in the training.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from lema.config import LemaConfig
from lema.data import Batches
from lema.data.mixture import Mixture
from lema.engine import StreamedModel
from lema.engine.loss import split_batch
from lema.train.guards import non_finite_loss, worst

__all__ = ["evaluate", "validate"]


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


@torch.no_grad()
def validate(
    model: StreamedModel, mixture: Mixture, rows: int, *, at_once: int, micro_batch_size: int | None
) -> dict[str, float]:
    """Return `eval_loss` (mean over trained tokens), `eval_perplexity` and `eval_tokens` of a stage's validation batch.

    Of several processes, all of which call this, each computes its share, and all return the same.

    Args:
        model: what is measured, as it is; without dropout.
        mixture: the stage's, with rows held out.
        rows: of the batch, over all processes.
        at_once: rows of one pass over the layers, over all processes: memory is that of a step of so many rows.
        micro_batch_size: rows that a process computes at once.

    Raises:
        NonFiniteError: the loss of a part is NaN or infinite; names the layer where it began.
        DataError: no token of the batch is trained.
        StopRequested: the run it is made in is to stop.
    """
    replicas, module = model.backend.replicas, model.split.model
    together = micro_batch_size or -(-at_once // replicas.size)
    batch = mixture.validation(rows, replicas.rank, replicas.size, together)
    parts = [] if batch is None else split_batch(batch, together)
    width = max(1, -(-at_once // (replicas.size * together)))  # micro-batches, as many as a step of training has
    passes = max(replicas.exchange(-(-len(parts) // width)))
    was_training = module.training
    module.eval()
    total, tokens = 0.0, 0
    try:
        with model.stop.opened():
            for number in range(passes):
                if not (mine := parts[number * width : (number + 1) * width]):
                    model.accompany(training=False)
                    continue
                mean, count = model.evaluate(mine)
                loss = worst(replicas, float(mean))
                del mean  # a lazy device would compute it again
                if not math.isfinite(loss):
                    raise non_finite_loss(model, mine, loss, f"validation of stage {mixture.stage + 1}")
                total, tokens = total + loss * count, tokens + count
    finally:
        module.train(was_training)
    sums = replicas.exchange((total, tokens))
    total, tokens = sum(one[0] for one in sums), sum(one[1] for one in sums)
    loss = total / tokens
    return {"eval_loss": loss, "eval_perplexity": math.exp(loss) if loss < 700 else math.inf, "eval_tokens": tokens}
