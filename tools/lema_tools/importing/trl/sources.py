"""The data sets of TRL's runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lema.errors import ConfigError
from lema_tools.importing.trl.ledger import Ledger

__all__ = ["sources"]

BUILDERS = ("json", "csv", "parquet", "arrow", "text")
"""What `datasets` calls data in files, where `data_files` says which."""

READ_FIRST = {"input_ids", "messages"}
"""Columns that LEMA reads whatever others a row has."""

KEYS = ("path", "name", "data_dir", "data_files", "split", "columns", "fraction")


def sources(ledger: Ledger) -> None:
    """Translate what is trained and evaluated on."""
    if ledger["datasets"]:
        _mixture(ledger)
    elif ledger["dataset_name"]:
        _single(ledger)
    else:
        what = "TRL's run names no data set"
        raise ConfigError(what, where="dataset_name", how="set it, or a list `datasets`")


def _single(ledger: Ledger) -> None:
    streams = bool(ledger["dataset_streaming"])
    entry = {"path": ledger["dataset_name"], "name": ledger["dataset_config"]}
    train = _source(entry | {"split": ledger["dataset_train_split"]}, streams=streams)
    ledger.carry("dataset_name", "train_data", train)
    ledger.same("dataset_config", "name, in train_data")
    ledger.same("dataset_train_split", "split, in train_data")
    ledger.same("dataset_streaming", "streaming, in train_data")
    if ledger["eval_strategy"] in ("no", False):
        ledger.put(eval_data=None)
        ledger.same("dataset_test_split", "no evaluation")
    elif isinstance(train, list):
        what = "a file has no test split; give eval_data, or eval_split"
        ledger.lost("dataset_test_split", what, changes_numbers=False)
    else:
        test = _source(entry | {"split": ledger["dataset_test_split"]}, streams=streams)
        ledger.carry("dataset_test_split", "eval_data", test)
    for key in ("streaming", "test_split_size"):
        if not ledger.is_default(key):
            ledger.same(key, "of `datasets` alone, without effect in both")


def _mixture(ledger: Ledger) -> None:
    """Carry several data sets, which TRL lays one after the other."""
    streams = bool(ledger["streaming"])
    entries = ledger["datasets"]
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        what = "it should be a list of data sets, each with a path"
        raise ConfigError(what, where="datasets", how="write `- path: org/name`")
    for number, entry in enumerate(entries):
        if wrong := sorted(set(entry) - set(KEYS)) or ([] if entry.get("path") else ["path"]):
            what = f"data set {number + 1}: TRL refuses {wrong[0]!r}, or misses it"
            raise ConfigError(what, where="datasets", how=f"there are {', '.join(KEYS)}")
    train = [_source({"split": "train", **entry}, streams=streams) for entry in entries]
    flat = [part for source in train for part in (source if isinstance(source, list) else [source])]
    ledger.carry("datasets", "train_data", flat[0] if len(flat) == 1 and len(train) == 1 else flat)
    _selections(ledger, entries)
    ledger.same("streaming", "in train_data")
    for key in ("dataset_name", "dataset_config", "dataset_train_split", "dataset_streaming"):
        ledger.same(key, "TRL does not use it beside `datasets`")
    _held_out(ledger)


def _selections(ledger: Ledger, entries: Sequence[Mapping[str, Any]]) -> None:
    """Note what is taken of rows or columns otherwise than LEMA takes it."""
    if any(entry.get("fraction") is not None for entry in entries):
        del ledger.translation.same["datasets"]
        what = (
            "fraction: LEMA cannot know the sizes; give each data set max_samples, the first rows "
            "that TRL takes"
        )
        ledger.lost("datasets", what)
    elif any(not READ_FIRST & {*entry["columns"]} for entry in entries if entry.get("columns")):
        del ledger.translation.same["datasets"]
        what = (
            "columns: LEMA reads the first of input_ids, messages, conversations, prompt and text "
            "that a row has: where it has others, too, take these out of the files"
        )
        ledger.differs("datasets", what)


def _held_out(ledger: Ledger) -> None:
    size = ledger["test_split_size"]
    ledger.same("dataset_test_split", "the rows that test_split_size holds back, if any")
    if size is None:
        return
    ledger.put(eval_split=size)
    what = "eval_split; TRL draws these rows without a seed, so each of its runs holds back others"
    ledger.differs("test_split_size", what, changes_numbers=False)


def _source(entry: Mapping[str, Any], *, streams: bool) -> Any:
    """Return a data set as LEMA writes it: files in a list, anything else as a mapping."""
    path = str(entry["path"])
    files = entry.get("data_files")
    if path in BUILDERS and entry.get("data_dir") and not files:
        return [str(entry["data_dir"])]
    if path in BUILDERS and files:
        if isinstance(files, Mapping):
            files = files.get(entry.get("split") or "train", [])
        listed = [files] if isinstance(files, str) else list(files)
        folder = entry.get("data_dir")
        return [str(Path(folder) / file) if folder else file for file in listed]
    if Path(path).suffix and (Path(path).is_file() or path.endswith((".jsonl", ".json", ".csv"))):
        return [path]
    source = {"path": path, "name": entry.get("name"), "split": entry.get("split") or "train"}
    folder = entry.get("data_dir")
    source |= {"data_files": f"{folder}/**" if folder and not files else files}
    source |= {"streaming": True if streams else None}
    return {key: value for key, value in source.items() if value is not None}
