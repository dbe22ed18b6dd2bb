"""What `train_data` and `eval_data` may name: files, data sets of the hub, and data sets whose
rows are read in a way of their own.

A data set is a text, or a mapping (`DataSet`). A mapping with nothing but the place of a data set
of the hub is kept as one text, `hub:org/name?split=train`, which a command line takes, too.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, TypeGuard
from urllib.parse import urlencode

from pydantic import AfterValidator, BeforeValidator, Field, GetJsonSchemaHandler

from lema.config.data.rows import Roles, RowFormat, TrainOn, TruncationSide
from lema.config.problems import Problem, SettingsError, Several, prefixed, unknown_setting
from lema.config.settings import Settings
from lema.config.types import Columns, Count, Location, Name, Names

__all__ = ["BUILDERS", "DATA_FILES", "DataFiles", "DataSet", "is_data_set", "is_files"]

BUILDERS: Mapping[str, tuple[str, ...]] = {
    "json": (".json", ".jsonl"),
    "csv": (".csv",),
    "parquet": (".parquet",),
    "text": (".txt",),
    "arrow": (".arrow",),
}
"""The builders of `datasets` whose files LEMA reads itself, with the endings of these files."""

DATA_FILES = tuple(ending for endings in BUILDERS.values() for ending in endings)
"""The endings of files that LEMA reads itself."""

COMPRESSED = (".gz", ".zst")
HUB_KEYS = ("name", "split", "revision", "streaming")


class DataSet(Settings):
    """A data set, and how its rows are read; what is not given comes from the settings of the
    run.
    """

    path: Location
    """A hub id, a directory that `datasets` reads, or files that LEMA reads: a data file or a glob.
    json, csv, parquet, text or arrow with `data_files`."""
    name: Name | None = None
    """The configuration of a data set of the hub."""
    split: Name | None = None
    """The split, or parts of splits: `train[:20%]`, `train[:100]+test[50%:]`; files have one
    split, train.
    """
    revision: Name | None = None
    """Branch, tag or commit of a data set of the hub."""
    streaming: bool | None = None
    """Read the rows of a data set of the hub while they are tokenised, without downloading it."""
    data_files: Names | None = None
    """The files of the data set that are read."""
    max_samples: Count | None = None
    """Read only the first N rows."""
    columns: Columns | None = None
    roles: Roles | None = None
    chat_template: Name | None = None
    train_on: TrainOn | None = None
    eot_tokens: list[Name] | None = None
    row_format: RowFormat | None = None
    system_prompt: Name | None = None
    drop_system_messages: bool | None = None
    truncation_side: TruncationSide | None = None


def is_data_set(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether a value is a mapping of the settings of a data set."""
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("path"), str)
        and value.keys() <= DataSet.model_fields.keys()
    )


def is_files(path: str) -> bool:
    """Whether a path names files that LEMA reads itself, by its ending or its wildcards."""
    name = path.lower()
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    return name.endswith(DATA_FILES) or any(sign in path for sign in "*?[")


def _checked(value: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the mapping of a data set without what is empty. `Several`: keys of it are wrong."""
    fields = DataSet.model_fields
    if (unknown := next((key for key in value if key not in fields), None)) is not None:
        problem = unknown_setting(str(unknown), fields)
        listed = f"there are {', '.join(fields)}"
        how = listed if "docs/phases" in problem.how else problem.how
        raise Several([replace(problem, how=how)])
    try:
        checked = DataSet(**{str(key): entry for key, entry in value.items()}).to_dict()
    except SettingsError as error:
        raise Several(error.problems) from error
    checked = {key: entry for key, entry in checked.items() if entry is not None}
    ours = is_files(checked["path"]) or (checked["path"] in BUILDERS and "data_files" in checked)
    for key in ("name", "revision", "streaming") if ours else ():
        if checked.get(key):
            what = f"{key} is of data sets of the hub, and {checked['path']} names files"
            raise Several([Problem(key, what, "leave it out")])
        checked.pop(key, None)
    return checked


def _data_set(value: Mapping[Any, Any]) -> str | dict[str, Any]:
    """Return a data set as its text if it has nothing but a place on the hub, else as a
    mapping.
    """
    checked = _checked(value)
    if is_files(checked["path"]) or any(key not in ("path", *HUB_KEYS) for key in checked):
        return checked["path"] if len(checked) == 1 else checked
    about = urlencode(
        {
            key: "true" if checked[key] is True else checked[key]
            for key in value
            if key in HUB_KEYS and checked.get(key, False) is not False
        },
        safe="/",
    )
    return f"hub:{checked['path']}" + f"?{about}" * bool(about)


def _source(value: object) -> object:
    """Return data sets in the form in which they are kept, and any other value unchanged."""
    if isinstance(value, dict) and isinstance(value.get("path"), str):
        return _data_set(value)
    if isinstance(value, list | tuple | set):
        return [_within(f"[{number}]", item) for number, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    return {key: _within(str(key), item) for key, item in value.items()}


def _within(key: str, value: object) -> object:
    """Return one of several data sets as `_source` does. `Several`: it is wrong; `key` leads to
    it.
    """
    try:
        if isinstance(value, dict) and not isinstance(value.get("path"), str):
            raise Several([Problem("path", "path is not given", "add `path: FILES`, or org/name")])
        return _source(value)
    except Several as error:
        raise Several(prefixed(problem, key) for problem in error.problems) from error


class _Described:
    """Describes a mapping as the settings of a data set in the JSON schema."""

    def __get_pydantic_json_schema__(
        self, _: object, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return handler(DataSet.__pydantic_core_schema__)


def _placed(value: dict[str, Any]) -> dict[str, Any]:
    """Return the mapping of a data set; another has names of data sets for keys."""
    if not isinstance(value.get("path"), str):
        raise ValueError("must be files, a mapping with `path`, or names with either")
    return value


_Mapping = Annotated[dict[str, Any], AfterValidator(_placed), _Described()]
Entries = Names | _Mapping | Annotated[list[Name | _Mapping], Field(min_length=1)]
# One data set, or several by name.
DataFiles = Annotated[
    Entries | Annotated[dict[Name, Entries], Field(min_length=1)], BeforeValidator(_source)
]
