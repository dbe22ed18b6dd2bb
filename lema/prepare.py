"""Rewrites a checkpoint as one file in the order it is streamed: embeddings, layer by layer, final norm, head.

Names and shapes become those `transformers` uses in memory, so that a layer is one run of bytes and needs no work when
it is read. Converting holds one group of tensors at a time; copying holds a few megabytes.
"""

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lema.errors import ConfigError, ModelError
from lema.hub import resolve_model
from lema.names import NameMap, checkpoint_dtype, map_names, target_dtypes
from lema.skeleton import find_layers, meta_model, read_config
from lema.stream.placement import DTYPES
from lema.tensorfile import TensorFile, disk_error, read_into, read_pieces
from lema.weights import PREPARED_MARK, SINGLE_NAME, GlobalBinaryIndex, TensorRecord, check_inside

__all__ = ["prepare_directory", "prepare_monolithic_safetensors", "visit_order"]

STORED_NAMES = {dtype: name for name, dtype in DTYPES.items()}
METADATA = {"format": "pt", PREPARED_MARK: "true"}
COPIED_PATTERNS = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")  # tokenizer, templates, generation settings


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
        _write_config(config_file, out, {"dtype": _plain(wanted or stored), "architectures": [architecture]})
        return out
    directory = resolve_model(model_or_dir)
    if out.exists() and out.samefile(directory):
        raise ConfigError("a model cannot be prepared into its own directory", where=str(out), how="choose another")
    prepare_monolithic_safetensors(model_or_dir, out / SINGLE_NAME, dtype=wanted)
    sources = {file.name: file for pattern in COPIED_PATTERNS for file in directory.glob(pattern) if file.is_file()}
    for name, source in sorted(sources.items()):
        if name != "config.json" and not name.endswith(".index.json"):
            check_inside(source)
            _replace(out / name, source.read_bytes())
    changes = {} if wanted is None else {"dtype": _plain(wanted)}
    _write_config(directory / "config.json", out, changes)  # last: a directory without it is visibly not complete
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
    specs = [(name, _stored_name(name, dtypes[name]), tuple(state[name].shape)) for name in order]
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
        out.write(name, _cast_pieces(record, dtypes[name]))
    elif source in names.kept:
        out.write(name, [_bytes_of(state[source])])
    elif name not in names.tied:  # a tied name is written with the one it shares its weights with
        conversion = next(conversion for conversion in names.conversions if name in conversion.shapes)
        if name != next(iter(conversion.shapes)):
            return
        sharing: dict[str, list[str]] = {}
        for other, stored in names.tied.items():
            sharing.setdefault(stored, []).append(other)
        for made, tensor in conversion.run(model, _read, dtypes[conversion.first]).items():
            for target in (made, *sharing.get(made, ())):
                out.write(target, [_bytes_of(tensor.to(dtypes[target]))])


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
    specs = [(name, _stored_name(name, dtypes[name]), tuple(state[name].shape)) for name in order]
    with TensorFile(file, specs, METADATA) as out:
        for name in order:
            out.write(name, [_bytes_of(state[name].detach().to("cpu", dtypes[name]))])


def _read(record: TensorRecord, dtype: torch.dtype) -> Tensor:
    """The whole tensor in memory, as `dtype`."""
    buffer = torch.empty(record.nbytes, dtype=torch.uint8)
    read_into(record, buffer.numpy().data)
    return buffer.view(_torch_dtype(record)).view(record.shape).to(dtype)


def _cast_pieces(record: TensorRecord, dtype: torch.dtype) -> Iterator[memoryview]:
    stored = _torch_dtype(record)
    for piece in read_pieces(record):
        yield piece if stored == dtype else _bytes_of(torch.frombuffer(piece, dtype=stored).to(dtype))


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _torch_dtype(record: TensorRecord) -> torch.dtype:
    if (dtype := DTYPES.get(record.dtype)) is None:
        raise ModelError(
            f"tensor {record.name!r} is stored as {record.dtype}, which no model computes with",
            where=str(record.file),
            how="use a checkpoint that is not quantised",
        )
    return dtype


def _stored_name(name: str, dtype: torch.dtype) -> str:
    if (stored := STORED_NAMES.get(dtype)) is None:
        raise ModelError(f"tensor {name!r} is {dtype}, which cannot be written", where=name, how="give a dtype")
    return stored


def _parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    parsed = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if parsed is not None and not (isinstance(parsed, torch.dtype) and parsed.is_floating_point):
        raise ConfigError(
            f"{dtype!r} is not a dtype of weights", where="dtype", how="give float32, bfloat16 or float16"
        )
    if parsed is None and dtype is not None:
        raise ConfigError(f"there is no dtype {dtype!r}", where="dtype", how="give float32, bfloat16 or float16")
    return parsed


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _write_config(source: Path, out: Path, changes: Mapping[str, Any]) -> None:
    config = json.loads(source.read_text(encoding="utf-8"))
    if "dtype" in changes:
        config.pop("torch_dtype", None)  # the older name of the same key
    _replace(out / "config.json", (json.dumps(config | dict(changes), indent=2) + "\n").encode())


def _replace(file: Path, content: bytes) -> None:
    """Write a small file in one step: it is there whole, or as it was."""
    partial = file.with_name(f".{file.name}.{secrets.token_hex(4)}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(file)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise disk_error(error, file) from error
