"""How likely given tokens are: the sum of their log-probabilities in each row, and whether each is
the likeliest.

Only positions that are asked about go through the head, in chunks, so logits of the context never
exist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lema.activations.hoststates import on_device
from lema.engine.head.loss import IGNORED
from lema.engine.streamed import StreamedModel
from lema.errors import ConfigError

__all__ = ["Likelihood", "likelihoods"]


@dataclass(frozen=True)
class Likelihood:
    """The requested tokens of one row."""

    log_likelihood: float  # the sum of their log-probabilities, in nats
    greedy: bool  # whether each is the likeliest where it stands


@torch.no_grad()
def likelihoods(
    model: StreamedModel, micro_batches: Sequence[Mapping[str, Tensor]], *, on_host: bool = False
) -> list[Likelihood]:
    """Return how likely each row's targets are, in one pass over the layers. Micro-batches are
    padded on the right. Other than in training, a label is the token *after* its position, because
    the last one is no input; -100 is not asked about. If `on_host`, hidden states wait in host
    memory between layers. `ConfigError`: the head is cut."""
    if model.head is not None:
        what = "likelihoods need whole logits, but the head streams in pieces"
        raise ConfigError(what, where="head", how="set head: device, or raise device_memory")

    if model.division is not None:
        what = "likelihoods are of whole rows, and each process has a part of every row"
        raise ConfigError(what, where="context_parallel_size", how="start one process")

    def run(parts: Sequence[Mapping[str, Tensor]]) -> list[Likelihood]:
        host_targets = [model.padding.of(batch)["labels"] for batch in parts]
        *_, hidden = model.hidden_states(parts, on_host=on_host)
        with model.retry.at("in the head"):
            pairs = ((on_device(hidden, index), of) for index, of in enumerate(host_targets))
            return [likelihood for state, of in pairs for likelihood in _of_rows(model, state, of)]

    return model.retry.run_pass(run, micro_batches, purpose="evaluation")


def _of_rows(model: StreamedModel, hidden: Tensor, host_targets: Tensor) -> list[Likelihood]:
    """Return the likelihood of each row's targets, given the last layer's output `[batch, sequence,
    hidden]`. `host_targets` are the targets in host memory, where they can be looked at without
    waiting for the device: the token after each position, int64 `[batch, sequence]`; -100 where
    nothing is asked."""
    rows, columns = torch.nonzero(host_targets != IGNORED, as_tuple=True)
    targets = host_targets.to(model.backend.device)
    chunk = model.step_inputs.chunk_tokens
    sums = [0.0] * len(host_targets)
    greedy = [True] * len(host_targets)
    for first in range(0, len(rows), chunk):
        of_row = rows[first : first + chunk]
        at = of_row.to(hidden.device), columns[first : first + chunk].to(hidden.device)
        # One token a row, because so many of one row could be more than the model has positions.
        logits = model.split.head(hidden[at].unsqueeze(1)).squeeze(1).float()
        target = targets[at]
        chosen = logits.gather(1, target.unsqueeze(1)).squeeze(1) - logits.logsumexp(1)
        right = logits.argmax(1) == target
        for row, value, likeliest in zip(
            of_row.tolist(), chosen.tolist(), right.tolist(), strict=True
        ):
            sums[row] += value
            greedy[row] = greedy[row] and likeliest
    return [Likelihood(*fields) for fields in zip(sums, greedy, strict=True)]
