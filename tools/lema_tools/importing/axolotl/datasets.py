"""The data sets of axolotl's runs: where their rows are, and which are held back."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lema.errors import ConfigError
from lema_tools.importing.axolotl.rows import rows
from lema_tools.importing.ledger import Ledger

__all__ = ["datasets"]

SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".arrow", ".txt", ".gz", ".zst")
LOCATION = ("path", "name", "split", "revision", "data_files", "ds_type", "trust_remote_code")


def datasets(ledger: Ledger) -> None:
    """Translate the rows to train on and to evaluate on.

    Raises:
        ConfigError: the run names no data.
    """
    if ledger["pretraining_dataset"]:
        what = "LEMA does not pack rows while it streams them: name the data set in datasets"
        ledger.lost("pretraining_dataset", what)
    elif not ledger["datasets"]:
        raise ConfigError("axolotl's run names no data", where="datasets", how="set it")
    else:
        training = _sources(ledger, "datasets")
        ledger.put(train_data=training)
        ledger.translation.same["datasets"] = "train_data"
    size = ledger.number("val_set_size")
    if ledger["test_datasets"]:
        ledger.put(eval_data=_sources(ledger, "test_datasets"), eval_split=None)
        ledger.translation.same["test_datasets"] = "eval_data"
    elif size:
        ledger.put(eval_split=int(size) if size >= 1 else size)
        if ledger["curriculum_sampling"] or ledger["shuffle_merged_datasets"] is False:
            what = f"eval_split: {size:g}; axolotl holds back the last rows, and LEMA draws them"
            ledger.differs("val_set_size", what)
        else:
            ledger.same("val_set_size", f"eval_split: {size:g}, the last rows after preshuffle")
    if not size:
        ledger.carry("val_set_size", "eval_split", None)
    for key in ("chat_template", "chat_template_jinja", "default_system_message"):
        ledger.same(key, "with the data sets of chats")
    if "train_on_inputs" not in ledger.settled():
        ledger.same(
            "train_on_inputs", f"train_on of the data sets: {bool(ledger['train_on_inputs'])}"
        )
    ledger.same("eot_tokens", "eot_tokens of the data sets of chats")


def _sources(ledger: Ledger, key: str) -> Any:
    """Return data sets as LEMA has them: one mapping, or several with names."""
    entries = ledger[key]
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        what = "it should be a list of mappings with path and type"
        raise ConfigError(what, where=key, how="write - path: ... and type: ... below it")
    sources = [
        _source(ledger, entry, f"{key}[{position}]") for position, entry in enumerate(entries)
    ]
    if len(sources) == 1:
        return sources[0]
    return {f"set{position + 1}": source for position, source in enumerate(sources)}


def _source(ledger: Ledger, entry: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return one data set. `ConfigError`: it has no path."""
    path = entry.get("path")
    if not path:
        raise ConfigError("a data set has no path", where=where, how="write path: FILE or org/name")
    source: dict[str, Any] = {"path": path}
    is_file = str(path).endswith(SUFFIXES) or (Path(ledger.directory) / str(path)).is_file()
    for name in ("name", "revision", "data_files"):
        if entry.get(name):
            source[name] = entry[name]
    if entry.get("split"):
        source["split"] = entry["split"]
    elif not is_file:
        source["split"] = "train"
    if entry.get("shards"):
        what = "LEMA takes no shard of a data set: use split, such as train[:10%]"
        ledger.lost(f"{where}.shards", what)
    settings, settled = rows(ledger, entry, where)
    source.update(settings)
    settled |= {*LOCATION, "preprocess_shards", "shards", "shards_idx"}
    for name in sorted(entry.keys() - settled):
        if entry[name] not in (None, False, "", [], {}):
            ledger.lost(f"{where}.{name}", "LEMA has nothing that stands for it")
    return source
