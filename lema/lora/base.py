"""The base model an adapter belongs to: recorded beside the adapter, and checked before the two are put together.

An adapter is a change to weights; on other weights it is noise. A path or a hub id may lead to other files by now, so
the record is the fingerprint of the files (`lema.storage.verify`).
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

from peft import LoraConfig

from lema.errors import AdapterError, WeightsError
from lema.lora.checks import check_file
from lema.storage import GlobalBinaryIndex, resolve_model
from lema.storage.atomic import replace_file
from lema.storage.hub import own_weights
from lema.storage.verify import base_fingerprint

__all__ = ["BASE_NAME", "check_base", "check_named_base", "write_base"]

BASE_NAME = "adapter_base.json"
KEY = "fingerprint"


def write_base(directory: Path, fingerprint: str) -> None:
    """Write beside an adapter which model it belongs to.

    Raises:
        DiskError: the file could not be written.
    """
    replace_file(directory / BASE_NAME, (json.dumps({KEY: fingerprint}, indent=2) + "\n").encode())


def check_base(directory: Path, index: GlobalBinaryIndex) -> bool:
    """Make sure that a model's files are those of the model that the adapter in `directory` was trained on.

    Return whether a file beside the adapter says which model that is; adapters that PEFT alone has written have none.

    Raises:
        AdapterError: it is another model, or what is written is damaged.
    """
    file = directory / BASE_NAME
    if not file.is_file():
        return False
    check_file(file)
    try:
        expected = json.loads(file.read_bytes())[KEY]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AdapterError(f"this does not say which model the adapter is of: {error!r}", where=str(file)) from error
    if (found := base_fingerprint(index)) != expected:
        raise AdapterError(
            f"the model has changed since the adapter was trained on it: its fingerprint is {found}, "
            f"and it was {expected}",
            where=f"{directory}, on {index.path}",
            how="give the model as it was; to use the adapter on this one all the same, name it by an explicit "
            f"model_name_or_path, or delete {BASE_NAME}",
        )
    return True


def check_named_base(directory: Path, config: LoraConfig, model: str, index: GlobalBinaryIndex) -> None:
    """Make sure that a model is the one that an adapter belongs to, whether LEMA or another program trained it.

    It is compared by the fingerprint beside the adapter; where there is none, by the base that PEFT's config names: the
    same name as the user's for this `model`, the same directory, or the same files elsewhere.

    Raises:
        AdapterError: it is another model.
    """
    if check_base(directory, index):
        return
    named = config.base_model_name_or_path
    if not named:
        what = f"{directory} does not say which model the adapter is of; it is taken to be {model}"
        warnings.warn(what, stacklevel=3)
    if not named or named == model:
        return
    try:
        place = resolve_model(named, revision=config.revision, download=False)
        other = GlobalBinaryIndex(own_weights(named, place))
    except WeightsError as error:
        why = f"and that is not here to be compared ({error.what})"
    else:
        if other.root.resolve() == index.root.resolve() or base_fingerprint(other) == base_fingerprint(index):
            return
        why = "whose files are others"
    how = f"begin with that model; if it is this one, set base_model_name_or_path to {model} in adapter_config.json"
    raise AdapterError(f"the adapter is of the model {named}, {why}", where=f"{directory}, on {model}", how=how)
