"""Rewrites a checkpoint as one file in the order it is streamed: embeddings, layer by layer, final norm, head.

Names and shapes become those `transformers` uses in memory, so that a layer is one run of bytes and needs no work when
it is read. Never more than two layers are in memory, however deep the model.
"""

import os
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lema.errors import ConfigError, ModelError
from lema.hub import own_weights, resolve_model
from lema.names import NameMap, checkpoint_dtype, grouped, map_names, target_dtypes, warn_of_unused
from lema.rewrite import (
    METADATA,
    bytes_of,
    copy_companions,
    stored_name,
    write_config,
)
from lema.skeleton import find_layers, meta_model, read_config
from lema.tensorfile import TensorFile, disk_error
from lema.transfer import transfer
from lema.weights import SINGLE_NAME, GlobalBinaryIndex

__all__ = ["Prepared", "prepare", "prepare_directory", "prepare_monolithic_safetensors", "visit_order"]

Source = str | os.PathLike[str] | PreTrainedModel
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Prepared:
    """What became of a checkpoint.

    Attributes:
        path: the file or directory that was written.
        weights: the file of weights in it.
        names: where every tensor came from; None: from a model in memory.
    """

    path: Path
    weights: Path
    names: NameMap | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the file of weights."""
        return self.weights.stat().st_size

    def notes(self) -> list[str]:
        """Say what is not a plain copy, one line each: what was rearranged, what was left out, what was added."""
        if self.names is None:
            return []
        rearranged = [name for conversion in self.names.conversions for name in conversion.shapes]
        lines = {
            "rearranged": rearranged,
            "left out, for transformers loads them into no model of this type": [r.name for r in self.names.ignored],
            "left out, for the model has no place for them": [r.name for r in self.names.unused],
            "not stored, and written as the model makes them": self.names.kept,
        }
        return [f"{len(names)} tensors {what}: {grouped(names)}" for what, names in lines.items() if names]


def prepare(
    model_or_dir: Source,
    out: str | os.PathLike[str],
    dtype: torch.dtype | str | None = None,
    *,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Prepared:
    """Write a model in the order it is streamed, as one `.safetensors` file or as a directory with all that it needs.

    Tied weights are written under each of their names. What is written appears only when it is complete; what a killed
    run to the same place left is removed. Tensors on disk that the model has no place for are left out, and named in
    what is returned; a tensor of the model that is not on disk is an error, though `from_pretrained` would draw it.

    Args:
        model_or_dir: a model directory, a `.safetensors` file beside its `config.json`, a hub id, or a model in memory.
        out: a `.safetensors` file, or a directory; directories are made where they are missing.
        dtype: what the weights are converted to; None: what `from_pretrained` would load them as.
        trust_remote_code: run code that lies in the model directory.
        progress: called with the bytes given to the disk, and how many there are in all.

    Raises:
        ConfigError: `out` is the model's own directory.
        WeightsError: the checkpoint is damaged or does not fit its config.
        ModelError: `transformers` cannot build the model, or it has no single stack of layers.
        DiskError: the disk is full or failing; nothing is left behind.
    """
    place, wanted = Path(out), _parse_dtype(dtype)
    if place.suffix == ".safetensors" and not place.is_dir():
        return Prepared(place, place, _write_weights(model_or_dir, place, wanted, trust_remote_code, progress))
    weights = place / SINGLE_NAME
    if isinstance(model_or_dir, PreTrainedModel):
        names = _write_weights(model_or_dir, weights, wanted, trust_remote_code, progress)
        model_or_dir.config.save_pretrained(place)
        if model_or_dir.can_generate():
            model_or_dir.generation_config.save_pretrained(place)
        changes = {"dtype": wanted or model_or_dir.dtype, "architectures": [type(model_or_dir).__name__]}
        write_config(place / "config.json", place, changes)
        return Prepared(place, weights, names)
    directory = resolve_model(model_or_dir)
    if place.exists() and place.samefile(directory):
        raise ConfigError("a model cannot be prepared into its own directory", where=str(place), how="choose another")
    names = _write_weights(model_or_dir, weights, wanted, trust_remote_code, progress)
    copy_companions(directory, place, code=trust_remote_code)
    changes = {} if wanted is None else {"dtype": wanted}
    write_config(directory / "config.json", place, changes)  # last: a directory without it is visibly not complete
    return Prepared(place, weights, names)


def prepare_monolithic_safetensors(
    model_or_dir: Source,
    out_file: str | os.PathLike[str],
    device: str = "auto",  # noqa: ARG001  kept for callers of earlier versions: nothing here needs a device
    dtype: torch.dtype | str | None = None,
    *,
    trust_remote_code: bool = False,
) -> Path:
    """Write a model as one safetensors file, layers contiguous in the order they are visited.

    As `prepare`; tensors on disk that the model has no place for are named in a warning.

    Args:
        model_or_dir: as in `prepare`.
        out_file: ends in `.safetensors`.
        device: has no effect.
        dtype: as in `prepare`.
        trust_remote_code: as in `prepare`.

    Raises:
        ConfigError: `out_file` does not end in `.safetensors`.
        WeightsError, ModelError, DiskError: as `prepare`.
    """
    file = Path(out_file)
    if file.suffix != ".safetensors" or file.is_dir():
        raise ConfigError(
            f"{file} is not the name of a .safetensors file", where="out_file", how="end it in .safetensors"
        )
    prepared = prepare(model_or_dir, file, dtype, trust_remote_code=trust_remote_code)
    return _warned(prepared)


def prepare_directory(
    model_or_dir: Source,
    out_dir: str | os.PathLike[str],
    dtype: torch.dtype | str | None = None,
    *,
    trust_remote_code: bool = False,
) -> Path:
    """Write a model as a directory that streams as it is: one weights file, config, generation config, tokenizer, code.

    As `prepare`; tensors on disk that the model has no place for are named in a warning.

    Raises:
        ConfigError: `out_dir` is the model's own directory, or the name of a file of weights.
        WeightsError, ModelError, DiskError: as `prepare`.
    """
    if (out := Path(out_dir)).suffix == ".safetensors" and not out.is_dir():
        raise ConfigError(f"{out} is the name of a file, not of a directory", where="out_dir", how="choose another")
    return _warned(prepare(model_or_dir, out, dtype, trust_remote_code=trust_remote_code))


def visit_order(model: PreTrainedModel) -> list[str]:
    """The names of the model's state dict in the order of a forward pass: before the layers, each layer, after them.

    Raises:
        ModelError: the model has no single stack of decoder layers.
    """
    layers_name, layers = find_layers(model)
    names = list(model.state_dict())
    inside = [[name for name in names if name.startswith(f"{layers_name}.{i}.")] for i in range(len(layers))]
    in_layers = {name for layer in inside for name in layer}
    first = next((position for position, name in enumerate(names) if name in in_layers), len(names))
    before = names[:first]
    after = [name for name in names[first:] if name not in in_layers]
    return before + [name for layer in inside for name in layer] + after


def _warned(prepared: Prepared) -> Path:
    if prepared.names is not None:
        warn_of_unused(prepared.names, stacklevel=4)
    return prepared.path


def _write_weights(
    source: Source, file: Path, dtype: torch.dtype | None, trust: bool, progress: Progress | None
) -> NameMap | None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(error, file.parent) from error
    if isinstance(source, PreTrainedModel):
        _write_model(source, file, dtype, progress)
        return None
    return _write_checkpoint(source, file, dtype, trust, progress)


def _write_checkpoint(
    source: str | os.PathLike[str], file: Path, dtype: torch.dtype | None, trust: bool, progress: Progress | None
) -> NameMap:
    directory = resolve_model(source)
    index = GlobalBinaryIndex(own_weights(source, directory))
    config = read_config(directory, trust_remote_code=trust)
    model = meta_model(config, dtype or checkpoint_dtype(config, index), trust_remote_code=trust)
    names = map_names(model, index)
    state: dict[str, Tensor] = model.state_dict()
    # What is not loaded is not widened either.
    dtypes = target_dtypes(model) | {name: state[name].dtype for name in names.kept}
    order = visit_order(model)
    specs = [(name, stored_name(name, dtypes[name]), tuple(state[name].shape)) for name in order]
    with TensorFile(file, specs, METADATA, progress) as out:
        transfer(out, order, model, names, dtypes)
    return names


def _write_model(model: PreTrainedModel, file: Path, dtype: torch.dtype | None, progress: Progress | None) -> None:
    state: dict[str, Tensor] = model.state_dict()
    if absent := [name for name, tensor in state.items() if tensor.device.type == "meta"]:
        raise ModelError(
            f"{len(absent)} tensors of the model have no weights, {absent[0]} for one",
            where=type(model).__name__,
            how="load the model without offloading, or give its directory instead",
        )
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ModelError("the model carries adapters", where=type(model).__name__, how="prepare the base model")
    if dtype is None:
        dtypes = {name: tensor.dtype for name, tensor in state.items()}
    else:
        dtypes = target_dtypes(meta_model(deepcopy(model.config), dtype))
    order = visit_order(model)
    specs = [(name, stored_name(name, dtypes[name]), tuple(state[name].shape)) for name in order]
    with TensorFile(file, specs, METADATA, progress) as out:
        for name in order:
            out.write(name, [bytes_of(state[name].detach().to("cpu", dtypes[name]))])


def _parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    parsed = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if parsed is not None and not (isinstance(parsed, torch.dtype) and parsed.is_floating_point):
        raise ConfigError(
            f"{dtype!r} is not a dtype of weights", where="dtype", how="give float32, bfloat16 or float16"
        )
    if parsed is None and dtype is not None:
        raise ConfigError(f"there is no dtype {dtype!r}", where="dtype", how="give float32, bfloat16 or float16")
    return parsed
