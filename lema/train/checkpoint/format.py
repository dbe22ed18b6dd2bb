"""The format of a checkpoint: PEFT's adapter files, optimizer, schedule, generator states and
position.

Everything is JSON or safetensors; nothing is pickled. `lema.storage.atomic` writes it next to its
final place, flushes it, reads it back and renames it, so a directory named `checkpoint-<step>` is
complete; its manifest reveals damage.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import TrainerState

from lema.backend import Backend, Parallel, Replicas
from lema.backend.findings import program_versions
from lema.backend.group import first_alone
from lema.backend.layout import Layout
from lema.config import LemaConfig
from lema.engine.layers.reference_rows import StartingAdapter
from lema.errors import AdapterError, ConfigError, DiskError, LemaError, WeightsError
from lema.lora import save_adapter
from lema.lora.base import Base, write_base
from lema.lora.consent import save_settings
from lema.model.partition import layout_of, local_tensor, whole_adapter, whole_tensor
from lema.storage.atomic import commit, discard
from lema.storage.diskspace import check_free_bytes, not_written
from lema.storage.regular import read_regular
from lema.storage.verify import check_finite, check_written, load_tensors
from lema.train.reference import reference_writers

STATE = "state.json"
OPTIMIZER = "optimizer.safetensors"
TRAINER_STATE = "trainer_state.json"
PREFIX = "checkpoint-"
# how an optimizer computes here, whatever it did where it was saved
IMPLEMENTATION = {
    "fused",
    "foreach",
}

Writer = Callable[[Path], object]
"""Writes some files of a checkpoint into a directory."""


def checkpoints(output_dir: Path) -> list[Path]:
    """Return the checkpoints of a run, the oldest first."""
    directories = [
        path for path in output_dir.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit()
    ]
    return sorted(directories, key=lambda path: int(path.name.removeprefix(PREFIX)))


def forget_old_checkpoints(
    output_dir: Path, newest: Path, keep: int | None, spared: Collection[Path] = ()
) -> None:
    """Delete all but `keep` checkpoints of a run, up to `newest`, and those that are `spared`;
    None: keep all. What is of a later step is another's. Raises `DiskError` where one cannot be
    deleted."""
    directories = checkpoints(output_dir)
    mine = directories[: directories.index(newest) + 1]
    for directory in mine[: -keep if keep else 0]:
        if directory not in spared:
            delete_checkpoint(directory, "an old checkpoint")


def delete_checkpoint(directory: Path, what: str) -> None:
    """Delete a checkpoint, or raise a `DiskError` that says `what` it is."""
    try:
        discard(directory)
    except OSError as error:
        raise DiskError(
            f"{what} could not be deleted: {error.strerror}", where=str(directory)
        ) from error


@dataclass(frozen=True)
class OptimizerState:
    """What a checkpoint keeps of an optimizer: its tensors, named `<parameter>.<key>`, and the
    rest as JSON types.
    """

    tensors: Mapping[str, Tensor]
    plain: Mapping[str, Any]


def write_checkpoint(
    directory: Path,
    optimizer: OptimizerState,
    state: Mapping[str, Any],
    writers: Sequence[Writer] = (),
    nbytes: int = 0,
) -> None:
    """Write a checkpoint; a directory of that name that was there before is replaced.

    Before it gets its name it is read back and compared with its manifest; the optimizer's tensors
    with memory. `state` is of JSON types: step, position, schedule, scaler, generator states. The
    `writers` are of what trains, and of what belongs beside it; where none makes a
    `trainer_state.json`, one with the step alone is written. There must be room for `nbytes`, about
    as much as they will write.

    Raises `DiskFull`, `DiskError`, or `NonFiniteError` of what would be written; `ConfigError`: the
    optimizer's state is more than tensors and JSON types. What was there before is untouched then.
    """
    text = _json({**state, "optimizer": dict(optimizer.plain)})
    check_finite(
        {f"the optimizer's {name}": tensor for name, tensor in optimizer.tensors.items()},
        directory / OPTIMIZER,
    )
    check_free_bytes(directory, nbytes + nbytes_of(optimizer.tensors.values()), "this checkpoint")

    def fill(part: Path) -> None:
        for write in writers:
            write(part)
        save_file(dict(optimizer.tensors), part / OPTIMIZER)
        check_written(part / OPTIMIZER, optimizer.tensors)
        if not (part / TRAINER_STATE).exists():
            steps = int(state.get("global_step", 0))
            TrainerState(global_step=steps, max_steps=steps).save_to_json(str(part / TRAINER_STATE))
        (part / STATE).write_text(text, encoding="utf-8", newline="\n")

    try:
        commit(directory, fill)
    except (OSError, SafetensorError, DiskError) as error:
        why = error.what if isinstance(error, LemaError) else str(error)
        raise not_written(
            f"the checkpoint could not be written: {why}", error, directory
        ) from error


def about_run(
    config: LemaConfig, kind: str, base: str | None, computed: torch.dtype | None = None
) -> dict[str, Any]:
    """Return what a state says of its run: its kind, "adapters" or "full"; `base`, the fingerprint
    of its model; and the type that its layers are `computed` in, if it is known."""
    settings = json.dumps(config.to_dict(), sort_keys=True).encode()
    versions = program_versions("torch", "transformers", "peft", "safetensors")
    return {
        "kind": kind,
        "config": hashlib.sha256(settings).hexdigest(),
        "base": base,
        "compute_dtype": None if computed is None else str(computed).removeprefix("torch."),
        "versions": {**versions, "python": platform.python_version()},
    }


def leave_adapter(
    directory: Path,
    backend: Backend,
    adapters: PeftModel,
    config: LemaConfig,
    base: Base,
    reference: StartingAdapter | None,
    writers: Sequence[Writer] = (),
) -> None:
    """Write PEFT's files and the settings, the adapter of the `reference`, if there is one, and
    what `writers` add, or raise `DiskError`. Processes that hold the model together all call this,
    and the first of all writes."""
    adapter_state = whole_adapter(adapters, backend.parallel)
    of_reference = reference_writers(reference, adapters, base, backend.parallel)

    def write() -> None:
        for write_reference in of_reference:
            write_reference(directory)
        save_adapter(adapters, directory, base.name, base.revision, adapter_state, writers)
        save_settings(config, directory)
        write_base(directory, base)

    if adapter_state is None:
        write()
    else:
        first_alone(backend.replicas, write)


def nbytes_of(tensors: Iterable[Tensor]) -> int:
    """Return how many bytes tensors have together."""
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def read_state(directory: Path) -> dict[str, Any]:
    """Read a checkpoint's JSON state; `AdapterError` where it is missing or damaged."""
    try:
        state = json.loads(read_regular(directory / STATE, inside=True))
    except (OSError, ValueError) as error:
        raise AdapterError(
            f"the checkpoint's state cannot be read: {error}", where=str(directory / STATE)
        ) from error
    expected = {"global_step", "schedule", "scaler", "generators", "extra", "optimizer"}
    if not isinstance(state, dict) or not expected <= state.keys():
        what = "this is not the state of a checkpoint"
        how = "choose a directory that save_checkpoint or `lema train` wrote"
        raise AdapterError(what, where=str(directory / STATE), how=how)
    return state


def restore_optimizer(
    optimizer: Optimizer,
    directory: Path,
    plain: Mapping[str, Any],
    parallel: Parallel | None = None,
    local_indices: Container[int] | None = None,
) -> None:
    """Load its part of what `write_checkpoint` stored, or raise `AdapterError` of what is of
    another optimizer. `local_indices`: the places of the parameters that this process updates;
    None: all."""
    if plain.get("class") != (name := type(optimizer).__qualname__):
        what = f"the state is of the optimizer {plain.get('class')}, not of {name}"
        raise AdapterError(
            what,
            where=str(directory / STATE),
            how="resume with the optimizer with which the run began",
        )
    try:
        tensors = load_tensors(directory / OPTIMIZER)
        state: dict[int, dict[str, Any]] = {}
        for index, entries in plain["state"].items():
            for path, value in entries.items():
                _insert(state.setdefault(int(index), {}), path, value)
        layouts = _layouts(optimizer)
        for name, tensor in tensors.items():
            index, _, path = name.partition(".")
            divided = parallel is not None and tensor.dim() and int(index) < len(layouts)
            shard = (
                local_tensor(parallel, tensor, layouts[int(index)])
                if parallel is not None and divided
                else tensor
            )
            _insert(state.setdefault(int(index), {}), path, shard)
        if plain.get("wrapped"):
            _wrap(optimizer, state)
        if local_indices is not None:
            state = {index: entries for index, entries in state.items() if index in local_indices}
        groups = []
        for saved, mine in zip(
            plain["param_groups"], optimizer.state_dict()["param_groups"], strict=True
        ):
            groups.append({**saved, **{key: mine[key] for key in IMPLEMENTATION & mine.keys()}})
            if isinstance(mine["lr"], Tensor):  # it was saved as a number
                groups[-1]["lr"] = torch.full_like(mine["lr"], saved["lr"])
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    except (WeightsError, ValueError, KeyError) as error:
        what = (
            "the optimizer cannot be restored: "
            f"{error.what if isinstance(error, WeightsError) else error}"
        )
        how = "resume with the settings with which the run began, or choose another checkpoint"
        raise AdapterError(what, where=str(directory / OPTIMIZER), how=how) from error


# elements enough for an optimizer that keeps small parameters in fp32 to quantise its moments
PROBE = (64, 128)


def check_savable(optimizer: Optimizer, parts: int = 1) -> None:
    """Refuse, with `ConfigError` before its first step, an optimizer whose state is more than
    tensors and numbers, or cannot be put together of the `parts` that processes have of each
    parameter: another one of its class, made from its defaults if that can be, takes a step with a
    parameter of its own."""
    first = optimizer.param_groups[0]["params"][0]
    probe = nn.Parameter(torch.zeros(PROBE, device=first.device, dtype=first.dtype))
    probe.grad = torch.ones_like(probe)
    tried = optimizer_state(optimizer)
    _json({"optimizer": tried.plain})  # its parameter groups, before anything is run
    with suppress(
        TypeError, ValueError, RuntimeError, NotImplementedError, AttributeError, KeyError
    ):
        trial_optimizer = type(optimizer)([probe], **optimizer.defaults)
        trial_optimizer.step()
        tried = optimizer_state(trial_optimizer)
    _json({"optimizer": tried.plain})
    if other_kind := next(
        (type(tensor) for tensor in tried.tensors.values() if type(tensor) is not Tensor), None
    ):
        what = (
            f"the state of the run cannot be saved without pickling: {other_kind.__name__} is "
            "no plain tensor"
        )
        how = "use an optimizer whose state is tensors and numbers, such as adamw_8bit"
        raise ConfigError(what, where=f"optimizer {tried.plain['class']}", how=how)
    if parts > 1 and tried.plain.get("wrapped"):
        what = "its quantised moments cannot be divided among processes like the parameters"
        raise ConfigError(
            what, where=f"optimizer {tried.plain['class']}", how="set optim: adamw_torch"
        )


def optimizer_state(
    optimizer: Optimizer, parallel: Parallel | None = None, over: Replicas | None = None
) -> OptimizerState:
    """Return what a checkpoint keeps of an optimizer; each of the processes that hold its
    parameters calls this, and each of those `over` which its state is divided."""
    state_dict = optimizer.state_dict()
    layouts = _layouts(optimizer)
    tensors: dict[str, Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    addresses: set[int] = set()  # where tensors are in memory
    for index, entries in state_dict["state"].items():
        for key, value in _flat(entries):
            if isinstance(value, Tensor):
                # how many steps there were is the same for all
                divided = parallel is not None and value.dim()
                saved = (
                    whole_tensor(parallel, value, layouts[index])
                    if parallel and divided
                    else value.detach().cpu()
                )
                if (address := saved.untyped_storage().data_ptr()) in addresses:
                    # because no file holds a tensor that is another's, as bitsandbytes' tables are
                    saved = saved.clone()
                addresses.add(address)
                tensors[f"{index}.{key}"] = saved.contiguous()
            else:
                plain.setdefault(str(index), {})[key] = value
    if over is not None:
        every = over.exchange((tensors, plain))
        named_tensors = sorted(
            (pair for part, _ in every for pair in part.items()),
            key=lambda pair: int(pair[0].partition(".")[0]),
        )
        tensors = dict(named_tensors)
        plain = {index: entries for _, part in every for index, entries in part.items()}
    wrapped = any(
        hasattr(entry, FLATTEN)
        for entries in state_dict["state"].values()
        for entry in entries.values()
    )
    name = type(optimizer).__qualname__
    about = {"class": name, "state": plain, "param_groups": state_dict["param_groups"]}
    return OptimizerState(tensors, about | ({"wrapped": True} if wrapped else {}))


INSIDE = "/"  # between the names of an entry and of one that it holds, as bitsandbytes nests them
# what a tensor has that is made of others, such as torchao's quantised moments
FLATTEN = "__tensor_flatten__"


def _flat(entries: Mapping[str, Any], outer: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the entries of a parameter's state that are no mappings of tensors, each with the
    names that lead to it.
    """
    for key, value in entries.items():
        if hasattr(value, FLATTEN):
            yield from _flat(
                {name: getattr(value, name) for name in value.__tensor_flatten__()[0]},
                f"{outer}{key}{INSIDE}",
            )
        elif isinstance(value, Mapping) and any(
            isinstance(entry, Tensor) for entry in value.values()
        ):
            yield from _flat(value, f"{outer}{key}{INSIDE}")
        else:
            yield f"{outer}{key}", value


def _insert(entries: dict[str, Any], path: str, value: object) -> None:
    *outer, key = path.split(INSIDE)
    for name in outer:
        entries = entries.setdefault(name, {})
    entries[key] = value


def _wrap(optimizer: Optimizer, state: Mapping[int, dict[str, Any]]) -> None:
    """Put tensors that are made of others together again, as the optimizer makes them for such
    parameters.
    """
    # not by its arguments, because only it knows some
    like: Optimizer = object.__new__(type(optimizer))
    copies = [
        [torch.zeros_like(parameter) for parameter in group["params"]]
        for group in optimizer.param_groups
    ]
    groups = [
        {**group, "params": parameters}
        for group, parameters in zip(optimizer.param_groups, copies, strict=True)
    ]
    like.__dict__ |= optimizer.__dict__ | {"param_groups": groups, "state": defaultdict(dict)}
    parameters = [parameter for group in copies for parameter in group]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    like.step()
    for index, entries in state.items():
        for key, template in like.state[parameters[index]].items():
            if hasattr(template, FLATTEN):
                context = template.__tensor_flatten__()[1]
                entries[key] = template.__tensor_unflatten__(
                    entries[key], context, template.shape, template.stride()
                )


def _layouts(optimizer: Optimizer) -> list[Layout | None]:
    """Return how each parameter of an optimizer lies over processes, in the order in which its
    state numbers them.
    """
    return [
        layout_of(parameter) for group in optimizer.param_groups for parameter in group["params"]
    ]


def _number(value: object) -> float:
    """Return the number that a tensor is, such as a learning rate that compiled updates read."""
    if isinstance(value, Tensor) and not value.dim():
        return float(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _json(state: Mapping[str, Any]) -> str:
    try:
        return json.dumps(state, indent=1, default=_number)
    except TypeError as error:
        what = f"the state of the run cannot be saved without pickling: {error}"
        how = "use an optimizer whose state is tensors and numbers, one level deep"
        raise ConfigError(
            what, where=f"optimizer {state['optimizer']['class']}", how=how
        ) from error
