"""The file in a merged model's directory that says of which adapter it is the merge.

It has a fingerprint of the adapter's weights and of its config. Neither the adapter's place nor its
base's is in it, because a merged model is published and both may move.
"""

import hashlib
import json
import os
from pathlib import Path

from lema.errors import AdapterError, ConfigError, unreadable
from lema.lora.checks import read_json
from lema.lora.files import CONFIG, weights_file
from lema.storage.atomic import replace_file
from lema.storage.regular import open_regular

__all__ = ["MERGE_NAME", "adapter_fingerprint", "check_merge", "write_merge"]

MERGE_NAME = "lema_merge.json"
KEY = "adapter"
OF_BASE = ("base_model_name_or_path", "revision")  # where the base is, by which no number changes


def adapter_fingerprint(directory: str | os.PathLike[str]) -> str:
    """Return the SHA-256, in hexadecimal, of a saved adapter's weights and of what its
    `adapter_config.json` says but for the place of the base.

    Raises:
        AdapterError: there is no adapter, or it cannot be read.
        ReadError: the disk failed.
    """
    file = weights_file(Path(directory))
    if not file.is_file():
        how = "choose a directory that save_pretrained, save_checkpoint or `lema train` wrote"
        raise AdapterError("there is no adapter here", where=str(directory), how=how)
    try:
        with open_regular(file) as stream:
            digest = hashlib.file_digest(stream, "sha256")
    except OSError as error:
        raise unreadable(file, error, AdapterError) from error
    config = Path(directory) / CONFIG
    about = read_json(config) if config.is_file() else {}
    options = {key: value for key, value in about.items() if key not in OF_BASE}
    digest.update(json.dumps(options, sort_keys=True).encode())
    return digest.hexdigest()


def write_merge(directory: Path, fingerprint: str) -> None:
    """Write into a merged model's directory which adapter it has. `DiskError`: the file could not
    be written."""
    text = json.dumps({KEY: fingerprint}, indent=2) + "\n"
    replace_file(directory / MERGE_NAME, text.encode())


def check_merge(directory: Path, adapter: str | os.PathLike[str]) -> None:
    """Make sure that a model's directory is the merge of an adapter, as that is now.

    Raises:
        AdapterError: there is no adapter.
        ConfigError: the directory does not say of which adapter it is the merge, or of another one,
            or of this one as it was before it was trained further.
    """
    file = directory / MERGE_NAME
    now = adapter_fingerprint(adapter)
    then = read_json(file).get(KEY) if file.is_file() else None
    if then is None:
        what = (
            f"the model in it does not say of which adapter it is the merge: it has no {MERGE_NAME}"
        )
        how = "name another directory, or delete this one if it is a merge of an earlier version"
        raise ConfigError(what, where=f"--merged {directory}", how=how)
    if then != now:
        what = (
            f"the model in it is the merge of another adapter than {adapter}, or of this one "
            "before it was trained further"
        )
        how = "name another directory, or delete this one, so that it is written anew"
        raise ConfigError(what, where=f"--merged {directory}", how=how)
