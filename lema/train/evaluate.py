"""The mean loss of rows that are not trained on: every trained token counts once, whatever batch
it is in.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from lema.backend import Replicas
from lema.backend.group import share_of
from lema.config import LemaConfig
from lema.data.dataset import Rows
from lema.data.mixture import Mixture
from lema.engine import StreamedModel
from lema.engine.head.loss import split_batch
from lema.engine.padding import Padding
from lema.train.health.nonfinite import non_finite_loss, worst
from lema.train.sampler import batches_of
from lema.train.steps import added, means, measured_here

__all__ = ["evaluate", "passes_of_mixture", "passes_of_rows"]

EvalPass = tuple[Sequence[Mapping[str, Tensor]], str]
"""The micro-batches of one pass over the layers, none of them where only other processes have some;
and which rows these are, for an error."""


@torch.no_grad()
def evaluate(model: StreamedModel, passes: Iterable[EvalPass]) -> dict[str, float]:
    """Return `eval_loss` (mean over trained tokens), `eval_perplexity` and `eval_tokens`, over all
    processes. The model is measured without dropout, and no random number is drawn. Every process
    calls this, with its share of the rows in as many passes as the others have. Raises
    `NonFiniteError`, which names rows and layer; `DataError` where no token is trained;
    `StopRequested` where the run is to stop."""
    replicas = model.backend.replicas
    module = model.split.model
    was_training = module.training
    module.eval()
    total = 0.0
    tokens = 0
    measured = dict[str, tuple[float, float]]()
    try:
        with model.stop.opened():
            for micro_batches, where in passes:
                if not micro_batches:
                    model.join_idle(training=False)
                    continue
                mean, count = model.evaluate(micro_batches)
                loss = worst(replicas, float(mean))
                del mean  # because a lazy device would compute it again
                if not math.isfinite(loss):
                    raise non_finite_loss(model, micro_batches, loss, where)
                total = total + loss * count
                tokens = tokens + count
                measured = added(measured, measured_here(model))
    finally:
        module.train(was_training)
    # those that divide rows have each formed the loss of the whole rows
    sums = replicas.exchange((total, tokens, measured))[:: model.num_dividing]
    total = sum(process_sums[0] for process_sums in sums)
    tokens = sum(process_sums[1] for process_sums in sums)
    loss = total / tokens
    if model.objective is not None:
        metrics = means(added(*(process_measured for _, _, process_measured in sums)), "eval_")
        return {"eval_loss": loss, **metrics, "eval_examples": tokens}
    return {
        "eval_loss": loss,
        "eval_perplexity": math.exp(loss) if loss < 700 else math.inf,
        "eval_tokens": tokens,
    }


def passes_of_rows(
    dataset: Rows, config: LemaConfig, replicas: Replicas, padding: Padding | None = None
) -> Iterator[EvalPass]:
    """Yield this process's batches of a data set, in its order; batches go to the processes in
    turn.
    """
    batches = batches_of(dataset, config, padding, shuffle=False)
    rank, size = share_of(replicas, config.context_parallel_size or 1)
    for first in range(0, batches.steps_per_epoch, size):
        if (step := first + rank) >= batches.steps_per_epoch:
            yield [], ""
            continue
        yield batches.micro_batches([step]), f"evaluation, rows {batches.rows(step)} of the data"


def passes_of_mixture(
    mixture: Mixture, rows: int, replicas: Replicas, *, at_once: int, micro_batch_size: int | None
) -> list[EvalPass]:
    """Return this process's share of so many `rows` that a mixture holds out; all processes call
    this. A pass over the layers has `at_once` of them, over all processes: memory is that of a step
    of so many rows."""
    together = micro_batch_size or -(-at_once // replicas.size)
    batch = mixture.validation(rows, replicas.rank, replicas.size, together)
    parts = [] if batch is None else split_batch(batch, together)
    # micro-batches, as many as a step of training has
    width = max(1, -(-at_once // (replicas.size * together)))
    count = max(replicas.exchange(-(-len(parts) // width)))
    where = f"validation of stage {mixture.stage + 1}"
    return [(parts[number * width : (number + 1) * width], where) for number in range(count)]
