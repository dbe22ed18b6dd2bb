"""How likely given tokens are: the sum of their log-probabilities in each row, and whether each is the likeliest.

Only positions that are asked about go through the head, in chunks, so logits of the context never exist.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lema.engine.head.loss import IGNORED

__all__ = ["Likelihood", "likelihoods_of"]


@dataclass(frozen=True)
class Likelihood:
    """Of the tokens of one row that were asked about."""

    log_likelihood: float  # the sum of their log-probabilities, in nats
    greedy: bool  # whether each is the likeliest where it stands


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
