"""Whether a model keeps the rows of a pack apart, asked of the model itself before it trains on packs.

`transformers` keeps attention within the rows of a pack by their `position_ids`. What else carries something from token
to token goes on over their ends: states of recurrent layers, short convolutions, positions that are counted and not
taken from `position_ids`. No name of a model or layer says so for certain, and an implementation of attention may see
packs only where a micro-batch has one. So a few rows are run once packed and once alone, with the layers and the
attention that the run has. That costs one pass over the weights, half of what a step reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lema.errors import ConfigError

if TYPE_CHECKING:
    from lema.engine.streamed import StreamedModel

__all__ = ["check_packing"]

NUM_TOKENS = (5, 3, 6, 4)  # of the rows that are tried
FIRST = 2  # tokens of each row that are compared: those that see least of their own row
NOISE = 3  # times what rounding does to the first row of a pack, which has nothing before it
FLOOR = {True: 0.01, False: 1e-4}  # relative to the logits; whether numbers have 16 bits


@torch.no_grad()
def check_packing(model: StreamedModel, rows: Sequence[Sequence[int]], at_once: int) -> None:
    """Make sure that `rows` of the data, token ids of one at least, come out of a pack as they come out alone, with the
    adapters that the model has; all processes call this alike. A micro-batch may have `at_once` packs. `ConfigError`:
    they do not, so the model does not train on packs."""
    how = "set packing: false: rows are put together by length, and no padding is computed that need not be"
    if not model.shifts_labels:
        what = "this model is trained on a token's own label, and where a row of a pack begins none is learnt"
        raise ConfigError(what, where="packing", how=how)
    tried = [torch.tensor(list(rows[n % len(rows)])[:size]) for n, size in enumerate(NUM_TOKENS)]
    packs = [tried, tried[::-1]][: max(1, min(2, at_once))]
    module = model.split.model
    was_training = module.training
    module.eval()
    try:
        logits: list[Tensor] = []
        model.evaluate([_pack(packs), *(_alone(row) for pack in packs for row in pack)], logits)
    except TypeError as error:
        if "position_ids" not in str(error):
            raise
        what = "this model takes no position_ids, which say where a row of a pack begins"
        raise ConfigError(what, where="packing", how=how) from error
    finally:
        module.train(was_training)
    each = [row.float() for one in logits for row in one]  # whatever micro-batches memory allowed
    packed, alone = each[: len(packs)], iter(each[len(packs) :])
    noise, apart = list[float](), list[float]()
    for pack, found in zip(packs, packed, strict=True):
        ends = list(accumulate(map(len, pack)))
        for number, (row, end) in enumerate(zip(pack, ends, strict=True)):
            differs = _apart(found[end - len(row) : end], next(alone))
            (apart if number else noise).extend(differs[:FIRST])
    typical = sorted(apart)[len(apart) // 2]
    if not typical <= max(FLOOR[torch.finfo(model.split.dtype).bits < 32], NOISE * max(noise)):
        what = f"rows of a pack reach into each other in this model: their logits differ by {typical:.1%} from those "
        what += "of the same rows alone, as something beside attention goes on from one row to the next"
        if at_once > 1:
            how += "; or try micro_batch_size: 1, as some kinds of attention see one pack at a time"
        raise ConfigError(what, where="packing", how=how)


def _pack(packs: Sequence[Sequence[Tensor]]) -> dict[str, Tensor]:
    ids = torch.stack([torch.cat(list(pack)) for pack in packs])
    positions = torch.stack([torch.cat([torch.arange(len(row)) for row in pack]) for pack in packs])
    return {"input_ids": ids, "labels": ids, "position_ids": positions}


def _alone(row: Tensor) -> dict[str, Tensor]:
    return {"input_ids": row[None], "labels": row[None]}


def _apart(one: Tensor, other: Tensor) -> list[float]:
    """Return how far the logits of each token `[tokens, vocabulary]` are from others, relative to their length."""
    return [float(one) for one in (one - other).norm(dim=-1) / other.norm(dim=-1).clamp(min=1e-30)]
