"""The reference of a preference loss in a run that begins with an adapter: that adapter, as it is
at the start.

It is kept beside the adapter that trains, in the folder `ref` of every checkpoint and of the
result. That is the name that TRL gives it, and the place where PEFT saves an adapter of this name.
A run that goes on takes it from there, so the adapter that the run began with may have changed or
be gone by then.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from peft import PeftModel

from lema.backend import Parallel
from lema.config import LemaConfig
from lema.config.lemaconfig import CONFIG_NAME
from lema.config.objective import has_reference, reference_of
from lema.engine.layers.reference_rows import StartingAdapter
from lema.errors import AdapterError, ConfigError
from lema.lora import save_adapter
from lema.lora.base import Base
from lema.lora.checks import read_json
from lema.lora.files import load_weights
from lema.model.partition import whole_adapter

__all__ = [
    "REFERENCE",
    "begins_with",
    "check_reference",
    "reference_writers",
    "reopened",
    "restore_reference",
]

REFERENCE = "ref"


def begins_with(
    config: LemaConfig, adapters: PeftModel, *, begun: bool
) -> tuple[LemaConfig, StartingAdapter | None]:
    """Return the settings of a run that begins with adapters as they are now, with its reference
    among them, and what the reference is, None being the base model. `begun`: they are saved ones.
    """
    if (kind := reference_of(config, begun=begun)) is None:
        return config, None
    start = StartingAdapter(adapters) if kind == "adapter" else None
    return config.model_copy(update={"reference": kind}), start


def reopened(
    config: LemaConfig, adapters: PeftModel, directory: Path, layers: str, over: Parallel
) -> tuple[LemaConfig, StartingAdapter | None]:
    """Do the same for adapters that were loaded from `directory`. Their reference is that of the
    run that has left them there; if that run had none, they are about to begin another one. None is
    also one that is not there any more."""
    file = directory / CONFIG_NAME
    if not file.is_file() or not has_reference(read_json(file).get("objective")):
        return begins_with(config, adapters, begun=True)
    if reference_of(config) != "adapter" or not (directory / REFERENCE).is_dir():
        return config, None
    start = StartingAdapter(adapters)
    load_reference(start, adapters, directory / REFERENCE, layers, over)
    return config, start


def check_reference(config: LemaConfig, start: StartingAdapter | None) -> None:
    """Raise `AdapterError` if the settings compare with an adapter that is not there."""
    if start is None and reference_of(config) == "adapter":
        what = (
            "the adapter that training began with is missing, but losses compare with it "
            "(reference: adapter)"
        )
        raise AdapterError(
            what, where=REFERENCE, how=f"copy the folder {REFERENCE} next to the adapter's files"
        )


def load_reference(
    start: StartingAdapter, adapters: PeftModel, directory: Path, layers: str, over: Parallel
) -> None:
    """Read the values of the reference from PEFT's files in a folder. `layers`: the dotted name of
    the decoder layers; `over`: the processes that hold the adapter together. `AdapterError`: it is
    not there, or is of another adapter."""
    with start.standing_in([adapters]):
        load_weights(adapters, directory, layers, over)


def restore_reference(
    start: StartingAdapter | None,
    adapters: PeftModel,
    checkpoint: Path,
    layers: str,
    over: Parallel,
) -> None:
    """Do the same for a run that goes on from a checkpoint. `ConfigError`: its reference was
    another.
    """
    there = (checkpoint / REFERENCE).is_dir()
    if there != (start is not None):
        then, now = ("adapter", "base") if there else ("base", "adapter")
        what = f"the run began with reference: {then}, but now it is {now}"
        raise ConfigError(
            what, where=str(checkpoint), how=f"set reference: {then}, or begin a new run"
        )
    if start is not None:
        load_reference(start, adapters, checkpoint / REFERENCE, layers, over)


def reference_writers(
    start: StartingAdapter | None, adapters: PeftModel, base: Base, over: Parallel
) -> list[Callable[[Path], None]]:
    """Return what writes the reference into a directory; none if it is the base model. Processes
    that hold the adapter together all call this, and one of them writes."""
    if start is None:
        return []
    with start.standing_in([adapters]):
        adapter_state = whole_adapter(adapters, over)

    def write(directory: Path) -> None:
        with start.standing_in([adapters]):
            save_adapter(adapters, directory / REFERENCE, base.name, base.revision, adapter_state)

    return [write]
