"""Rewrites a checkpoint as one file in the order it is streamed: embeddings, layer by layer, final
norm, head.

A layer is one run of bytes. In a directory every tensor is as it is published; in a single file,
and where weights are quantised, tensors are put together as `transformers` has them in memory, so
that they need no work when they are read (`lema.convert.published`). Never more than two layers are
in memory, however deep the model: copying and casting hold a few megabytes, and a tensor that is
put together from several, or is quantised, is held whole.
"""

import os
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from lema.convert.conversion import Conversion, Progress, Source, opened_source
from lema.convert.quantize import Precision, check_kind
from lema.convert.tensors import copy_companions, write_config
from lema.errors import ConfigError
from lema.model.weight_names import NameMap, grouped, warn_of_unused
from lema.storage import resolve_model
from lema.storage.atomic import appearing, directories_for
from lema.storage.index import SINGLE_NAME
from lema.storage.regular import check_separate, expanded

__all__ = ["Progress", "Source", "prepare", "prepare_monolithic_safetensors"]


@dataclass(frozen=True)
class Prepared:
    """What became of a checkpoint."""

    path: Path  # the file or directory that was written
    weights: Path  # the file of weights in it
    names: NameMap | None = None  # where every tensor came from; None: from a model in memory
    # what quantising has cost, by kind of module; empty: nothing was quantised
    precision: tuple[Precision, ...] = ()
    refused: tuple[str, ...] = ()  # linear weights with a shape that the format does not support
    # further ones, that are not quantised because they are written in pieces
    in_pieces: tuple[str, ...] = ()
    # what `config.json` must say of the weights
    changes: dict[str, Any] = field(default_factory=dict)
    # tensors of a quantised source that no model reads, and that cannot be copied
    left_out: tuple[str, ...] = ()
    published: bool = False  # it has the names of the source, and all of its tensors

    @property
    def nbytes(self) -> int:
        """Bytes of the file of weights."""
        return self.weights.stat().st_size

    def notes(self) -> list[str]:
        """List, one line each, the tensors that are not plain copies: rearranged, left out or
        added ones.
        """
        names = self.names or NameMap()
        if self.published:
            lines = {
                "expanded": names.quantized,
                "left out, because they are quantised and no model reads them": list(self.left_out),
                "left out, because no class reads them": [record.name for record in names.unused],
            }
            return [
                f"{len(tensors)} tensors {what}: {grouped(tensors)}"
                for what, tensors in lines.items()
                if tensors
            ]
        lines = {
            "rearranged": names.rearranged,
            "left out, because transformers does not load them into this type": [
                r.name for r in names.ignored
            ],
            "left out, because the model does not have them": [r.name for r in names.unused],
            "not stored, so written with the model's own values": names.unstored_buffers,
            "not quantised, because of their shape": list(self.refused),
            "not quantised, because they stay in pieces": list(self.in_pieces),
        }
        return [
            f"{len(tensors)} tensors {what}: {grouped(tensors)}"
            for what, tensors in lines.items()
            if tensors
        ]


def write_weights(
    source: Source,
    file: Path,
    dtype: torch.dtype | None,
    quantize: str | None,
    trust: bool,
    progress: Progress | None,
    *,
    assembled: bool,
) -> Prepared:
    """Write a model into one file in the order it is streamed, in the assembled form or as it is
    published; other arguments and errors as of `prepare`."""
    opened = opened_source(source, dtype, trust)
    conversion = Conversion(opened, quantize=quantize, assembled=assembled)
    with directories_for(file):
        conversion.write(file, conversion.sections, progress)
    changes = conversion.changes
    if (quantizer := conversion.quantizer) is not None:
        refused = tuple(quantizer.refused)
        in_pieces = tuple(quantizer.in_pieces)
        return Prepared(file, file, opened.names, quantizer.precision, refused, in_pieces, changes)
    left_out = tuple(conversion.form.left_out)
    return Prepared(
        file, file, opened.names, changes=changes, left_out=left_out, published=not assembled
    )


def prepare(
    model_or_dir: Source,
    out: str | os.PathLike[str],
    dtype: torch.dtype | str | None = None,
    *,
    quantize: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Prepared:
    """Write a model in the order it is streamed, as one `.safetensors` file or as a directory with
    all that it needs.

    A directory that is not quantised has every tensor of the checkpoint, under its name there, so
    that it is read as the checkpoint is. In a single file, and in one that is quantised, tensors
    that are published in pieces, as experts are, are put together, and tied weights are there under
    each of their names; `transformers` reads these as well. The class is the one that `config.json`
    names, with the towers that text does not reach. What is written appears only when it is
    complete; what a killed run to the same place left is removed. The header of the file names what
    it was made of, for adapters that are trained on it. Tensors on disk that no class reads are
    left out, and named in what is returned; a tensor of the model that is not on disk is an error,
    though `from_pretrained` would draw it at random. `ConfigError`: `out` is the model's own
    directory, or one in it, or a file where it must be a directory; what `quantize` needs is not
    installed; `WeightsError`: the checkpoint is damaged or does not fit its config; `ModelError`:
    `transformers` cannot build the model, or it has no single stack of layers, or it is quantised
    already, or has nothing to quantise; `DiskError`: the disk is full or failing; nothing is left
    behind.

    `model_or_dir`: a model directory, a `.safetensors` file next to its `config.json`, a hub id, or
    a model in memory. `out`: a `.safetensors` file, or a directory; directories are made where they
    are missing. `dtype`: what the weights are converted to; None: what `from_pretrained` would load
    them as. `quantize`: "int8", "fp8" (both as torchao stores them) or "nf4" (as bitsandbytes
    does): what the weights of the linear modules in decoder layers are stored as; then `dtype` is
    what they expand to. None: nothing is quantised. `progress`: called with the bytes given to the
    disk, and how many there are in all."""
    check_kind(quantize)
    target = Path(out)
    target_dtype = _parse_dtype(dtype)
    if not isinstance(model_or_dir, PreTrainedModel):
        # A new file of weights belongs beside a `config.json`, and beside one that is read there
        # may be anything.
        alone = ".safetensors" in (target.suffix, expanded(model_or_dir).suffix)
        check_separate(target, [resolve_model(model_or_dir)], below=not alone)
    if target.suffix == ".safetensors" and not target.is_dir():
        if quantize is not None:
            what = (
                "a single file cannot hold a quantised model, because config.json describes "
                "the quantisation"
            )
            raise ConfigError(what, where=str(target), how="name a directory")
        return write_weights(
            model_or_dir, target, target_dtype, None, trust_remote_code, progress, assembled=True
        )
    options = (target_dtype, quantize, trust_remote_code, progress)
    with ExitStack() as stack:
        part = target
        # one that is there may hold other files, or be where a disk is mounted
        if not target.exists():
            stack.enter_context(directories_for(target))
            part = stack.enter_context(appearing(target))
        written = write_weights(
            model_or_dir, part / SINGLE_NAME, *options, assembled=quantize is not None
        )
        if isinstance(model_or_dir, PreTrainedModel):
            model_or_dir.config.save_pretrained(part)
            if model_or_dir.can_generate():
                model_or_dir.generation_config.save_pretrained(part)
            names: dict[str, Any] = {
                "architectures": [type(model_or_dir).__name__],
                "dtype": target_dtype or model_or_dir.dtype,
            }
            source: Path = part
        else:
            source = resolve_model(model_or_dir)
            copy_companions(source, part, code=trust_remote_code)
            names = {} if target_dtype is None else {"dtype": target_dtype}
        # Last, because a directory that was there is visibly not complete without it.
        write_config(source / "config.json", part, names | written.changes)
    return replace(written, path=target, weights=target / SINGLE_NAME)


def prepare_monolithic_safetensors(
    model_or_dir: Source,
    out_file: str | os.PathLike[str],
    device: str = "auto",  # noqa: ARG001  kept for callers of earlier versions: nothing here needs a device
    dtype: torch.dtype | str | None = None,
    *,
    trust_remote_code: bool = False,
) -> Path:
    """Write a model as one safetensors file, layers contiguous in the order they are visited.

    It is `prepare` with a warning that names tensors on disk that the model has no place for.

    Args:
        model_or_dir: a loaded model, or a directory or hub id.
        out_file: the file to write, which ends in `.safetensors`.
        device: has no effect.
        dtype: floating-point weights are written in it; None: in that of `from_pretrained`.
        trust_remote_code: run the model's own code.

    Returns:
        The path of the file.

    Raises:
        ConfigError: `out_file` does not end in `.safetensors`.
        ModelError: the model cannot be streamed.
        WeightsError: a file of weights is missing or damaged.
        DiskError: there is no space for the file.
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
    if dtype is not None and not (isinstance(parsed, torch.dtype) and parsed.is_floating_point):
        what = (
            f"{dtype!r} is not a dtype of weights"
            if parsed is not None
            else f"there is no dtype {dtype!r}"
        )
        raise ConfigError(what, where="dtype", how="give float32, bfloat16 or float16")
    return parsed
