"""Finds the local directory of a model that the user names by a directory, a file, or a hub id.

A hub id is fetched by `huggingface_hub` into its own cache, only safetensors and the small files
that belong to them: no pickles, and code only if trusted. Its environment variables set offline
mode, tokens, mirrors and cache.
"""

import os
from pathlib import Path
from typing import Any

from lema.errors import ConfigError, DiskError, WeightsError
from lema.storage.diskspace import is_full
from lema.storage.modelfiles import CODE, COMPANIONS, require_commit
from lema.storage.regular import expanded

__all__ = [
    "own_weights",
    "resolve_model",
]

HOW_NAMED = "give a model directory, a .safetensors file, or a hub id"
# A second copy of the same weights, in the layout of the model's makers or of another runtime.
IGNORED_FILES = ("*/*.safetensors", "consolidated*.safetensors")


def resolve_model(
    name_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    download: bool = True,
) -> Path:
    """Find the local directory of a model, downloading it from the hub if it is a hub id not yet in
    the cache.

    Whatever exists on disk, or is spelt like a path, is never sent to the hub. `ConfigError`: the
    name is empty, or code is trusted and `revision` is not a commit; `WeightsError`: there is no
    such directory, or the hub does not have the model or does not give it; `DiskError`: the disk
    filled up while downloading.

    `name_or_path`: a model directory; a `.safetensors` file or index in one; or a hub id such as
    `org/name`. `revision`: branch, tag or commit on the hub; not used for local models.
    `trust_remote_code`: fetch the model's code as well; on the hub it must be pinned by a commit.
    `download`: ask the hub for what is not in the cache."""
    name = os.fspath(name_or_path)
    if not name.strip():  # which as a path would be this directory
        raise ConfigError("the name of the model is empty", where=repr(name), how=HOW_NAMED)
    path = expanded(name)
    if path.is_dir():
        return path
    if path.exists():
        if path.name.endswith((".safetensors", ".json")):
            return path.parent
        raise WeightsError(f"{path.name} is not a model", where=str(path), how=HOW_NAMED)
    local = (
        name.startswith((".", "~"))
        or "\\" in name
        or Path(name).is_absolute()
        or name.endswith(".safetensors")
    )
    if local or isinstance(name_or_path, os.PathLike):
        raise WeightsError(
            f"{name} does not exist", where=str(path.absolute()), how="check the path of the model"
        )
    if trust_remote_code:
        require_commit(name, revision)
    files = ("*.safetensors", *COMPANIONS, *(CODE if trust_remote_code else ()))
    return _download(name, revision, files, download)


def own_weights(name_or_path: str | os.PathLike[str], directory: Path) -> Path:
    """Return the weights of a model given as a directory, a hub id, or one file or index in
    `directory`.
    """
    path = expanded(name_or_path)
    return path if path.is_file() and path.name != "config.json" else directory


def _download(name: str, revision: str | None, files: tuple[str, ...], online: bool) -> Path:
    # Imported here: the command line must not pay for it when the model is local.
    from huggingface_hub import errors, snapshot_download

    where = name if revision is None else f"{name} at revision {revision}"
    try:
        patterns: dict[str, Any] = {
            "allow_patterns": list(files),
            "ignore_patterns": list(IGNORED_FILES),
        }
        directory = Path(
            snapshot_download(name, revision=revision, local_files_only=not online, **patterns)
        )
    except (errors.HFValidationError, OSError) as error:
        raise _refusal(error, name, where, online=online) from error
    if not any(directory.glob("*.safetensors")):
        raise WeightsError(
            (
                "there are no .safetensors weights of this model (other formats are pickled "
                "and can run code)"
            ),
            where=f"{where}, in {directory}",
            how="go online if only a part of it was downloaded; if there are none on the hub "
            "and you trust it, convert "
            "it: AutoModelForCausalLM.from_pretrained(ID).save_pretrained(OUT)",
        )
    return directory


def _refusal(error: Exception, name: str, where: str, *, online: bool) -> WeightsError | DiskError:
    """Return what a user is told of an error with which a model was not fetched."""
    from huggingface_hub import errors

    match error:
        case errors.HFValidationError():
            what = f"{name!r} is neither an existing directory nor a hub id"
            how = "check the path, or give org/name"
        case errors.GatedRepoError():
            what = f"the hub gives {name} only to accounts that accepted its terms"
            how = (
                f"accept them at https://huggingface.co/{name}, then `hf auth login` or "
                "set HF_TOKEN"
            )
        case errors.RepositoryNotFoundError():
            what = (
                f"{name!r} is not a local directory, and the hub has no such model (or it "
                "is private)"
            )
            how = "check the spelling; for a private model set HF_TOKEN"
        case errors.RevisionNotFoundError():
            what = f"the hub has no such revision of {name}"
            how = "check the revision"
        case errors.LocalEntryNotFoundError() if not online:
            what = f"{name!r} is neither a local directory nor in the hub cache"
            how = f"check the path; or fetch it first: hf download {name}"
        case errors.LocalEntryNotFoundError():
            answered = isinstance(error.__cause__, errors.HfHubHTTPError)
            why = (
                f"the hub answered: {error.__cause__}" if answered else "the hub cannot be reached"
            )
            what = f"{name!r} is not a local directory, is not in the hub cache, and {why}"
            how = (
                "check the path; or go online (HF_HUB_OFFLINE unset) and try again; or "
                "give a directory"
            )
        case errors.HfHubHTTPError():
            what = f"the hub did not return the model: {error}"
            how = "try again later"
        case OSError() if is_full(error):
            what = f"the disk is full: {name} could not be downloaded"
            how = "free space, or set HF_HOME to a larger disk; what was downloaded is kept"
            return DiskError(what, where=str(error.filename or "hub cache"), how=how)
        case _:
            what = f"the hub cannot be reached: {error}"
            how = "check the connection"
    return WeightsError(what, where=where, how=how)
