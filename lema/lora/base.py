"""The model that an adapter belongs to, as a file beside the adapter says it.

An adapter is a change to weights; on other weights it is noise. A path or a hub id may lead to
other files by now, so beside an adapter is the fingerprint of its base model's files
(`lema.storage.verify`), and what the model's config says that changes numbers
(`lema.lora.baseconfig`).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig

from lema.config import LemaConfig
from lema.config.lemaconfig import CONFIG_NAME
from lema.config.types import dtype_name
from lema.errors import AdapterError, WeightsError
from lema.lora.baseconfig import OF_PREPARED, differences, of_numbers
from lema.lora.checks import read_json
from lema.storage import GlobalBinaryIndex, resolve_model
from lema.storage.atomic import replace_file
from lema.storage.hub import own_weights
from lema.storage.regular import expanded
from lema.storage.verify import BaseFiles, base_fingerprint, model_config

__all__ = [
    "BASE_NAME",
    "COMPUTED_TYPES",
    "Base",
    "base_of",
    "check_base",
    "check_named_base",
    "computed_for",
    "note_quantization",
]
__all__ += ["write_base"]

BASE_NAME = "adapter_base.json"
KEY = "fingerprint"
CONFIG = "config"  # beside it: what the model's config says that changes numbers
SOURCES = "sources"  # and the fingerprints of what the model was prepared from
COMPUTED = "compute_dtype"  # and the type that its layers were computed in
COMPUTED_TYPES = ("float32", "bfloat16", "float16")  # that settings name


AS_IT_WAS = (
    "give the model as it was; to use the adapter on this one all the same, name it by an "
    "explicit model_name_or_path, "
    f"or delete {BASE_NAME}"
)


class Base(NamedTuple):
    """The model that an adapter belongs to."""

    name: str  # by which others find it: a hub id, or a path
    revision: str | None  # of a hub id
    fingerprint: str  # of the files that the adapter is trained on
    # what changes numbers in its `config.json`; None: it has none
    config: Mapping[str, Any] | None = None
    sources: tuple[str, ...] = ()  # fingerprints of the models that these files were prepared from
    computed: torch.dtype | None = None  # in which its layers are computed, if that is known


def base_of(
    config: LemaConfig,
    index: GlobalBinaryIndex,
    files: BaseFiles | None = None,
    computed: torch.dtype | None = None,
) -> Base:
    """Return the model that the settings name, with what its `files` were (None: as they are now)
    and the type that it is `computed` in, if that is known. In the place of a directory that was
    prepared it is what that was made of, if this is a hub id, or a directory that is still there.
    """
    files = files or BaseFiles(index)
    about = files.fingerprint, of_numbers(files.config), index.sources, computed
    if expanded(config.model_name_or_path).exists() and (origin := index.origin) is not None:
        name, commit = origin
        # a quantised base is of the very model that the settings name
        is_named = expanded(config.model_name_or_path).resolve() == Path(name).resolve()
        if not is_named and (not Path(name).is_absolute() or Path(name).is_dir()):
            return Base(name, commit, *about)
    return Base(config.model_name_or_path, config.revision, *about)


def write_base(directory: Path, base: Base) -> None:
    """Write into an adapter's directory which model it belongs to, and in which type that was
    computed. `DiskError`: a file could not be written."""
    about: dict[str, Any] = {KEY: base.fingerprint}
    if base.config is not None:
        about[CONFIG] = base.config
    if base.sources:
        about[SOURCES] = list(base.sources)
    if base.computed is not None:
        about[COMPUTED] = dtype_name(base.computed)
    replace_file(directory / BASE_NAME, (json.dumps(about, indent=2) + "\n").encode())


def computed_for(directory: Path) -> str | None:
    """Return the type that the layers were computed in for the adapter in `directory`, if a file
    beside it says one that settings name."""
    file = directory / BASE_NAME
    compute_dtype = read_json(file).get(COMPUTED) if file.is_file() else None
    return compute_dtype if compute_dtype in COMPUTED_TYPES else None


def note_quantization(directory: Path, config: LemaConfig) -> None:
    """Warn if the settings have the base of the adapter in `directory` in another form than the
    one that it was trained on, as far as a file beside it says that."""
    file = directory / CONFIG_NAME
    if not file.is_file():
        return
    then = read_json(file).get("quantize_base")
    now = config.quantize_base
    if then == now:
        return
    before, here = (
        "as it is stored" if kind is None else f"in {kind!s:.20}" for kind in (then, now)
    )
    warnings.warn(
        f"the adapter was trained on the base {before}, and here the base is {here}: its numbers "
        f"are others; quantize_base: {'null' if then is None else then!s:.20} has those of the "
        "training",
        stacklevel=3,
    )


def check_base(directory: Path, index: GlobalBinaryIndex, *, exact: bool = False) -> bool:
    """Make sure that a model's files are those of the model that the adapter in `directory` was
    trained on, or that one of the two was prepared from the other, unless they must be the same
    (`exact`). Return whether a file beside the adapter says which model that is; adapters that PEFT
    alone has written have none. `AdapterError`: it is another model, or what is written is damaged.
    """
    file = directory / BASE_NAME
    if not file.is_file():
        return False
    if KEY not in (about := read_json(file)):
        raise AdapterError("the adapter does not name its base model", where=str(file))
    fingerprint = base_fingerprint(index)
    expected = about[KEY]
    sources = about.get(SOURCES, [])
    if not isinstance(sources, list):
        raise AdapterError(f"{SOURCES} is no list of fingerprints", where=str(file))
    # Not also where both were prepared from one model: that would take a prepared file that was
    # changed for itself.
    prepared = not exact and (expected in index.sources or fingerprint in sources)
    if fingerprint != expected and not prepared:
        raise AdapterError(
            (
                "the model has changed since the adapter was trained: its fingerprint is "
                f"{fingerprint}, and it was {expected}"
            ),
            where=f"{directory}, on {index.path}",
            how=AS_IT_WAS,
        )
    _check_config(directory, index, about.get(CONFIG), fingerprint == expected)
    return True


def _check_config(
    directory: Path, index: GlobalBinaryIndex, before: object, same_files: bool
) -> None:
    """Make sure that the model's config still says what was recorded `before`; None: nothing was.
    Of a model that was prepared from the other, what says how weights are stored is not compared.
    """
    now = of_numbers(model_config(index))
    if before is None or now is None:
        return
    if not isinstance(before, dict):
        raise AdapterError(f"{CONFIG} is no object", where=str(directory / BASE_NAME))
    if changes := differences(before, now, () if same_files else OF_PREPARED):
        what = f"the model's config has changed since the adapter was trained: {'; '.join(changes)}"
        raise AdapterError(
            what, where=f"{directory}, on {index.root / 'config.json'}", how=AS_IT_WAS
        )


def check_named_base(
    directory: Path, config: LoraConfig, model: str, index: GlobalBinaryIndex
) -> None:
    """Make sure that a model is the one that an adapter belongs to, whether LEMA or another program
    trained it. It is compared by the fingerprint beside the adapter; where there is none, by the
    base that PEFT's config names: the same name as the user's for this `model`, or as what that was
    prepared from, the same directory, or the same files elsewhere. `AdapterError`: it is not."""
    if check_base(directory, index):
        return
    named = config.base_model_name_or_path
    if not named:
        what = f"{directory} does not name the adapter's base model; LEMA assumes {model}"
        warnings.warn(what, stacklevel=3)
    if not named or named in (model, *(index.origin or ())[:1]):
        return
    try:
        path = resolve_model(named, revision=config.revision, download=False)
        named_index = GlobalBinaryIndex(own_weights(named, path))
    except WeightsError as error:
        why = f"and that is not here to be compared ({error.what})"
    else:
        if named_index.root.resolve() == index.root.resolve() or base_fingerprint(
            named_index
        ) == base_fingerprint(index):
            return
        why = "whose files are others"
    how = (
        f"use that model; if it is this one, set base_model_name_or_path to {model} in "
        "adapter_config.json"
    )
    raise AdapterError(
        f"the adapter belongs to the model {named}, {why}",
        where=f"{directory}, on {model}",
        how=how,
    )
