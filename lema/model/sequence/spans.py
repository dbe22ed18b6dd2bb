"""Where the chunks of a sequence begin and end."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lema.model.sequence.blockmask import seen_by
from lema.model.sequence.states import Span

__all__ = ["borders_in", "shared_tokens", "spans_between", "spans_of", "tokens_inside"]

LEAST = 2  # tokens of a chunk: models take a single one for one that they generate
AT_ONCE = 1 << 24  # pairs of tokens that are looked at together


def spans_of(length: int, size: int, first: int = 0) -> list[Span]:
    """Return the chunks of the tokens from `first` to before `length`, each of `size` but for the
    last. That is never a single token, which models take for one that they generate, and change a
    state in its index."""
    starts = list(range(first, max(first + 1, length - 1), size))
    return [Span(start, stop) for start, stop in pairwise([*starts, length])]


def spans_between(borders: Sequence[int], length: int, size: int) -> list[Span]:
    """Return the chunks of a sequence that begin and end at some of its borders.

    Args:
        borders: the tokens at which a chunk may begin, in their order.
        length: tokens of the sequence.
        size: of a chunk, at most, unless there is no border in so many tokens.
    """
    bounds = [0]
    while (start := bounds[-1]) < length:
        after = bisect_left(borders, start + LEAST)
        within = bisect_right(borders, start + size) - 1
        index = max(after, within)
        stop = borders[index] if index < len(borders) else length
        bounds.append(length if length - stop < LEAST else stop)
    return [Span(start, stop) for start, stop in pairwise(bounds)]


def borders_in(masks: Sequence[Tensor], length: int) -> list[int]:
    """Return the tokens at which a chunk may begin: no token before sees one from there on.

    Args:
        masks: of pairs of tokens, `[rows, 1, sequence, sequence]`.
        length: tokens of the sequence.
    """
    device = masks[0].device
    keys = torch.arange(length, device=device)
    last = torch.zeros(length, dtype=torch.long, device=device)
    step = max(1, AT_ONCE // length)
    for mask in masks:
        for start in range(0, length, step):
            queries = Span(start, min(start + step, length))
            seen = torch.where(seen_by(mask, queries), keys, -1).amax(dim=1)
            last[queries.slice] = last[queries.slice].maximum(seen)
    farthest = last.cummax(dim=0).values
    borders: list[int] = ((farthest[:-1] < keys[1:]).nonzero().flatten() + 1).tolist()
    return borders


def tokens_inside(mask: Tensor) -> Span:
    """Return the tokens between the padding that all rows of `mask`, `[rows, sequence]`, have at
    their beginning and at their end; all, if every token is padding."""
    seen = (mask != 0).any(dim=0).nonzero().flatten()
    if not len(seen):
        return Span(0, mask.shape[1])
    first, last = seen[[0, -1]].tolist()
    # never one token alone; see `spans_of`
    return Span(max(0, min(first, last - 1)), last + 1)


def shared_tokens(values: Mapping[str, Any], name: str) -> int:
    """Return with how many tokens all rows of a micro-batch begin, padding among them; 0: they
    share nothing.

    Args:
        values: what there is of each token, `[rows, sequence]`; of anything else nothing is known.
        name: of the tokens' ids.
    """
    tensors = [value for value in values.values() if isinstance(value, Tensor)]
    if name not in values or len(values[name]) == 1 or len(tensors) < len(values):
        return 0
    if any(tensor.shape != values[name].shape for tensor in tensors):
        return 0
    alike = torch.stack([(tensor == tensor[:1]).all(dim=0) for tensor in tensors])
    return int(alike.all(dim=0).cumprod(dim=0).sum())
