"""How the texts of a model are written and where they end, as the files beside its weights, or an
adapter, say.

These are the chat templates and `generation_config.json`, in the form that `save_pretrained` of
`transformers` gives them, and `row_forms.json`, which says what kind of rows the training read.
They go with weights that were trained on such texts: beside an adapter,
into a merged model.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from lema.errors import DataError, unreadable
from lema.storage.atomic import replace_file
from lema.storage.modelfiles import TEMPLATES, check_companions, load_generation_config
from lema.storage.regular import read_regular

__all__ = [
    "GENERATION",
    "RENDERING",
    "ROW_FORMS",
    "TEMPLATE",
    "Templates",
    "carry_rendering",
    "read_row_forms",
    "read_templates",
    "write_generation",
]
__all__ += ["write_row_forms", "write_templates"]

GENERATION = "generation_config.json"
TEMPLATE = "chat_template.jinja"
ROW_FORMS = "row_forms.json"
RENDERING = (GENERATION, TEMPLATE, TEMPLATES, ROW_FORMS)
"""The files and the folder of this kind in a directory."""

# the name of the template in the file above; others are in the folder under their own
DEFAULT = "default"
OLDER = ("chat_template.json",)  # files that said the same in earlier versions of `transformers`
TOKENIZER = "tokenizer_config.json"

Templates: TypeAlias = str | dict[str, str]
"""One template, or several by name, as the attribute `chat_template` of a tokenizer has them."""


def read_templates(directory: Path) -> Templates | None:
    """Return the chat templates in a directory; None: it has none. `DataError`: a file cannot be
    read; `WeightsError`: one is a link that leaves the directory, or no regular file."""
    check_companions(directory)
    file = directory / TEMPLATE
    templates = {DEFAULT: _text(file)} if file.is_file() else {}
    templates |= {
        path.stem: _text(path) for path in sorted((directory / TEMPLATES).glob("*.jinja"))
    }
    if not templates:
        named = _json(directory / TOKENIZER).get("chat_template")
        if isinstance(named, list):
            templates = {
                str(entry["name"]): str(entry["template"])
                for entry in named
                if isinstance(entry, dict)
            }
        elif isinstance(named, str):
            templates = {DEFAULT: named}
    return templates[DEFAULT] if templates.keys() == {DEFAULT} else templates or None


def write_templates(directory: Path, templates: Templates) -> None:
    """Let a directory have these chat templates and no others. `DiskError`: a file could not be
    written.
    """
    by_name = {DEFAULT: templates} if isinstance(templates, str) else dict(templates)
    for name in (*OLDER, TEMPLATE):
        (directory / name).unlink(missing_ok=True)
    if (directory / TEMPLATES).is_dir():
        shutil.rmtree(directory / TEMPLATES)
    about = _json(directory / TOKENIZER)
    if about.pop("chat_template", None) is not None:
        replace_file(directory / TOKENIZER, _written(about))
    if (default := by_name.pop(DEFAULT, None)) is not None:
        replace_file(directory / TEMPLATE, default.encode())
    for name, text in by_name.items():
        (directory / TEMPLATES).mkdir(exist_ok=True)
        replace_file(directory / TEMPLATES / f"{name}.jinja", text.encode())


def write_generation(directory: Path, values: Mapping[str, Any]) -> None:
    """Write these settings of generation. `DiskError`: the file could not be written."""
    replace_file(directory / GENERATION, _written(values))


def read_row_forms(directory: Path) -> tuple[str, ...]:
    """Return the forms of the rows that were trained on, the most frequent first (`chat`, `alpaca`,
    `completion`, `text`), as the directory of what was trained says it; empty: it does not.
    `WeightsError`: the file is a link that leaves the directory, or no regular file."""
    file = directory / ROW_FORMS
    if not file.is_symlink() and not file.exists():
        return ()
    values = _object(read_regular(file, inside=True))
    forms = values.get("forms")
    return tuple(form for form in forms if isinstance(form, str)) if isinstance(forms, list) else ()


def write_row_forms(directory: Path, forms: Sequence[str]) -> None:
    """Write which forms the rows of training had. `DiskError`: the file could not be written."""
    replace_file(directory / ROW_FORMS, _written({"forms": list(forms)}))


def carry_rendering(source: Path, out: Path) -> None:
    """Let the directory of a model say what that of an adapter says of its texts; of what it does
    not, nothing changes. Errors are those of `read_templates` and `load_generation_config`, and
    `DiskError`."""
    templates = read_templates(source)
    if templates is not None and templates != read_templates(out):
        write_templates(out, templates)
    file = source / GENERATION
    if file.is_symlink() or file.exists():
        load_generation_config(source)  # which refuses what is no such file
        replace_file(out / GENERATION, read_regular(file, inside=True))
    if forms := read_row_forms(source):
        write_row_forms(out, forms)


def _written(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


def _text(file: Path) -> str:
    try:
        return read_regular(file, inside=True).decode("utf-8")
    except (OSError, ValueError) as error:
        what = f"the chat template cannot be read: {error}"
        how = "correct the file, or delete it"
        raise unreadable(file, error, DataError, what, how) from error


def _json(file: Path) -> dict[str, Any]:
    """Read a JSON object; any other file counts as empty here, and fails where it is used."""
    try:
        return _object(read_regular(file))
    except (OSError, DataError):
        return {}


def _object(content: bytes) -> dict[str, Any]:
    """Return the JSON object that a text is; any other text counts as an empty one."""
    try:
        values = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
