"""Checkpoints of full training: masters and moments by name, in one file for each layer.

One file at a time is read or written, so that a checkpoint needs only the memory of one more layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer

from lema.backend import Backend
from lema.backend.group import first_alone
from lema.config import LemaConfig
from lema.errors import AdapterError
from lema.storage import GlobalBinaryIndex
from lema.storage.verify import check_finite
from lema.train.checkpoint.format import (
    Writer,
    about_run,
    nbytes_of,
    optimizer_state,
    read_state,
    restore_optimizer,
    write_checkpoint,
)
from lema.train.checkpoint.rng import restore_own, states_of_all
from lema.train.full.masters import MOMENTS, Masters, settings_of

__all__ = ["carry_moments", "check_full", "read_full", "write_full"]

KIND = "full"  # of training, as a checkpoint says it
MASTER, STEP = "master", "step"


def write_full(
    directory: Path,
    backend: Backend,
    masters: Masters,
    optimizer: Optimizer,
    about: Mapping[str, Any],
    config: LemaConfig,
    base: str | None = None,
    writers: Iterable[Writer] = (),
) -> None:
    """Write a checkpoint of what trains and its AdamW: whole, or not at all. All processes call this, the first writes.

    `base` is the fingerprint of the model. Errors are as `write_checkpoint`'s, in every process.
    """
    state = {**about_run(config, KIND, base), "schedule": None, "scaler": {}, **states_of_all(backend), **about}
    nbytes = nbytes_of(one for name in masters.by_name for _, one in _tensors(masters, optimizer, name))
    every: list[Writer] = [partial(_write_weights, directory, masters, optimizer), config.save_pretrained, *writers]
    settings = optimizer_state(settings_of(optimizer))
    first_alone(backend.replicas, partial(write_checkpoint, directory, settings, state, every, nbytes))


def _write_weights(directory: Path, masters: Masters, optimizer: Optimizer, part: Path) -> None:
    """Write what trains into `part`, which is to become `directory`, with the memory of one more layer."""
    for file, names in _files(masters):
        tensors = {f"{key}.{name}": one for name in names for key, one in _tensors(masters, optimizer, name)}
        check_finite(tensors, directory / file)
        save_file(tensors, part / file)


def check_full(directory: Path, base: str | None, gbi: GlobalBinaryIndex | None) -> None:
    """Refuse a checkpoint of a model that has changed since, with `AdapterError`; `base` is this one's fingerprint."""
    then = read_state(directory).get("base")
    if gbi is not None and then not in (None, base):
        what = f"the model has changed since it was trained: its fingerprint is {base}, and it was {then}"
        how = "give the model as it was, or begin a new run in another output_dir"
        raise AdapterError(what, where=f"{directory}, on {gbi.path}", how=how)


def read_full(directory: Path, backend: Backend, masters: Masters, optimizer: Optimizer, seed: int) -> dict[str, Any]:
    """Restore masters, optimizer and generators; return the state, or raise `AdapterError` of what does not fit."""
    state = _state(directory)
    saved, expected = _index(directory), {f"{MASTER}.{name}": tuple(one.shape) for name, one in masters.by_name.items()}
    found = {key: shape for key, (_, shape) in saved.items() if key.startswith(f"{MASTER}.")}
    if found != expected:
        other = next(iter(sorted(found.keys() ^ expected.keys())), f"{MASTER}.of other shapes").partition(".")[2]
        what = f"other weights were trained there: {other}"
        raise AdapterError(what, where=str(directory), how="train the same selection")
    settings = settings_of(optimizer)
    restore_optimizer(settings, directory, state["optimizer"])
    for mine, theirs in zip(optimizer.param_groups, settings.param_groups, strict=True):
        mine.update({key: value for key, value in theirs.items() if key != "params"})
    _fill(directory, masters, optimizer, saved, (MASTER, STEP, *MOMENTS))
    masters.round(masters.by_name)
    restore_own(backend, state, seed)
    return state


def carry_moments(directory: Path, masters: Masters, optimizer: Optimizer) -> dict[str, Any]:
    """Take the moments of what trained in a checkpoint, too; empty the others. Return its `extra`, or raise
    `AdapterError`.
    """
    state, saved = _state(directory), _index(directory)
    for name, master in masters.by_name.items():
        there = saved.get(f"{MASTER}.{name}")
        if there is not None and there[1] != tuple(master.shape):
            what = f"{name} is {list(there[1])} there, and {list(master.shape)} here"
            raise AdapterError(what, where=str(directory / there[0]), how="carry moments of the same model")
    masters.attach(optimizer)
    _fill(directory, masters, optimizer, saved, (STEP, *MOMENTS))
    return dict(state["extra"])


def _state(directory: Path) -> dict[str, Any]:
    state = read_state(directory)
    if (kind := state.get("kind", "adapters")) != KIND:
        what = f"this is a checkpoint of {kind}, not of weights"
        raise AdapterError(what, where=str(directory), how="name one of this kind of training")
    return state


def _files(masters: Masters) -> Iterator[tuple[str, Iterable[str]]]:
    for layer, names in masters.by_layer.items():
        yield f"{KIND}-{layer:05}.safetensors", names
    if masters.outside:
        yield f"{KIND}-outside.safetensors", masters.outside


def _tensors(masters: Masters, optimizer: Optimizer, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield what there is of a parameter that trains, by what it is called in a file."""
    master = masters.by_name[name]
    yield MASTER, master.detach()
    for key in (STEP, *MOMENTS):
        yield key, optimizer.state[master][key]


def _index(directory: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return, of every tensor in a checkpoint, its file and its shape."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in sorted(directory.glob(f"{KIND}-*.safetensors")):
        with _opened(path) as file:
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                found[key] = path.name, tuple(file.get_slice(key).get_shape())
    return found


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, SafetensorError, RuntimeError) as error:
        raise AdapterError(f"the weights cannot be read: {error}", where=str(path)) from error


@torch.no_grad()
def _fill(
    directory: Path,
    masters: Masters,
    optimizer: Optimizer,
    saved: Mapping[str, tuple[str, tuple[int, ...]]],
    wanted: tuple[str, ...],
) -> None:
    """Copy the tensors that were saved to where they have their place."""
    targets = {
        f"{key}.{name}": tensor
        for name in masters.by_name
        for key, tensor in _tensors(masters, optimizer, name)
        if key in wanted
    }
    for file in sorted({file for file, _ in saved.values()}):
        with _opened(directory / file) as opened:
            for key in opened.keys():  # noqa: SIM118 - it is no mapping
                if key in targets:
                    targets[key].copy_(opened.get_tensor(key))
