"""Rewrites a checkpoint as one file in the order it is streamed: embeddings, layer by layer, final norm, head.

Names and shapes become those `transformers` uses in memory, so that a layer is one run of bytes and needs no work when
it is read. Converting holds one group of tensors at a time; copying holds a few megabytes.
"""

import os
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lema.errors import ConfigError, ModelError
from lema.hub import resolve_model
from lema.names import NameMap, checkpoint_dtype, map_names, target_dtypes
from lema.rewrite import (
    METADATA,
    bytes_of,
    cast_pieces,
    copy_companions,
    read_tensor,
    stored_name,
    write_config,
)
from lema.skeleton import find_layers, meta_model, read_config
from lema.tensorfile import TensorFile, disk_error
from lema.weights import SINGLE_NAME, GlobalBinaryIndex

__all__ = ["prepare_directory", "prepare_monolithic_safetensors", "visit_order"]


def prepare_monolithic_safetensors(
    model_or_dir: str | os.PathLike[str] | PreTrainedModel,
    out_file: str | os.PathLike[str],
    device: str = "auto",  # noqa: ARG001  kept for callers of earlier versions: nothing here needs a device
    dtype: torch.dtype | str | None = None,
) -> Path:
    """Write a model as one safetensors file, layers contiguous in the order they are visited.

    Tied weights are written under each of their names. The file appears only when it is complete.

    Args:
        model_or_dir: a model directory, a `.safetensors` file beside its `config.json`, a hub id, or a model in memory.
        out_file: ends in `.safetensors`; its directory is made if it is missing.
        device: has no effect.
        dtype: what the weights are converted to; None: what `from_pretrained` would load them as.

    Raises:
        WeightsError: the checkpoint is damaged or does not fit its config.
        ModelError: `transformers` cannot build the model, or it has no single stack of layers.
        DiskError: the disk is full or failing; nothing is left behind.
    """
    file, wanted = Path(out_file), _parse_dtype(dtype)
    if file.suffix != ".safetensors" or file.is_dir():
        raise ConfigError(
            f"{file} is not the name of a .safetensors file", where="out_file", how="end it in .safetensors"
        )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(error, file.parent) from error
    if isinstance(model_or_dir, PreTrainedModel):
        _write_model(model_or_dir, file, wanted)
    else:
        _write_checkpoint(model_or_dir, file, wanted)
    return file


def prepare_directory(
    model_or_dir: str | os.PathLike[str] | PreTrainedModel,
    out_dir: str | os.PathLike[str],
    dtype: torch.dtype | str | None = None,
) -> Path:
    """Write a model as a directory that streams as it is: one weights file, config, generation config, tokenizer.

    Raises:
        ConfigError: `out_dir` is the model's own directory.
        WeightsError, ModelError, DiskError: as `prepare_monolithic_safetensors`.
    """
    out, wanted = Path(out_dir), _parse_dtype(dtype)
    if isinstance(model_or_dir, PreTrainedModel):
        prepare_monolithic_safetensors(model_or_dir, out / SINGLE_NAME, dtype=wanted)
        model_or_dir.config.save_pretrained(out)
        if model_or_dir.can_generate():
            model_or_dir.generation_config.save_pretrained(out)
        config_file, stored = out / "config.json", model_or_dir.dtype
        architecture = type(model_or_dir).__name__
        write_config(config_file, out, {"dtype": wanted or stored, "architectures": [architecture]})
        return out
    directory = resolve_model(model_or_dir)
    if out.exists() and out.samefile(directory):
        raise ConfigError("a model cannot be prepared into its own directory", where=str(out), how="choose another")
    prepare_monolithic_safetensors(model_or_dir, out / SINGLE_NAME, dtype=wanted)
    copy_companions(directory, out)
    changes = {} if wanted is None else {"dtype": wanted}
    write_config(directory / "config.json", out, changes)  # last: a directory without it is visibly not complete
    return out


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


def _write_checkpoint(source: str | os.PathLike[str], file: Path, dtype: torch.dtype | None) -> None:
    directory = resolve_model(source)
    file_or_directory = Path(source).expanduser()
    index = GlobalBinaryIndex(file_or_directory if file_or_directory.is_file() else directory)
    config = read_config(directory)
    model = meta_model(config, dtype or checkpoint_dtype(config, index))
    names = map_names(model, index)
    state: dict[str, Tensor] = model.state_dict()
    # What is not loaded is not widened either.
    dtypes = target_dtypes(model) | {name: state[name].dtype for name in names.kept}
    order = visit_order(model)
    specs = [(name, stored_name(name, dtypes[name]), tuple(state[name].shape)) for name in order]
    with TensorFile(file, specs, METADATA) as out:
        for name in order:
            _fill(out, name, names, dtypes, model, state)


def _fill(
    out: TensorFile,
    name: str,
    names: NameMap,
    dtypes: Mapping[str, torch.dtype],
    model: PreTrainedModel,
    state: Mapping[str, Tensor],
) -> None:
    """Write the tensor `name`, and with it all that come out of the same conversion."""
    source = names.tied.get(name, name)
    if (record := names.direct.get(source)) is not None:
        out.write(name, cast_pieces(record, dtypes[name]))
    elif source in names.kept:
        out.write(name, [bytes_of(state[source])])
    elif name not in names.tied:  # a tied name is written with the one it shares its weights with
        conversion = next(conversion for conversion in names.conversions if name in conversion.shapes)
        if name != next(iter(conversion.shapes)):
            return
        sharing: dict[str, list[str]] = {}
        for other, stored in names.tied.items():
            sharing.setdefault(stored, []).append(other)
        for made, tensor in conversion.run(model, read_tensor, dtypes[conversion.first]).items():
            for target in (made, *sharing.get(made, ())):
                out.write(target, [bytes_of(tensor.to(dtypes[target]))])


def _write_model(model: PreTrainedModel, file: Path, dtype: torch.dtype | None) -> None:
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
    with TensorFile(file, specs, METADATA) as out:
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
