"""How likely texts are: rows are sorted by length and packed, so that one pass over the weights
serves thousands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lema.engine.head.likelihood import Likelihood, likelihoods
from lema.engine.head.loss import IGNORED
from lema.errors import DataError
from lema.plan import Allocation
from lema.plan.inference.capacity import RowPlan, plan_rows
from lema.train.inference.texts import planned

if TYPE_CHECKING:
    from lema.train.model import LemaModel

__all__ = ["Scored", "scores"]

AT_ONCE = 16
PER_PASS = 1024  # where nothing else is said, and memory is not known

Scored = tuple[Sequence[int], int]
"""The tokens of a row, and how many of them at its end are asked about."""


def scores(
    model: LemaModel,
    rows: Sequence[Scored],
    *,
    batch_size: int | None = None,
    rows_per_pass: int | None = None,
    choose: bool = False,
    on_pass: Callable[[int], object] = lambda _: None,
) -> list[Likelihood]:
    """Return how likely the last tokens of each row are after those before them, in the order
    given.

    A layer computes `batch_size` rows at once; None: `micro_batch_size`, else 16, or fewer where
    memory ends. The weights are read once for `rows_per_pass`; None: as many as there is room for.
    `choose`: spend the limits of memory on such passes, and not on a step of training. `on_pass` is
    called after each pass with how many rows it had.

    Raises `DataError` where a row has no token that is asked about, or none before these;
    `MemoryLimitError`.
    """
    for number, (tokens, asked) in enumerate(rows, 1):
        if not 0 < asked < len(tokens):
            what = f"{asked} tokens of {len(tokens)} are asked about"
            raise DataError(
                what, where=f"row {number}", how="give at least one, and at least one before them"
            )
    if not rows:
        return []
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index][0]))
    at_once = batch_size or model.config.micro_batch_size or AT_ONCE
    longest = max(len(tokens) for tokens, _ in rows) - 1

    def plan_within(allocation: Allocation | None) -> RowPlan:
        return plan_rows(
            model.opened,
            longest,
            len(rows),
            at_once=at_once,
            rows=rows_per_pass,
            current_allocation=allocation,
        )

    plan = planned(model, plan_within, "rows", choose=choose)
    size = min(rows_per_pass or PER_PASS, len(rows))
    on_host = False
    if plan is not None:
        size = plan.rows
        at_once = plan.at_once
        on_host = plan.on_host
    likelihood_by_index: dict[int, Likelihood] = {}
    was_training = model.skeleton.training
    model.skeleton.eval()
    try:
        for first in range(0, len(order), size):
            indices = order[first : first + size]
            parts = (indices[at : at + at_once] for at in range(0, len(indices), at_once))
            packed = [_packed([rows[index] for index in part]) for part in parts]
            likelihood_by_index.update(
                zip(indices, likelihoods(model.adapter, packed, on_host=on_host), strict=True)
            )
            on_pass(len(indices))
    finally:
        model.skeleton.train(was_training)
    return [likelihood_by_index[index] for index in range(len(rows))]


def _packed(rows: Sequence[Scored]) -> dict[str, Tensor]:
    """Return a micro-batch, padded on the right, where causal models look at nothing of it, so that
    it needs no mask. The last token of a row is no input, because nothing comes after it."""
    width = max(len(tokens) for tokens, _ in rows) - 1
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    labels = torch.full((len(rows), width), IGNORED)
    for row_index, (tokens, asked) in enumerate(rows):
        end = len(tokens) - 1
        ids[row_index, :end] = torch.tensor(tokens[:-1])
        labels[row_index, end - asked : end] = torch.tensor(tokens[-asked:])
    return {"input_ids": ids, "labels": labels}
