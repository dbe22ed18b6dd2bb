"""What a plan says of modules that run in tiles of tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lema.model import Split
from lema.plan.work.workload import MicroBatch

__all__ = ["tiles_note"]


def tiles_note(
    split: Split, kinds: Sequence[int], batch: MicroBatch, *, grouped: bool
) -> str | None:
    """Return the sentence on what runs in tiles of tokens; None: nothing is to.

    Args:
        split: the model, of which one layer of each kind has run without values.
        kinds: for each layer, which kind it is of.
        batch: the rows that are computed at once.
        grouped: whether experts are leased in groups.
    """
    if batch.tile is None:
        return None
    if grouped:
        return "mlp_tile_tokens: layers with experts in groups have no tiles, and none are counted"
    at_once = batch.tokens
    if batch.is_cut and batch.chunk is not None:
        at_once = batch.rows * batch.chunk
    if at_once <= batch.tile:
        return (
            f"mlp_tile_tokens: no more than {at_once:,} tokens go through a layer at once, so "
            "nothing runs in tiles"
        )
    names_by_layer = split.tiles.names(real=False)
    by_kind = {kinds[index]: names for index, names in names_by_layer.items()}
    counts = Counter(name for kind in kinds for name in by_kind.get(kind, ()))
    parts = ", ".join(f"{name} of {count:,} layers" for name, count in counts.items())
    return (
        f"mlp_tile_tokens: of {at_once:,} tokens that go through a layer at once, {batch.tile:,} "
        f"at a time go through {parts}"
    )
