"""A streamed model's passes under a watchdog: what moves in them, and what is awaited when nothing does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lema.config import LemaConfig
from lema.streamed import StreamedModel
from lema.watchdog import Moves, Watchdog

__all__ = ["awaited", "moves", "watched"]


@contextmanager
def watched(model: StreamedModel, config: LemaConfig) -> Iterator[None]:
    """Have a watchdog look on while a `with` block runs, unless one does already.

    Args:
        model: whose layers move.
        config: `output_dir`, where stacks are written, and `hang_timeout`.
    """
    if model.watchdog is not None:
        yield
        return
    dog = Watchdog(lambda: moves(model), lambda: awaited(model), Path(config.output_dir), end_after=config.hang_timeout)
    with dog:
        model.watchdog = dog
        try:
            yield
        finally:
            model.watchdog = None


def moves(model: StreamedModel) -> Moves:
    """Return what has been done in passes through a model so far."""
    counters = model.counters
    return Moves(
        counters.leases,
        (
            counters.bytes_read,
            counters.bytes_uploaded,
            counters.bytes_gathered,
            counters.bytes_offloaded,
            model.room.place,
        ),
    )


def awaited(model: StreamedModel) -> str:
    """Return where a pass is, and which layers are on lease, wanted and being read."""
    held, wanted, reading = model.stream.under_way()
    said = [model.room.place or "before the first layer"]
    said += [f"on lease: layer {layer}" for layer in held]
    said += [] if wanted is None else [f"next: layer {wanted}"]
    said += [f"being read: layer {layer}" for layer in reading]
    return "; ".join(said)
