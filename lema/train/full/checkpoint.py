"""What full training writes: checkpoints, and the model, as a directory that any `transformers`
program loads.

Checkpoints have masters and moments by name, in one file for each layer. One file at a time is read
or written, so that a checkpoint needs only the memory of one more layer.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer

from lema.backend import Backend
from lema.backend.group import first_alone
from lema.config import LemaConfig
from lema.convert.delta import DELTA_NAME, FORMAT, STEM, DeltaFile
from lema.convert.hubformat import open_stored, write_model, write_shards
from lema.convert.published import visit_order
from lema.convert.tensors import bytes_of, stored_name
from lema.errors import AdapterError, WeightsError
from lema.lora.baseconfig import differences, of_numbers
from lema.lora.consent import save_settings
from lema.model.state.model import ModelState
from lema.storage import GlobalBinaryIndex
from lema.storage.atomic import appearing, free_directory, replace_file
from lema.storage.header import TensorRecord, read_header
from lema.storage.verify import BaseFiles, base_fingerprint, check_finite, load_record
from lema.train.checkpoint.format import (
    Writer,
    about_run,
    nbytes_of,
    optimizer_state,
    read_state,
    restore_optimizer,
    write_checkpoint,
)
from lema.train.checkpoint.resume import restore_own, states_of_all
from lema.train.full.masters import MOMENTS, Masters, settings_of
from lema.train.model import LemaModel

__all__ = ["carry_moments", "check_full", "read_full", "save_delta", "save_trained", "write_full"]

KIND = "full"  # of training, as a checkpoint says it
MASTER = "master"
STEP = "step"
BASE_CONFIG = "base_config"  # what the model's config said that changes numbers


def write_full(
    directory: Path,
    backend: Backend,
    masters: Masters,
    optimizer: Optimizer,
    model_state: ModelState,
    about: Mapping[str, Any],
    config: LemaConfig,
    base: BaseFiles | None = None,
    writers: Iterable[Writer] = (),
) -> None:
    """Write a checkpoint of what trains, its AdamW, and what modules keep, and which model it began
    with. All processes call this, the first writes. Errors are as `write_checkpoint`'s, in every
    process."""

    def write_weights(part: Path) -> None:  # with the memory of one more layer
        files: dict[str, Iterable[str]] = {
            f"{KIND}-{layer:05}.safetensors": names for layer, names in masters.by_layer.items()
        }
        if masters.outside:
            files[f"{KIND}-outside.safetensors"] = masters.outside
        for file, names in files.items():
            tensors = {
                f"{key}.{name}": tensor
                for name in names
                for key, tensor in _tensors(masters, optimizer, name)
            }
            check_finite(tensors, directory / file)
            save_file(tensors, part / file)

    states = states_of_all(backend, model_state)
    fingerprint = None if base is None else base.fingerprint
    state = {
        **about_run(config, KIND, fingerprint),
        "schedule": None,
        "scaler": {},
        **states,
        **about,
    }
    if base is not None:
        state[BASE_CONFIG] = of_numbers(base.config)
    nbytes = nbytes_of(
        tensor for name in masters.by_name for _, tensor in _tensors(masters, optimizer, name)
    )
    every: list[Writer] = [write_weights, partial(save_settings, config), *writers]
    settings = optimizer_state(settings_of(optimizer))
    first_alone(
        backend.replicas, partial(write_checkpoint, directory, settings, state, every, nbytes)
    )


def check_full(directory: Path, base: BaseFiles, gbi: GlobalBinaryIndex) -> None:
    """Refuse a checkpoint of a model that has changed since, with `AdapterError`; `base` is what
    it is now.
    """
    state = read_state(directory)
    then = state.get("base")
    config = state.get(BASE_CONFIG)
    now = of_numbers(base.config)
    what = ""
    if then not in (None, base.fingerprint):
        what = (
            f"the model has changed since the training: its fingerprint is {base.fingerprint}, "
            f"and it was {then}"
        )
    elif isinstance(config, dict) and now is not None and (changes := differences(config, now)):
        what = f"the model's config has changed since the training: {'; '.join(changes)}"
    if what:
        how = "use the unchanged model, or begin a new run in another output_dir"
        raise AdapterError(what, where=f"{directory}, on {gbi.path}", how=how)


def read_full(
    directory: Path,
    backend: Backend,
    masters: Masters,
    optimizer: Optimizer,
    seed: int,
    model_state: ModelState,
) -> dict[str, Any]:
    """Restore masters, optimizer, generators and what modules keep; return the state, or raise
    `AdapterError` of what does not fit."""
    state = _state(directory)
    saved = _index(directory)
    expected = {f"{MASTER}.{name}": tuple(master.shape) for name, master in masters.by_name.items()}
    shapes = {key: shape for key, (_, shape) in saved.items() if key.startswith(f"{MASTER}.")}
    if shapes != expected:
        mismatch = next(
            iter(sorted(shapes.keys() ^ expected.keys())), f"{MASTER}.of other shapes"
        ).partition(".")[2]
        what = f"the checkpoint trained other weights: {mismatch}"
        raise AdapterError(what, where=str(directory), how="train the same selection")
    settings = settings_of(optimizer)
    restore_optimizer(settings, directory, state["optimizer"])
    for mine, theirs in zip(optimizer.param_groups, settings.param_groups, strict=True):
        mine.update({key: value for key, value in theirs.items() if key != "params"})
    _fill(directory, masters, optimizer, saved, (MASTER, STEP, *MOMENTS))
    masters.round(masters.by_name)
    try:
        restore_own(backend, state, seed, model_state)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise AdapterError(
            f"the checkpoint's state is damaged: {error!r}", where=str(directory)
        ) from error
    return state


def carry_moments(directory: Path, masters: Masters, optimizer: Optimizer) -> dict[str, Any]:
    """Take a checkpoint's moments of what trains here, too; empty the others. Return its
    `extra`, or `AdapterError`.
    """
    state = _state(directory)
    saved = _index(directory)
    for name, master in masters.by_name.items():
        there = saved.get(f"{MASTER}.{name}")
        if there is not None and there[1] != tuple(master.shape):
            what = f"{name} is {list(there[1])} there, and {list(master.shape)} here"
            raise AdapterError(
                what, where=str(directory / there[0]), how="carry moments of the same model"
            )
    masters.attach(optimizer)
    _fill(directory, masters, optimizer, saved, (STEP, *MOMENTS))
    return dict(state["extra"])


def _state(directory: Path) -> dict[str, Any]:
    state = read_state(directory)
    if (kind := state.get("kind", "adapters")) != KIND:
        what = f"this is a checkpoint of {kind}, not of weights"
        raise AdapterError(
            what, where=str(directory), how="choose a checkpoint of this kind of training"
        )
    return state


def _tensors(masters: Masters, optimizer: Optimizer, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a parameter that trains, by their names in a file."""
    master = masters.by_name[name]
    yield MASTER, master.detach()
    for key in (STEP, *MOMENTS):
        yield key, optimizer.state[master][key]


def _index(directory: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the file and the shape of every tensor in a checkpoint."""
    index: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in sorted(directory.glob(f"{KIND}-*.safetensors")):
        for key, record in _records(path).items():
            index[key] = path.name, record.shape
    return index


def _records(path: Path) -> Mapping[str, TensorRecord]:
    try:
        return read_header(path)[1]
    except WeightsError as error:
        raise AdapterError(
            f"the weights cannot be read: {error.what}", where=str(path), how=error.how
        ) from error


@torch.no_grad()
def _fill(
    directory: Path,
    masters: Masters,
    optimizer: Optimizer,
    saved: Mapping[str, tuple[str, tuple[int, ...]]],
    keys: tuple[str, ...],
) -> None:
    every = (
        (f"{key}.{name}", key, tensor)
        for name in masters.by_name
        for key, tensor in _tensors(masters, optimizer, name)
    )
    targets = {stored: tensor for stored, key, tensor in every if key in keys}
    for file in sorted({file for file, _ in saved.values()}):
        for key, record in _records(directory / file).items():
            if key in targets:
                targets[key].copy_(load_record(record))


def _pieces(model: LemaModel, masters: Masters, name: str) -> Iterable[memoryview]:
    """Return the bytes of a weight that trains, from its master."""
    return [bytes_of(masters.by_name[name].detach().to("cpu", model.dtypes[name]))]


def save_trained(
    model: LemaModel,
    masters: Masters,
    out_dir: str | os.PathLike[str],
    max_shard_size: int = 5_000_000_000,
) -> Path:
    """Write a model with the weights it has been trained to into a new or empty directory, in the
    hub's format. What trains is written from its masters, rounded to the type of the model's
    weights; the rest is copied, piece by piece, from where it is stored. Files hold at most
    `max_shard_size` bytes of tensors, or one larger tensor. Raises `ConfigError` for another
    directory or size, `DiskError` where a file cannot be written; nothing is left behind."""
    out = free_directory(out_dir, max_shard_size)
    base = open_stored(
        model.directory,
        weights=model.gbi.path,
        dtype=model.config.dtype,
        trust_remote_code=model.trusted,
    )
    trained = base.by_own_names(masters.by_name)
    form = base.form()

    def value(name: str) -> Tensor:
        return trained[name].detach().to("cpu", base.dtypes[name])

    def pieces(name: str) -> Iterable[memoryview]:
        return form.pieces(name, trained.__contains__, value)

    return write_model(
        out,
        form.specs(),
        max_shard_size,
        pieces,
        model.directory,
        base.config_changes,
        code=model.trusted,
        write_extra=model.files.write_rendering,
    )


def save_delta(
    model: LemaModel,
    masters: Masters,
    out_dir: str | os.PathLike[str],
    max_shard_size: int = 5_000_000_000,
) -> Path:
    """Write the weights that were trained, rounded from their masters; of it and of the base
    `apply_delta` makes, bit for bit, what `save_trained` writes. Errors are as its."""
    out = free_directory(out_dir, max_shard_size)
    order = [
        name
        for name in visit_order(model.skeleton)
        if name in masters.by_name and name in model.records
    ]
    assert len(order) == len(masters.by_name), "what trains is stored under one name"
    specs = [
        (name, stored_name(name, model.dtypes[name]), tuple(masters.by_name[name].shape))
        for name in order
    ]
    config = model.config
    base = config.model_name_or_path, config.revision, config.gbi_path, base_fingerprint(model.gbi)
    about = DeltaFile(FORMAT, *base, config.dtype, [name for name, _, _ in specs])

    with appearing(out) as part, torch.no_grad():
        write_shards(part, specs, max_shard_size, partial(_pieces, model, masters), STEM)
        replace_file(part / DELTA_NAME, (json.dumps(asdict(about), indent=2) + "\n").encode())
        model.files.write_rendering(part)
    return out
