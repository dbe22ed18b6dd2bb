"""The watchdog of a run: whether passes through the model still move, and where they are."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lema.backend.watchdog import Watchdog
from lema.config import LemaConfig
from lema.engine import StreamedModel

__all__ = ["awaited", "moves", "watched"]


@contextmanager
def watched(model: StreamedModel, config: LemaConfig) -> Iterator[None]:
    """Have a watchdog look on while a `with` block runs, unless one does already; stacks go to
    `output_dir`.
    """
    if model.watchdog is not None:
        yield
        return
    dog = Watchdog(
        lambda: moves(model),
        lambda: awaited(model),
        Path(config.output_dir),
        end_after=config.hang_timeout,
    )
    with dog, model.watched_by(dog):
        yield


def moves(model: StreamedModel) -> tuple[Any, ...]:
    """Return the counters of passes through a model so far, visits of layers first."""
    now = model.counters
    nbytes = now.bytes_read, now.bytes_uploaded, now.bytes_gathered, now.bytes_offloaded
    return now.leases, *nbytes, model.retry.location


def awaited(model: StreamedModel) -> str:
    """Return where a pass is, and which layers are on lease, wanted and being read."""
    leased, next_layer, reading = model.stream.activity()
    messages = [model.retry.location or "before the first layer"]
    name = model.stream.name_of
    messages += [f"on lease: {name(layer)}" for layer in leased]
    messages += [] if next_layer is None else [f"next: {name(next_layer)}"]
    messages += [f"being read: {name(layer)}" for layer in reading]
    return "; ".join(messages)
