"""The data of LLaMA-Factory's runs: names in dataset_info.json, held-back rows, mixtures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lema.errors import ConfigError
from lema.storage.header import read_json
from lema_tools.importing.ledger import Ledger
from lema_tools.importing.llamafactory.adapter import names_of
from lema_tools.importing.llamafactory.datasets import DataSource

__all__ = ["sources"]

INFO = "dataset_info.json"
INFO_BYTES = 1 << 24


def sources(ledger: Ledger) -> list[DataSource]:
    """Translate what is trained and evaluated on, and return the data sets to train on.

    Raises:
        ConfigError: a data set has no name in dataset_info.json, or the file is not here.
    """
    names = names_of(ledger["dataset"])
    if not names:
        raise ConfigError("the run names no data set", where="dataset", how="set it")
    info, folder = _info(ledger)
    training = [_source(ledger, name, info, folder) for name in names]
    ledger.carry("dataset", "train_data", _together(training))
    if ledger["stage"] != "pt" and any(not source.is_instructions for source in training):
        ledger.translation.same["dataset"] += (
            " (LLaMA-Factory leaves out chats whose roles do not alternate; LEMA trains on them)"
        )
    _notes(ledger, training, "dataset")
    _evaluation(ledger, info, folder)
    ledger.same("dataset_dir", "in train_data")
    ledger.same("max_samples", "max_samples, in train_data")
    _streams(ledger)
    _mixture(ledger, training)
    if ledger["tokenized_path"]:
        what = "LEMA keeps tokens in its own folder (data_cache), and makes them of the data sets"
        kept = Path(str(ledger["tokenized_path"])).exists()
        ledger.lost("tokenized_path", what, changes_numbers=kept)
    return training


def _info(ledger: Ledger) -> tuple[Mapping[str, Any] | None, str]:
    """Return dataset_info.json and its folder; None: names are those of data sets of the hub."""
    given = ledger.options.get("dataset_info")
    folder = ledger["dataset_dir"]
    if isinstance(folder, Mapping):
        return folder, ""
    if given is not None:
        file = Path(given)
        if not file.is_file():
            raise ConfigError("no such file", where=str(file), how="correct --dataset-info")
        return read_json(file, INFO_BYTES, "data sets"), str(file.parent)
    if folder == "ONLINE":
        return None, ""
    places = [Path(str(folder)), Path(ledger.directory) / str(folder), Path(ledger.directory)]
    for place in places:
        if (place / INFO).is_file():
            return read_json(place / INFO, INFO_BYTES, "data sets"), str(place)
    what = f"data sets are names in {INFO}, and it is not in {folder}"
    raise ConfigError(what, where="dataset_dir", how=f"name it: --dataset-info PATH/{INFO}")


def _source(ledger: Ledger, name: str, info: Mapping[str, Any] | None, folder: str) -> DataSource:
    if info is None:
        about: Mapping[str, Any] = {"hf_hub_url": name}
    elif name not in info:
        close = ", ".join(sorted(info)[:12])
        raise ConfigError(
            f"there is no data set {name!r} in {INFO}", where="dataset", how=f"there are: {close}"
        )
    else:
        about = info[name]
    options = {"max_samples": ledger["max_samples"], "streaming": ledger["streaming"]}
    return DataSource(name, about, folder, ledger["stage"], options)


def _together(data_sets: list[DataSource]) -> Any:
    entries = {source.name: source.entry() for source in data_sets}
    if len(entries) > 1:
        return entries
    (entry,) = entries.values()
    return [entry["path"]] if set(entry) == {"path"} and "/" in entry["path"] else entry


def _notes(ledger: Ledger, data_sets: list[DataSource], key: str) -> None:
    for source in data_sets:
        for why, changes in source.notes():
            ledger.lost(f"{key} {source.name}", why, changes_numbers=changes)


def _evaluation(ledger: Ledger, info: Mapping[str, Any] | None, folder: str) -> None:
    names = names_of(ledger["eval_dataset"])
    size = ledger.number("val_size")
    if names and size > 1e-6:
        what = "val_size and eval_dataset exclude each other"
        raise ConfigError(what, where="val_size", how="take one of them")
    if names:
        data_sets = [_source(ledger, name, info, folder) for name in names]
        ledger.carry("eval_dataset", "eval_data", _together(data_sets))
        for source in data_sets:
            for why, _ in source.notes():
                ledger.lost(f"eval_dataset {source.name}", why, changes_numbers=False)
        if ledger["eval_on_each_dataset"]:
            what = "LEMA measures all of eval_data as one"
            ledger.differs("eval_on_each_dataset", what, changes_numbers=False)
    else:
        ledger.same("eval_dataset", "none")
    if "eval_on_each_dataset" not in ledger.settled():
        ledger.same("eval_on_each_dataset", "no")
    if size > 1e-6:
        ledger.put(eval_split=int(size) if size > 1 else size)
        what = (
            f"eval_split: {int(size) if size > 1 else size}; LLaMA-Factory draws the rows to hold "
            "back, and the order of the others, from other random numbers"
        )
        ledger.differs("val_size", what)
    else:
        ledger.carry("val_size", "eval_split", None)


def _streams(ledger: Ledger) -> None:
    if not ledger["streaming"]:
        ledger.same("streaming", "no")
        ledger.same("buffer_size", "of streaming alone")
        return
    if ledger["max_samples"] is not None:
        what = "LLaMA-Factory does not take max_samples with streaming"
        raise ConfigError(what, where="max_samples", how="leave one of them out")
    what = (
        "streaming: true for data sets of the hub; LEMA draws an order among all rows, and "
        "LLaMA-Factory among those of its buffer"
    )
    ledger.differs("streaming", what)
    ledger.same("buffer_size", "see streaming")


def _mixture(ledger: Ledger, training: list[DataSource]) -> None:
    strategy = ledger["mix_strategy"]
    shares = names_of(ledger["interleave_probs"])
    if strategy == "concat" or len(training) == 1:
        if shares and strategy == "concat":
            what = "shares are of interleaved data sets alone"
            raise ConfigError(what, where="interleave_probs", how="set mix_strategy")
        ledger.carry("mix_strategy", "mixture", None)
        ledger.translation.same["mix_strategy"] = "one data set after the other"
        ledger.same("interleave_probs", "of interleaved data sets alone")
        return
    if strategy not in ("interleave_under", "interleave_over", "interleave_once"):
        what = f"LLaMA-Factory has no mix_strategy {strategy!r}"
        raise ConfigError(what, where="mix_strategy", how="use concat or interleave_under, ...")
    names = [source.name for source in training]
    numbers = [float(share) for share in shares] or [1 / len(names)] * len(names)
    if len(numbers) != len(names):
        what = "there are as many shares as data sets, or none"
        raise ConfigError(what, where="interleave_probs", how="correct their number")
    ledger.put(mixture=dict(zip(names, numbers, strict=True)))
    what = (
        "mixture: its shares in the rows of an epoch; LLaMA-Factory draws a data set for each row, "
        "and ends an epoch when the first or the last data set has ended"
    )
    ledger.differs("mix_strategy", what)
    ledger.same("interleave_probs", "mixture")
