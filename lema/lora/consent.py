"""Whose settings act. An adapter's `lema_config.json` describes the adapter, and some of its
settings do more: they name files that are read and directories that are written, send things away,
or start compilers.

Of a file that somebody else wrote, LEMA takes what describes the adapter and ignores the others,
with a line that names them: only what users write themselves, in a file of their own or on the
command line, acts. A file that LEMA wrote for this very user acts as a whole, so that `lema eval
outputs/run` evaluates on the data of that run. LEMA knows such files by their content: their
digests are in the user's cache directory, one empty file for each.
"""

import hashlib
import os
import stat
import warnings
from collections.abc import Container, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lema.backend.registry import runs_anywhere
from lema.config import LemaConfig
from lema.config.acting import SILENT, acts
from lema.config.lemaconfig import CONFIG_NAME
from lema.errors import ConfigError, DiskError
from lema.lora.checks import read_json
from lema.storage.diskspace import make_private, own_number, user_cache
from lema.storage.regular import read_regular

__all__ = ["check_code_is_named", "save_settings", "without_consent", "written_here"]

# digests of what this process wrote: a run without a cache reads again what it has written
_WRITTEN = set[str]()

# files of settings that are remembered; those that were written longest ago are forgotten
MOST_NOTED = 10_000


def without_consent(
    file: Path, overrides: Mapping[str, Any], unread: Container[str] = ()
) -> dict[str, Any]:
    """Return the settings of an adapter's `lema_config.json` that must not act, each with its
    default to replace it, and warn of them in one line. There are none if LEMA wrote the file for
    this user. `overrides` are the user's own; of those that are `unread`, because the command needs
    none of them, the line says nothing. `AdapterError`: the file cannot be read."""
    values = read_json(file)
    names = [name for name, value in values.items() if name not in overrides and acts(name, value)]
    if "device" in names and isinstance(device := values["device"], str) and runs_anywhere(device):
        names.remove("device")
    if not names or written_here(file):
        return {}
    if ignored := [name for name in names if name not in SILENT and name not in unread]:
        first = ignored[0]
        warnings.warn(
            f"{file} was not written by a run of yours on this machine, or was changed "
            "since; ignored are its settings "
            f"{', '.join(ignored)}. Give those that you want yourself, as in "
            f"--{first.replace('_', '-')} VALUE",
            stacklevel=4,
        )
    defaults = LemaConfig.defaults()
    return {name: defaults[name] for name in names}


def check_code_is_named(file: Path) -> None:
    """Refuse to run the code of a model that nobody but an adapter's `file` names: a user who
    allows a model's code has read it, and the file may name another model or commit. `ConfigError`.
    """
    if not written_here(file):
        what = (
            "the model's own code is run only of a model that you name, but only the adapter's "
            "file names this one"
        )
        how = (
            "name the model whose code you have read: --model-name-or-path and, of a hub id, "
            "--revision"
        )
        raise ConfigError(
            what, where=str(file), how=f"{how}; for `lema merge`, its directory: --base"
        )


def save_settings(config: LemaConfig, directory: Path) -> None:
    """Write `lema_config.json` into a directory, and remember that it is this user's. `DiskError`:
    it could not be written. That it cannot be noted in the user's cache, or others may write there,
    costs a line when another process reads it, and not the run."""
    config.save_pretrained(directory)
    digest = _digest(directory / CONFIG_NAME)
    _WRITTEN.add(digest)
    with suppress(OSError, DiskError):
        _note(_folder() / digest)


def written_here(file: Path) -> bool:
    """Whether LEMA wrote a file of settings, with this content, for the user that runs it."""
    try:
        if (digest := _digest(file)) in _WRITTEN:
            return True
        note = (_folder() / digest).lstat()
    except (OSError, DiskError):
        return False
    # root could note for others
    return stat.S_ISREG(note.st_mode) and own_number() in (
        None,
        note.st_uid,
    )


def _folder() -> Path:
    """Return the folder of the notes, which nobody else writes to. `DiskError`: there is none."""
    folder = user_cache("settings")
    make_private(folder)
    return folder


def _digest(file: Path) -> str:
    return hashlib.sha256(read_regular(file)).hexdigest()


def _note(note: Path) -> None:
    """Make the file that stands for some settings; any number of processes may do so at once."""
    is_new = not note.exists()
    note.touch(mode=0o600)  # also where it is there: it was written last now
    if not is_new:
        return
    with os.scandir(note.parent) as entries:
        noted = [entry.path for entry in entries]
    if len(noted) > MOST_NOTED:
        oldest = sorted(map(Path, noted), key=lambda path: path.lstat().st_mtime_ns)
        for path in oldest[: len(noted) - MOST_NOTED * 9 // 10]:
            path.unlink(missing_ok=True)
