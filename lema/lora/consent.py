"""Whose settings act. An adapter's `lema_config.json` describes the adapter, and some of its settings do more: they
name files that are read and directories that are written, send things away, or start compilers.

Of a file that somebody else wrote, LEMA takes what describes the adapter and ignores the others, with a line that names
them: only what users write themselves, in a file of their own or on the command line, acts. A file that LEMA wrote for
this very user acts as a whole, so that `lema eval outputs/run` evaluates on the data of that run. LEMA knows such files
by their content: their digests are in the user's cache directory, one empty file for each.
"""

import hashlib
import os
import stat
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lema.config import LemaConfig
from lema.config.lemaconfig import CONFIG_NAME
from lema.lora.checks import read_json
from lema.storage.diskspace import user_cache

__all__ = ["ACTING", "LIBRARY_ATTENTION", "acts", "save_settings", "without_consent", "written_here"]

LIBRARY_ATTENTION = ("eager", "sdpa")
"""Attention that is code of `transformers` and torch alone; others may fetch kernels of the hub, or compile."""

ACTING: Mapping[str, str] = {
    "gbi_path": "reads weights from any path",
    "attn_implementation": "may fetch code from the hub and run it, or start a compiler, unless it is eager or sdpa",
    "train_data": "reads any path, walks directories, loads data sets of the hub and of addresses",
    "eval_data": "as train_data",
    "mixture": "names the data sets of train_data",
    "eval_prompts": "reads any path",
    "chat_template": "reads any path, unless it is the Jinja text itself",
    "adapter_name_or_path": "reads any path, or loads from the hub",
    "data_cache": "writes to any path, unless it is true or false",
    "output_dir": "writes to any path",
    "overwrite_output_dir": "replaces what is in output_dir",
    "offload_dir": "writes to any path",
    "report_to": "starts programs of others, and sends away what a run logs",
    "run_name": "names the run there",
    "push_to_hub": "sends the adapter away, in your name",
    "hub_model_id": "says where to",
    "hub_private_repo": "says who can read it",
    "torch_compile": "starts a compiler",
}
"""The settings that act on the machine, each with what it does; the others describe the adapter, or how it was made."""

# They have no meaning where no run begins, and an adapter of any run has them: a line would say nothing.
_SILENT = frozenset({"output_dir", "overwrite_output_dir", "run_name", "mixture", "hub_private_repo"})

MOST_NOTED = 10_000  # files of settings that are remembered; those that were written longest ago are forgotten


def acts(name: str, value: Any) -> bool:
    """Whether a setting of this value does more than describe an adapter."""
    if name not in ACTING or value in (None, LemaConfig.defaults()[name]):
        return False
    if name == "attn_implementation":
        return value not in LIBRARY_ATTENTION
    if name == "chat_template":
        return not (isinstance(value, str) and ("{{" in value or "{%" in value))
    return name != "data_cache" or not isinstance(value, bool)


def without_consent(file: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an adapter's `lema_config.json` that must not act, each with its default to replace it,
    and warn of them in one line. There are none if LEMA wrote the file for this user. `overrides` are the user's own.
    `AdapterError`: the file cannot be read."""
    values = read_json(file)
    names = [name for name, value in values.items() if name not in overrides and acts(name, value)]
    if not names or written_here(file):
        return {}
    if told := [name for name in names if name not in _SILENT]:
        first = told[0]
        warnings.warn(
            f"{file} was not written by a run of yours on this machine, or was changed since; ignored are its settings "
            f"{', '.join(told)}. Give those that you want yourself, as in --{first.replace('_', '-')} VALUE",
            stacklevel=4,
        )
    defaults = LemaConfig.defaults()
    return {name: defaults[name] for name in names}


def save_settings(config: LemaConfig, directory: Path) -> None:
    """Write `lema_config.json` into a directory, and remember that it is this user's. `DiskError`: it could not be
    written. That it cannot be remembered, as without a home, costs a line when it is read, and not the run."""
    config.save_pretrained(directory)
    with suppress(OSError, RuntimeError):  # RuntimeError: there is no home
        _remember(_note_of(directory / CONFIG_NAME))


def written_here(file: Path) -> bool:
    """Whether LEMA wrote a file of settings, with this content, for the user that runs it."""
    try:
        note = _note_of(file).lstat()
    except (OSError, RuntimeError):
        return False
    return stat.S_ISREG(note.st_mode) and note.st_uid == os.geteuid()  # a cache directory may be shared


def _note_of(file: Path) -> Path:
    return user_cache("settings") / hashlib.sha256(file.read_bytes()).hexdigest()


def _remember(note: Path) -> None:
    """Make the file that stands for some settings; any number of processes may do so at once."""
    note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    is_new = not note.exists()
    note.touch(mode=0o600)  # also where it is there: it was written last now
    if not is_new:
        return
    with os.scandir(note.parent) as entries:
        noted = [entry.path for entry in entries]
    if len(noted) > MOST_NOTED:
        oldest = sorted(map(Path, noted), key=lambda one: one.lstat().st_mtime_ns)
        for one in oldest[: len(noted) - MOST_NOTED * 9 // 10]:
            one.unlink(missing_ok=True)
