"""How likely given tokens are: the sum of their log-probabilities in each row, and whether each is the likeliest.

Only positions that are asked about go through the head, in chunks, so logits of the context never exist.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lema.engine.head.loss import IGNORED
from lema.errors import ConfigError

if TYPE_CHECKING:
    from lema.engine.streamed import StreamedModel

__all__ = ["Likelihood", "likelihoods", "likelihoods_of"]


@dataclass(frozen=True)
class Likelihood:
    """Of the tokens of one row that were asked about."""

    log_likelihood: float  # the sum of their log-probabilities, in nats
    greedy: bool  # whether each is the likeliest where it stands


@torch.no_grad()
def likelihoods(
    model: StreamedModel, micro_batches: Sequence[Mapping[str, Tensor]], *, on_host: bool = False
) -> list[Likelihood]:
    """Return how likely each row's targets are, in one pass over the layers.

    Args:
        micro_batches: padded on the right. Other than in training, a label is the token *after* its position, because
            the last one is no input; -100 is not asked about.

    Raises:
        ConfigError: the head is streamed in pieces.
    """
    if model.head is not None:
        what = "likelihoods are of whole logits, and the head's weight is streamed in pieces"
        raise ConfigError(what, where="head", how="set head: device, or raise device_memory")
    for attempt in model.retry.passes(micro_batches, purpose="evaluation"):
        with attempt:
            found = _of_pass(model, attempt.micro_batches, on_host=on_host)
    return found


def _of_pass(model: StreamedModel, micro_batches: Sequence[Mapping[str, Tensor]], *, on_host: bool) -> list[Likelihood]:
    # A function of its own, because an attempt that fails must leave no tensor in a variable of its caller.
    device = model.backend.device
    known = [model.padding.of(batch)["labels"] for batch in micro_batches]
    *_, hidden = model.hidden_states(micro_batches, torch.device("cpu") if on_host else device)
    with model.retry.at("in the head"):
        head, chunk = model.split.head, model.loss_chunk_tokens
        scored = (likelihoods_of(head, one, of.to(device), of, chunk) for one, of in zip(hidden, known, strict=True))
        return [one for rows in scored for one in rows]


@torch.no_grad()
def likelihoods_of(
    head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, known: Tensor, chunk_tokens: int
) -> list[Likelihood]:
    """Return the likelihood of each row's targets.

    Args:
        head: hidden state `[rows, tokens, hidden]` -> logits `[rows, tokens, vocabulary]`.
        hidden: the last layer's output, `[batch, sequence, hidden]`; it may wait on another device.
        targets: the token after each position, int64 `[batch, sequence]`; -100 where nothing is asked.
        known: `targets` in host memory, where they can be looked at without waiting for the device.
        chunk_tokens: logits exist for at most this many positions.
    """
    rows, columns = torch.nonzero(known != IGNORED, as_tuple=True)
    hidden = hidden.to(targets.device)
    sums, greedy = [0.0] * len(known), [True] * len(known)
    for first in range(0, len(rows), chunk_tokens):
        of_row = rows[first : first + chunk_tokens]
        at = of_row.to(hidden.device), columns[first : first + chunk_tokens].to(hidden.device)
        # One token a row, because so many of one row could be more than the model has positions.
        logits = head(hidden[at].unsqueeze(1)).squeeze(1).float()
        target = targets[at]
        chosen = logits.gather(1, target.unsqueeze(1)).squeeze(1) - logits.logsumexp(1)
        right = logits.argmax(1) == target
        for row, value, likeliest in zip(of_row.tolist(), chosen.tolist(), right.tolist(), strict=True):
            sums[row] += value
            greedy[row] = greedy[row] and likeliest
    return [Likelihood(*one) for one in zip(sums, greedy, strict=True)]
