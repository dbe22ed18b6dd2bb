"""A delta: the tensors that training changed, as they are now, and the model they belong to.

A delta holds new values and not differences, since differences do not restore bits. It is three
kinds of files: shards (`delta.safetensors`, or several and their index), and `lema_delta.json`,
which names the base and its fingerprint.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Self

import torch
from pydantic import StrictStr, TypeAdapter, ValidationError
from torch import Tensor

from lema.convert.hubformat import open_stored, write_model
from lema.convert.tensors import read_tensor, stored_name
from lema.errors import WeightsError, named_in
from lema.storage import GlobalBinaryIndex
from lema.storage.atomic import free_directory
from lema.storage.header import damaged, read_json
from lema.storage.regular import check_separate
from lema.storage.rendering import carry_rendering
from lema.storage.verify import base_fingerprint

__all__ = ["DELTA_NAME", "apply_delta", "is_delta"]

DELTA_NAME = "lema_delta.json"
STEM = "delta"
FORMAT = 1
MAX_BYTES = 100_000_000  # of `lema_delta.json`: it lists names


@dataclass(frozen=True)
class DeltaFile:
    """What `lema_delta.json` says."""

    format: int
    base: StrictStr
    revision: StrictStr | None
    weights: StrictStr | None  # of the base, where they lie elsewhere
    fingerprint: StrictStr
    dtype: StrictStr | None  # that the base was opened in; None: its own
    tensors: list[StrictStr]

    @classmethod
    def read(cls, directory: Path) -> Self:
        file = directory / DELTA_NAME
        values = read_json(file, MAX_BYTES, "a delta")
        if values.get("format") != FORMAT:
            what = f"the delta is of format {values.get('format')!r}"
            raise WeightsError(what, where=str(file), how="use a newer version of lema")
        if values.keys() != {field.name for field in fields(cls)}:
            raise damaged(file, "its keys are not those of a delta")
        try:
            return TypeAdapter(cls).validate_python(values)
        except ValidationError as error:
            raise damaged(file, f"{error.errors()[0]['loc'][0]} is of another type") from error


def is_delta(directory: str | os.PathLike[str]) -> bool:
    """Whether a directory holds a delta."""
    return (Path(directory) / DELTA_NAME).is_file()


def apply_delta(
    delta_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    base: str | os.PathLike[str] | None = None,
    max_shard_size: int = 5_000_000_000,
    *,
    trust_remote_code: bool = False,
) -> Path:
    """Write the model that a delta makes of its base, in the hub's format. `ConfigError`: `out_dir`
    is not empty, or lies in what is read, or `max_shard_size` is not positive; `WeightsError`: the
    delta is damaged, the base is missing, or it is not the one that was trained; `DiskError`: a
    file could not be written; nothing is left behind. `delta_dir`: a directory that `save_delta`
    wrote. `base`: where the base is now; None: where it was. `max_shard_size`: bytes of the tensors
    of one file, at most; a larger tensor has a file to itself. `trust_remote_code`: run code that
    comes with the base model, and copy it."""
    out = free_directory(out_dir, max_shard_size)
    delta = Path(delta_dir)
    about = DeltaFile.read(delta)
    if about.dtype is not None and not isinstance(getattr(torch, about.dtype, None), torch.dtype):
        raise damaged(delta / DELTA_NAME, f"there is no dtype {about.dtype!r}")
    with named_in(delta / DELTA_NAME if base is None else None):
        stored = open_stored(
            about.base if base is None else base,
            revision=about.revision if base is None else None,
            weights=about.weights if base is None else None,
            dtype=about.dtype,
            trust_remote_code=trust_remote_code,
        )
    check_separate(out, [delta, stored.directory])
    if (fingerprint := base_fingerprint(stored.index)) != about.fingerprint:
        what = (
            f"the base is not the model that was trained: its fingerprint is {fingerprint}, "
            f"and it was {about.fingerprint}"
        )
        how = f"name the directory of the unchanged base model ({about.base})"
        raise WeightsError(what, where=str(stored.index.path), how=how)
    # Each of the delta's tensors must be one of the model's, of its shape and the type it is
    # written in.
    single = delta / f"{STEM}.safetensors"
    new = GlobalBinaryIndex(single if single.exists() else delta / f"{STEM}.safetensors.index.json")
    if mismatch := sorted(new.keys() ^ set(about.tensors)):
        raise damaged(
            delta / DELTA_NAME, f"it and the other files list different tensors: {mismatch[0]!r}"
        )
    state = stored.skeleton.state_dict()
    for name, record in new.items():
        model_name = stored.classes.in_own(name)
        expected = (
            (stored_name(model_name, stored.dtypes[model_name]), tuple(state[model_name].shape))
            if model_name in stored.records
            else None
        )
        if (record.dtype, record.shape) != expected:
            what = (
                f"tensor {name!r} ({record.dtype} {list(record.shape)}) is not a tensor of the "
                "base model"
            )
            raise WeightsError(what, where=str(record.file), how="the delta is of another model")
    form = stored.form()
    trained = stored.by_own_names(new)

    def value(name: str) -> Tensor:
        return read_tensor(trained[name], stored.dtypes[name])

    def pieces(name: str) -> Iterable[memoryview]:
        return form.pieces(name, trained.__contains__, value)

    changes = stored.config_changes
    return write_model(
        out,
        form.specs(),
        max_shard_size,
        pieces,
        stored.directory,
        changes,
        code=trust_remote_code,
        write_extra=partial(carry_rendering, delta),
    )
