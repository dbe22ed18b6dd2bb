"""What a process is planned to hold that divides rows with others: its parts are chunks of a
row.
"""

from __future__ import annotations

from lema.config import LemaConfig
from lema.config.units import human_bytes
from lema.data.forms import longest_row
from lema.model.sequence.division import NUM_ROUNDS
from lema.plan.work.workload import MicroBatch, Workload

__all__ = ["divided_note", "in_parts"]


def in_parts(config: LemaConfig, positions: int | None) -> LemaConfig:
    """Return the settings by which a run is planned: with the parts that a process has of a row as
    chunks of it, where processes divide rows.

    Args:
        config: of the run.
        positions: the longest row that the model takes; None: any.
    """
    size = config.context_parallel_size
    if size is None:
        return config
    part = max(2, -(-longest_row(config.max_length, positions) // (NUM_ROUNDS * size)))
    tokens = config.chunk_tokens
    chunk = part if tokens is None else min(part, tokens)
    return config.model_copy(update={"sequence_chunk": chunk})


def divided_note(
    config: LemaConfig, batch: MicroBatch, work: Workload | None, itemsize: int
) -> str | None:
    """Say what a process sends of each layer where processes divide rows; None: they do not.

    Args:
        config: of the run.
        batch: the micro-batch.
        work: what it costs; None: it cannot be told.
        itemsize: bytes of a number of keys and values; gradients have four at least.
    """
    size = config.context_parallel_size
    if size is None:
        return None
    note = f"context_parallel_size: {size} processes divide each row"
    if work is None:
        return note
    keys_values = max(layer.keys_values_bytes for layer in work.works) // batch.rows
    # of a part for each other process: in the forward, in the backward, and gradients once
    factor = 2 + max(4, itemsize) / itemsize
    nbytes = round(factor * keys_values * (size - 1) / size)
    sent = f"{human_bytes(nbytes)} of keys, values and their gradients"
    return f"{note}; each sends at most about {sent} for a layer of a row in a step"
