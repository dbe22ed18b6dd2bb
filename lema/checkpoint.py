"""A checkpoint: PEFT's adapter files, optimizer, schedule, generator states and position, whole or not at all.

Everything is JSON or safetensors; nothing is pickled. A checkpoint is written beside its final place, flushed to disk
and renamed, so a directory named `checkpoint-<step>` is complete.
"""

from __future__ import annotations

import base64
import json
import os
import random
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer

from lema.backend import Backend, Parallel
from lema.errors import AdapterError, ConfigError, DiskError, LemaError
from lema.held import held_tensor, layout_of, whole_tensor
from lema.layout import Layout

__all__ = [
    "OptimizerState",
    "checkpoints",
    "forget_old_checkpoints",
    "generator_states",
    "optimizer_state",
    "read_state",
    "restore_generators",
    "restore_optimizer",
    "restore_own",
    "states_of_all",
    "write_checkpoint",
]

STATE = "state.json"
OPTIMIZER = "optimizer.safetensors"
PREFIX = "checkpoint-"
IMPLEMENTATION = {"fused", "foreach"}  # how an optimizer computes here, whatever it did where it was saved


def checkpoints(output_dir: Path) -> list[Path]:
    """Return the checkpoints of a run, the oldest first."""
    found = [path for path in output_dir.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix(PREFIX)))


def forget_old_checkpoints(output_dir: Path, newest: Path, keep: int | None, spared: Collection[Path] = ()) -> None:
    """Delete all but `keep` checkpoints of a run, up to `newest`; None: keep all. What is of a later step is another's.

    Args:
        output_dir: where they are.
        newest: the last of this run.
        keep: how many stay.
        spared: stay besides, such as the best.

    Raises:
        DiskError: one could not be deleted.
    """
    found = checkpoints(output_dir)
    mine = found[: found.index(newest) + 1]
    for directory in mine[: -keep if keep else 0]:
        if directory in spared:
            continue
        # Half a checkpoint must not bear the name of a whole one, wherever deleting it ends.
        aside = _aside(directory)
        try:
            directory.rename(aside)
            shutil.rmtree(aside)
        except OSError as error:
            raise DiskError(
                f"an old checkpoint could not be deleted: {error.strerror}", where=str(directory)
            ) from error


@dataclass(frozen=True)
class OptimizerState:
    """What a checkpoint keeps of an optimizer: its tensors, named `<parameter>.<key>`, and the rest as JSON types."""

    tensors: Mapping[str, Tensor]
    plain: Mapping[str, Any]


def write_checkpoint(
    directory: Path,
    optimizer: Optimizer | OptimizerState,
    state: Mapping[str, Any],
    write_files: Callable[[Path], None],
) -> None:
    """Write a checkpoint; a directory of that name that was there before is replaced.

    Args:
        directory: the checkpoint's final name.
        optimizer: its tensors go to safetensors, the rest of its state to JSON. Of one whose parameters are divided
            among processes: what `optimizer_state` has put together.
        state: JSON types: step, position, schedule, scaler, generator states.
        write_files: writes the adapter's files (and what belongs beside them) into a directory.

    Raises:
        DiskError: it could not be written; what was there before is untouched.
        ConfigError: the optimizer's state is more than tensors and JSON types.
    """
    kept = optimizer if isinstance(optimizer, OptimizerState) else optimizer_state(optimizer)
    text = _json({**state, "optimizer": dict(kept.plain)})
    part = directory.with_name(f".{directory.name}.{os.getpid()}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        write_files(part)
        save_file(dict(kept.tensors), part / OPTIMIZER)
        (part / STATE).write_text(text, encoding="utf-8")
        for path in part.iterdir():
            _flush(path)
        _flush(part)
        _swap(part, directory)
        _flush(directory.parent)
    except (OSError, SafetensorError, DiskError) as error:
        raise DiskError(
            f"the checkpoint could not be written: {error.what if isinstance(error, LemaError) else error}",
            where=str(directory),
            how="free some space; earlier checkpoints are untouched",
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def read_state(directory: Path) -> dict[str, Any]:
    """Read a checkpoint's JSON state.

    Raises:
        AdapterError: it is missing or damaged.
    """
    try:
        state = json.loads((directory / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AdapterError(f"the checkpoint's state cannot be read: {error}", where=str(directory / STATE)) from error
    expected = {"global_step", "schedule", "scaler", "generators", "extra", "optimizer"}
    if not isinstance(state, dict) or not expected <= state.keys():
        raise AdapterError(
            "this is not the state of a checkpoint",
            where=str(directory / STATE),
            how="name a directory that save_checkpoint or `lema train` wrote",
        )
    return state


def restore_optimizer(
    optimizer: Optimizer, directory: Path, plain: Mapping[str, Any], parallel: Parallel | None = None
) -> None:
    """Load into `optimizer` what `write_checkpoint` stored; of one whose parameters `parallel` divides, its part.

    Raises:
        AdapterError: the state is missing, damaged, or of another optimizer.
    """
    if plain.get("class") != (name := type(optimizer).__qualname__):
        raise AdapterError(
            f"the state is of the optimizer {plain.get('class')}, not of {name}",
            where=str(directory / STATE),
            how="resume with the optimizer the run began with",
        )
    try:
        tensors = load_file(directory / OPTIMIZER)
        state: dict[int, dict[str, Any]] = {int(key): dict(value) for key, value in plain["state"].items()}
        layouts = _layouts(optimizer)
        for name, tensor in tensors.items():
            index, _, key = name.partition(".")
            divided = parallel is not None and tensor.dim() and int(index) < len(layouts)
            held = held_tensor(parallel, tensor, layouts[int(index)]) if parallel is not None and divided else tensor
            state.setdefault(int(index), {})[key] = held
        groups = [
            {**saved, **{key: own[key] for key in IMPLEMENTATION & own.keys()}}
            for saved, own in zip(plain["param_groups"], optimizer.state_dict()["param_groups"], strict=True)
        ]
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise AdapterError(
            f"the optimizer cannot be restored: {error}",
            where=str(directory / OPTIMIZER),
            how="resume with the settings the run began with, or name another checkpoint",
        ) from error


def generator_states(device: Tensor) -> dict[str, Any]:
    """Return the states of Python's, NumPy's, torch's and the device's generators as JSON types."""
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)
    return {
        "python": [version, list(words), gauss],
        "numpy": {**numpy_state, "state": {**numpy_state["state"], "key": numpy_state["state"]["key"].tolist()}},
        "torch": _encode(torch.get_rng_state()),
        "device": _encode(device),
    }


def states_of_all(backend: Backend) -> dict[str, Any]:
    """Return the states of every process's generators, as the keys of a checkpoint's state."""
    mine = {**generator_states(backend.rng_state()), "kind": backend.name}
    first, *others = backend.replicas.exchange(mine)
    return {"generators": first, "generators_of_others": others}


def restore_own(backend: Backend, state: Mapping[str, Any], seed: int) -> None:
    """Put this process's generators back where a checkpoint found them.

    A device of another kind cannot go on from there, nor can a process that there was not then: these draw other
    numbers, from the seed and the step.

    Args:
        backend: the device, and the processes there are now.
        state: of the checkpoint.
        seed: of the run.
    """
    saved, rank = [state["generators"], *state.get("generators_of_others", [])], backend.replicas.rank
    anew = seed + rank + int(state["global_step"])
    if rank >= len(saved):
        torch.manual_seed(anew)
    elif saved[rank].get("kind", backend.name) == backend.name:
        restore_generators(saved[rank], backend.set_rng_state)
    else:
        torch.manual_seed(anew)  # every device's
        restore_generators(saved[rank], lambda _: None)


def restore_generators(states: Mapping[str, Any], set_device: Callable[[Tensor], None]) -> None:
    """Put the generators back where `generator_states` found them."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    numpy_state = states["numpy"]
    key = np.array(numpy_state["state"]["key"], dtype=np.uint32)
    np.random.set_state({**numpy_state, "state": {**numpy_state["state"], "key": key}})
    torch.set_rng_state(_decode(states["torch"]))
    set_device(_decode(states["device"]))


def optimizer_state(optimizer: Optimizer, parallel: Parallel | None = None) -> OptimizerState:
    """Return what a checkpoint keeps of an optimizer.

    Args:
        optimizer: it.
        parallel: the processes that hold its parameters together; each calls this. None: there is one.
    """
    whole = optimizer.state_dict()
    layouts = _layouts(optimizer)
    tensors: dict[str, Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    for index, entries in whole["state"].items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                divided = parallel is not None and value.dim()  # how many steps there were is the same for all
                kept = whole_tensor(parallel, value, layouts[index]) if parallel and divided else value.detach().cpu()
                tensors[f"{index}.{key}"] = kept.contiguous()
            else:
                plain.setdefault(str(index), {})[key] = value
    name = type(optimizer).__qualname__
    return OptimizerState(tensors, {"class": name, "state": plain, "param_groups": whole["param_groups"]})


def _layouts(optimizer: Optimizer) -> list[Layout | None]:
    """Return how each parameter of an optimizer lies over processes, in the order in which its state numbers them."""
    return [layout_of(parameter) for group in optimizer.param_groups for parameter in group["params"]]


def _json(state: Mapping[str, Any]) -> str:
    try:
        return json.dumps(state, indent=1)
    except TypeError as error:
        raise ConfigError(
            f"the state of the run cannot be saved without pickling: {error}",
            where=f"optimizer {state['optimizer']['class']}",
            how="use an optimizer whose state is tensors and numbers, one level deep",
        ) from error


def _encode(state: Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _decode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _swap(part: Path, directory: Path) -> None:
    """Rename `part` to `directory`; one that is there already steps aside until the new one has its name."""
    aside = _aside(directory)
    replaced = directory.exists()
    if replaced:
        directory.rename(aside)
    try:
        part.rename(directory)
    except OSError:
        if replaced:
            aside.rename(directory)
        raise
    if replaced:
        shutil.rmtree(aside)


def _aside(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.{os.getpid()}.old")
