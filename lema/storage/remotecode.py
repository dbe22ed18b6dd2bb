"""Code that comes with a model: it runs only where the user allowed it, from a directory or one fixed commit.

Settings come from files, and files come from strangers, so this is no setting. It is a flag of the command line, or an
argument in Python, and the code must be what the user can have read: a directory, or one commit of a hub repository.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lema.errors import ConfigError, ModelError, WeightsError

__all__ = ["check_code", "require_commit"]

COMMIT = re.compile("[0-9a-f]{40}")
REFERENCE = re.compile(r"([\w./-]+--)?\w+\.\w+")  # of a file beside the weights, or of a repository
USED = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")


def require_commit(name: str, revision: str | None) -> None:
    """Raise `ConfigError` where code of the hub is not pinned by the full name of a commit. A branch or tag may hold
    other code tomorrow."""
    if revision is None or not COMMIT.fullmatch(revision):
        what = f"code of {name} is run only from a commit, and the revision is {revision or 'not given'}"
        page = f"https://huggingface.co/{name}/tree/main"
        how = f"read the code at {page}, then set revision to that commit's 40 hexadecimal digits"
        raise ConfigError(what, where="revision", how=how)


def check_code(directory: Path, *, trusted: bool) -> None:
    """Check, before anything of it is imported, that the code a model needs may run: the user `trusted` it, or it needs
    none. `ModelError`: the model is made of code of its own, and is not trusted; or its config asks for code of the
    hub; `WeightsError`: it is trusted, but the code is not there, or lies in a repository that nothing pins."""
    file = directory / "config.json"
    config = _read(file)
    for key, kernel in _kernels(config):
        what = f"the model's config asks for a kernel of the hub, {kernel!r}, which is code that nothing pins"
        how = "take it out of the file; attn_implementation in your own settings can choose one"
        raise ModelError(what, where=f"{file}: {key}", how=how)
    if trusted:
        for source in (file, directory / "tokenizer_config.json"):
            _check_place(source)
    elif modules := _needed(config):
        raise ModelError(
            f"the model is made of code of its own, for transformers has none of type {config.get('model_type')!r}",
            where=f"{file}: auto_map names {', '.join(modules)}",
            how="read that code; if you trust it, add --trust-remote-code (in Python: trust_remote_code=True), "
            "and for a hub id the commit you read as revision",
        )


def _needed(config: dict[str, Any]) -> list[str]:
    """The files without which the model cannot be made, as `transformers` has no classes for it."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    kind, classes = config.get("model_type"), config.get("auto_map")
    known = isinstance(kind, str)
    models = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() | MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys()
    missing = {
        "AutoConfig": not (known and kind in CONFIG_MAPPING),
        "AutoModelForCausalLM": not (known and kind in models),
    }
    if not isinstance(classes, dict):
        return []
    return sorted({_file(str(classes[name])) for name, wanted in missing.items() if wanted and name in classes})


def _kernels(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """What a config, or one inside it, would have computed by a repository `owner/name`; for a part of it, or all."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _kernels(inner, key if key.endswith("_implementation") else name)
    elif isinstance(value, list):
        for inner in value:
            yield from _kernels(inner, key)
    elif key.endswith("_implementation") and "/" in str(value):
        yield key, str(value)


def _check_place(source: Path) -> None:
    for reference in _used(_read(source).get("auto_map") or {}):
        if not isinstance(reference, str) or not REFERENCE.fullmatch(reference):
            what = f"the model's code is named {reference!r}, which is no class of a file beside the weights"
            how = 'write "file.Class" there; do not use this model unless you trust it'
            raise WeightsError(what, where=f"{source}: auto_map", how=how)
        if "--" in reference:
            other = reference.partition("--")[0]
            what = f"the model's code lies in another repository, {other}, at whatever it is today"
            how = "put that repository's .py files beside the weights, and take its name out of auto_map"
            raise WeightsError(what, where=f"{source}: auto_map", how=how)
        if not (source.parent / _file(reference)).is_file():
            what = f"the model's code is not there: {_file(reference)}"
            how = "copy the model's .py files into its directory; of a hub id, go online to fetch them"
            raise WeightsError(what, where=f"{source}: auto_map", how=how)


def _used(auto_map: Any) -> Iterator[str]:
    """The classes that are asked for, as `module.Class`; a tokenizer may have two, or none, under one name."""
    for named in [auto_map.get(name) for name in USED] if isinstance(auto_map, dict) else [auto_map]:
        yield from filter(None, named if isinstance(named, list | tuple) else [named])


def _file(reference: str) -> str:
    return reference.rpartition("--")[2].partition(".")[0] + ".py"


def _read(file: Path) -> dict[str, Any]:
    """Read a JSON object; a file that is none has nothing to say of code, and fails where it is used."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
