"""Rewrites a checkpoint as one file in the order it is streamed: embeddings, layer by layer, final norm, head.

Names and shapes become those `transformers` uses in memory, so that a layer is one run of bytes and needs no work when
it is read. Never more than two layers are in memory, however deep the model.
"""

import os
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from lema.convert.quantize import check_kind
from lema.convert.tensors import copy_companions, write_config
from lema.convert.weightsfile import Prepared, Progress, Source, write_weights
from lema.errors import ConfigError
from lema.model.weight_names import warn_of_unused
from lema.storage import resolve_model
from lema.storage.index import SINGLE_NAME

__all__ = ["prepare", "prepare_monolithic_safetensors"]


def prepare(
    model_or_dir: Source,
    out: str | os.PathLike[str],
    dtype: torch.dtype | str | None = None,
    *,
    quantize: str | None = None,
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
        quantize: "int8", "fp8" (both as torchao stores them) or "nf4" (as bitsandbytes does): what the weights of the
            linear modules in decoder layers are stored as; then `dtype` is what they expand to. None: nothing is
            quantised.
        trust_remote_code: run code that lies in the model directory.
        progress: called with the bytes given to the disk, and how many there are in all.

    Raises:
        ConfigError: `out` is the model's own directory, or a file where it must be a directory; what `quantize` needs
            is not installed.
        WeightsError: the checkpoint is damaged or does not fit its config.
        ModelError: `transformers` cannot build the model, or it has no single stack of layers, or it is quantised
            already, or has nothing to quantise.
        DiskError: the disk is full or failing; nothing is left behind.
    """
    check_kind(quantize)
    place, wanted = Path(out), _parse_dtype(dtype)
    if place.suffix == ".safetensors" and not place.is_dir():
        if quantize is not None:
            what = "a file alone cannot hold a quantised model: how it is quantised is said in config.json"
            raise ConfigError(what, where=str(place), how="name a directory")
        return write_weights(model_or_dir, place, wanted, None, trust_remote_code, progress)
    weights = place / SINGLE_NAME
    if isinstance(model_or_dir, PreTrainedModel):
        written = write_weights(model_or_dir, weights, wanted, quantize, trust_remote_code, progress)
        model_or_dir.config.save_pretrained(place)
        if model_or_dir.can_generate():
            model_or_dir.generation_config.save_pretrained(place)
        names = {"architectures": [type(model_or_dir).__name__], "dtype": wanted or model_or_dir.dtype}
        write_config(place / "config.json", place, names | written.changes)
        return replace(written, path=place)
    directory = resolve_model(model_or_dir)
    if place.exists() and place.samefile(directory):
        raise ConfigError("a model cannot be prepared into its own directory", where=str(place), how="choose another")
    written = write_weights(model_or_dir, weights, wanted, quantize, trust_remote_code, progress)
    copy_companions(directory, place, code=trust_remote_code)
    changes = ({} if wanted is None else {"dtype": wanted}) | written.changes
    write_config(directory / "config.json", place, changes)  # last: a directory without it is visibly not complete
    return replace(written, path=place)


def prepare_monolithic_safetensors(
    model_or_dir: Source,
    out_file: str | os.PathLike[str],
    device: str = "auto",  # noqa: ARG001  kept for callers of earlier versions: nothing here needs a device
    dtype: torch.dtype | str | None = None,
    *,
    trust_remote_code: bool = False,
) -> Path:
    """Write a model as one safetensors file, `out_file`, layers contiguous in the order they are visited.

    It is `prepare`, which describes the other arguments and errors, with a warning that names tensors on disk that the
    model has no place for. `device` has no effect.

    Raises:
        ConfigError: `out_file` does not end in `.safetensors`.
    """
    file = Path(out_file)
    if file.suffix != ".safetensors" or file.is_dir():
        what = f"{file} is not the name of a .safetensors file"
        raise ConfigError(what, where="out_file", how="end it in .safetensors")
    prepared = prepare(model_or_dir, file, dtype, trust_remote_code=trust_remote_code)
    if prepared.names is not None:
        warn_of_unused(prepared.names, stacklevel=3)
    return prepared.path


def _parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    parsed = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if parsed is not None and not (isinstance(parsed, torch.dtype) and parsed.is_floating_point):
        what = f"{dtype!r} is not a dtype of weights"
        raise ConfigError(what, where="dtype", how="give float32, bfloat16 or float16")
    if parsed is None and dtype is not None:
        raise ConfigError(f"there is no dtype {dtype!r}", where="dtype", how="give float32, bfloat16 or float16")
    return parsed
