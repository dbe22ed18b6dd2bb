"""The data sets of torchtune's runs, by the builder that makes them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lema.errors import ConfigError
from lema_tools.importing.ledger import Ledger
from lema_tools.importing.torchtune.components import component_of

__all__ = ["sources"]

ALPACA = {
    "prompt": (
        "Below is an instruction that describes a task, paired with an input that provides "
        "further context. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
    ),
    "without_input": (
        "Below is an instruction that describes a task. Write a response that appropriately "
        "completes the request.\n\n### Instruction:\n{instruction}\n\n### Response:\n"
    ),
    "chat": True,
}
"""The text of Stanford Alpaca, which torchtune makes the user's message."""

QUESTION = {"prompt": "{instruction}", "chat": True}
STACK = {"prompt": "Question: {instruction}\n\nAnswer: ", "chat": True}
BUILDERS: Mapping[str, Mapping[str, Any]] = {
    "alpaca_dataset": {"source": "tatsu-lab/alpaca", "kind": "alpaca", "train_on_input": True},
    "alpaca_cleaned_dataset": {
        "source": "yahma/alpaca-cleaned",
        "kind": "alpaca",
        "train_on_input": True,
    },
    "instruct_dataset": {"kind": "instruct"},
    "grammar_dataset": {"source": "liweili/c4_200m", "kind": "instruct"},
    "samsum_dataset": {
        "source": "Samsung/samsum",
        "kind": "instruct",
        "column_map": {"input": "dialogue", "output": "summary"},
    },
    "chat_dataset": {"kind": "chat"},
    "slimorca_dataset": {
        "source": "Open-Orca/SlimOrca-Dedup",
        "kind": "chat",
        "conversation_style": "sharegpt",
        "conversation_column": "conversations",
    },
    "text_completion_dataset": {"kind": "text"},
    "cnn_dailymail_articles_dataset": {
        "source": "ccdv/cnn_dailymail",
        "kind": "text",
        "column": "article",
        "name": "3.0.0",
    },
    "wikitext_dataset": {
        "source": "EleutherAI/wikitext_document_level",
        "kind": "text",
        "column": "page",
        "name": "wikitext-103-v1",
    },
    "preference_dataset": {"kind": "pairs"},
    "hh_rlhf_helpful_dataset": {"source": "RLHFlow/HH-RLHF-Helpful-standard", "kind": "pairs"},
    "stack_exchange_paired_dataset": {
        "source": "lvwerra/stack-exchange-paired",
        "kind": "answers",
        "column_map": {"prompt": "question", "chosen": "response_j", "rejected": "response_k"},
    },
}
"""torchtune's builders of data sets: their own defaults, and the form of their rows."""

KEYS = {
    "_component_",
    "source",
    "column_map",
    "train_on_input",
    "packed",
    "split",
    "name",
    "subset",
    "data_files",
    "new_system_prompt",
    "conversation_column",
    "conversation_style",
    "column",
    "add_eos",
    "split_across_pack",
    "max_seq_len",
    "filter_fn",
    "data_dir",
    "revision",
}
FILES = ("json", "csv", "parquet", "text", "arrow")


def sources(ledger: Ledger) -> None:
    """Translate what is trained and evaluated on.

    Raises:
        ConfigError: the run has no data set.
    """
    entries = _entries(ledger, "dataset")
    if not entries:
        raise ConfigError("the run has no data set", where="dataset", how="give a component")
    data = _data(ledger, "dataset", entries)
    if data is not None:
        ledger.put(train_data=data)
    if validation := _entries(ledger, "dataset_val"):
        data = _data(ledger, "dataset_val", validation)
        ledger.put(eval_data=data)


def _entries(ledger: Ledger, key: str) -> list[dict[str, Any]]:
    """Return the arguments of a data set, or of several in a list."""
    if isinstance(ledger[key], list):
        return [dict(entry) for entry in ledger[key]]
    if not component_of(ledger.values, key):
        return []
    prefix = f"{key}."
    entry = dict[str, Any]()
    for name, value in ledger.values.items():
        if name.startswith(prefix):
            head, _, tail = name.removeprefix(prefix).partition(".")
            if tail:
                entry.setdefault(head, {})[tail] = value
            else:
                entry[head] = value
    return [entry]


def _data(ledger: Ledger, key: str, entries: list[dict[str, Any]]) -> Any:
    changes = key == "dataset"
    data = dict[str, Any]()
    for number, entry in enumerate(entries, 1):
        name = str(entry.get("_component_", "")).rpartition(".")[2]
        if name not in BUILDERS:
            what = f"LEMA does not know the builder {name}: write its rows as a file of messages"
            full = f"{key}._component_"
            ledger.lost(full if full in ledger.written else key, what, changes_numbers=changes)
            continue
        arguments = {**BUILDERS[name], **entry}
        if not arguments.get("source"):
            raise ConfigError(f"{name} has no source", where=f"{key}.source", how="name one")
        data[f"{name.removesuffix('_dataset')}_{number}"] = _source(arguments)
        notes = dict(_notes(arguments))
        for argument, why in notes.items():
            ledger.lost(f"{key}.{argument}", why, changes_numbers=changes)
        for argument in entry:
            if argument in KEYS and argument not in notes:
                said = f"in {'train_data' if changes else 'eval_data'}"
                for full in ledger.written:
                    if full == f"{key}.{argument}" or full.startswith(f"{key}.{argument}."):
                        ledger.same(full, said)
    ledger.same(key, "one data set after the other")
    if not data:
        return None
    return next(iter(data.values())) if len(data) == 1 else data


def _source(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a data set as a mapping of `train_data`."""
    entry = {"path": arguments["source"]}
    if arguments["source"] in FILES and arguments.get("data_files"):
        entry["data_files"] = arguments["data_files"]
    else:
        entry["name"] = arguments.get("name") or arguments.get("subset")
        entry["data_files"] = arguments.get("data_files")
        entry["revision"] = arguments.get("revision")
        if (folder := arguments.get("data_dir")) and not entry["data_files"]:
            entry["data_files"] = str(Path(folder) / "**")
    entry["split"] = arguments.get("split", "train")
    entry |= _form(arguments)
    if arguments["kind"] not in ("pairs", "answers", "text"):
        entry["train_on"] = "all" if arguments.get("train_on_input") else "assistant"
    if arguments.get("new_system_prompt"):
        entry["system_prompt"] = arguments["new_system_prompt"]
        entry["drop_system_messages"] = True
    return {key: value for key, value in entry.items() if value is not None}


def _form(arguments: Mapping[str, Any]) -> dict[str, Any]:
    columns = dict(arguments.get("column_map") or {})
    match arguments["kind"]:
        case "alpaca":
            return {"row_format": ALPACA, **_renamed(columns)}
        case "instruct":
            names = {"instruction": columns.get("input", "input")}
            names["output"] = columns.get("output", "output")
            return {"row_format": QUESTION, **_renamed(names)}
        case "chat":
            return _chat(arguments)
        case "text":
            return {"train_on": "all", **_renamed({"text": arguments.get("column", "text")})}
        case "pairs":
            return _renamed(columns)
        case _:
            names = {"instruction": columns.pop("prompt"), **columns}
            return {"row_format": STACK, **_renamed(names)}


def _chat(arguments: Mapping[str, Any]) -> dict[str, Any]:
    style = arguments.get("conversation_style")
    column = arguments.get("conversation_column")
    if style == "sharegpt":
        if column == "conversations":
            return {}
        return {"columns": {"messages": column, "role": "from", "content": "value"}}
    if style == "openai":
        return _renamed({"messages": str(column)})
    what = f"torchtune has no conversation_style {style!r}"
    raise ConfigError(what, where="conversation_style", how="use sharegpt or openai")


def _renamed(names: Mapping[str, str]) -> dict[str, Any]:
    columns = {ours: theirs for ours, theirs in names.items() if theirs != ours}
    return {"columns": columns} if columns else {}


def _notes(arguments: Mapping[str, Any]) -> list[tuple[str, str]]:
    notes = list[tuple[str, str]]()
    if arguments["kind"] == "answers":
        what = "LEMA reads questions with two answers as raw text: write them as messages"
        notes.append(("_component_", what))
    if arguments.get("filter_fn"):
        notes.append(("filter_fn", "LEMA calls no function of a file: filter the rows before"))
    if arguments["kind"] == "text" and arguments.get("add_eos") is False:
        notes.append(("add_eos", "LEMA ends each text with the end-of-sequence token"))
    if arguments.get("train_on_input") and arguments.get("new_system_prompt"):
        what = "train_on: all also trains on the system message, which torchtune masks"
        notes.append(("train_on_input", what))
    if arguments.get("train_on_input") and arguments["kind"] in ("pairs", "answers"):
        notes.append(("train_on_input", "LEMA compares answers, without their prompts"))
    for key in sorted(set(arguments) - KEYS - {"kind"}):
        notes.append((key, "LEMA gives `datasets` no such argument"))
    return notes
