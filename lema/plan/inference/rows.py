"""The rows that one pass over the weights can score: their hidden states wait between layers, on the device or host."""

from __future__ import annotations

from dataclasses import dataclass

from lema.config.units import human_bytes
from lema.errors import MemoryLimitError
from lema.plan.allocate import OpenModel
from lema.plan.cost import Allocation
from lema.plan.inference.keyvalues import text_bytes
from lema.plan.inference.room import Room, most_that_fit

__all__ = ["RowPlan", "plan_rows"]

LOGITS = 3  # copies of a chunk's logits, as fp32
STATES = 2  # of one layer: what went in, and what comes out


@dataclass(frozen=True)
class RowPlan:
    """A pass over the weights that scores rows."""

    rows: int  # of a pass
    at_once: int  # that a layer computes at once
    on_host: bool  # hidden states of all but those wait in host memory
    state_bytes: int  # of all hidden states
    allocation: Allocation  # of memory to weights, with that much left beside them


def plan_rows(
    opened: OpenModel, length: int, most: int, *, at_once: int, rows: int | None, held: Allocation | None
) -> RowPlan:
    """Return the pass that scores rows of at most `length` tokens.

    Args:
        most: rows that there are; a layer computes `at_once` of them at once, if there is room.
        rows: of a pass; None: as many as there is room for.
        held: what memory is spent on already; None: nothing yet, so the plan chooses it.

    Raises:
        MemoryLimitError: one row does not fit, or not so many of a pass; it names how many do.
        ModelError: what the model computes depends on values.
    """
    sized = text_bytes(opened.skeleton, opened.layers, length, 1, opened.backend.parallel)
    config = opened.skeleton.config.get_text_config()
    row = STATES * length * config.hidden_size * opened.skeleton.dtype.itemsize
    logits = LOGITS * opened.config.loss_chunk_tokens * config.vocab_size * 4
    room, shared = Room.of(opened, held), opened.backend.memory().shared

    def plan(count: int, together: int) -> RowPlan | MemoryLimitError:
        taken = sized.of(together)
        beside = max(taken.peak - taken.keys_values, logits)
        found = room.fit(beside + count * row, 0)
        if isinstance(found, Allocation):
            return RowPlan(count, together, False, count * row, found)
        if shared:
            return found
        away = room.fit(beside + together * row, count * row)
        return RowPlan(count, together, True, count * row, away) if isinstance(away, Allocation) else away

    together = min(at_once, most)
    while isinstance(plan(together, together), MemoryLimitError) and together > 1:
        together //= 2
    wanted = plan(min(rows or most, most), together)
    if isinstance(wanted, RowPlan):
        return wanted
    fitting = most_that_fit(lambda count: plan(count, together), rows or most)
    if rows is None and isinstance(widest := plan(max(fitting, 1), together), RowPlan):
        return widest
    raise MemoryLimitError(
        f"hidden states of {rows or 1} rows of up to {length:,} tokens do not fit: {human_bytes((rows or 1) * row)}",
        where=wanted.where,
        how=f"score {fitting} in a pass (--rows-per-pass {fitting})" if fitting else wanted.how or "shorten the rows",
    )
