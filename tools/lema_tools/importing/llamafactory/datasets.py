"""The data sets that dataset_info.json describes, as LEMA's: place, columns, roles and form."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from lema.errors import ConfigError

__all__ = ["DataSource"]

COLUMNS = (
    "prompt",
    "query",
    "response",
    "history",
    "messages",
    "system",
    "tools",
    "images",
    "videos",
    "audios",
    "chosen",
    "rejected",
    "kto_tag",
)
DEFAULT_COLUMNS = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "messages": "conversations",
}
TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
PLACES = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name", "file_name")
KEYS = {
    *PLACES,
    "formatting",
    "ranking",
    "subset",
    "split",
    "folder",
    "num_samples",
    "columns",
    "tags",
}
QUESTION = "{instruction}\n{input}"
"""How LLaMA-Factory joins an instruction and its input."""


@dataclass(frozen=True)
class DataSource:
    """A data set of dataset_info.json.

    Args:
        name: its name there.
        about: what is said of it.
        folder: the folder of its files.
        stage: LLaMA-Factory's stage of the run.
        options: the keys `max_samples` and `streaming` of the run.
    """

    name: str
    about: Mapping[str, Any]
    folder: str
    stage: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def columns(self) -> dict[str, str | None]:
        """The names of columns by LLaMA-Factory's; with `columns` those not named are None."""
        if "columns" not in self.about:
            return {name: DEFAULT_COLUMNS.get(name) for name in COLUMNS}
        return {name: self.about["columns"].get(name) for name in COLUMNS}

    @property
    def tags(self) -> dict[str, str | None]:
        """The names of fields and roles of messages; with `tags` those not named are None."""
        if "tags" not in self.about:
            return dict(TAGS)
        return {name: self.about["tags"].get(name) for name in TAGS}

    @property
    def is_instructions(self) -> bool:
        """Whether rows are instructions rather than chats."""
        return bool(self.about.get("formatting", "alpaca") == "alpaca")

    @property
    def may_have_turns(self) -> bool:
        """Whether a row may be a chat of several turns."""
        return not self.is_instructions or bool(self.columns["history"])

    @property
    def has_tools(self) -> bool:
        """Whether rows have tools."""
        return bool(self.columns["tools"])

    def entry(self) -> dict[str, Any]:
        """Return the data set as a mapping of `train_data`.

        Raises:
            ConfigError: it has no place, or is none for the stage of the run.
        """
        self._check()
        entry = self._place()
        most = [self.about.get("num_samples"), self.options.get("max_samples")]
        numbers = [int(number) for number in most if number is not None]
        if numbers:
            entry["max_samples"] = min(numbers)
        entry |= self._form()
        return entry

    def _check(self) -> None:
        where = f"dataset_info.json: {self.name}"
        pairs = bool(self.about.get("ranking", False))
        if pairs != (self.stage == "dpo"):
            what = "the data set has pairs" if pairs else "the data set has no pairs (ranking)"
            raise ConfigError(
                f"{what}, and the stage is {self.stage}", where=where, how="choose another data set"
            )
        if not any(self.about.get(place) for place in PLACES):
            raise ConfigError(
                "the data set has no place", where=where, how="give file_name or hf_hub_url"
            )
        formatting = self.about.get("formatting", "alpaca")
        if formatting not in ("alpaca", "sharegpt", "openai"):
            what = f"LLaMA-Factory has no formatting {formatting!r}"
            raise ConfigError(what, where=where, how="use alpaca, sharegpt or openai")

    def _place(self) -> dict[str, Any]:
        about = self.about
        for place in ("hf_hub_url", "ms_hub_url", "om_hub_url"):
            if about.get(place):
                entry = {"path": about[place], "name": about.get("subset")}
                folder = about.get("folder")
                entry |= {"split": about.get("split", "train")}
                entry |= {"data_files": f"{folder}/**" if folder else None}
                entry |= {"streaming": self.options.get("streaming") or None}
                return {key: value for key, value in entry.items() if value is not None}
        file = about.get("file_name") or about.get("script_url") or about["cloud_file_name"]
        if about.get("cloud_file_name"):
            return {"path": file}
        return {"path": str(PurePosixPath(self.folder) / file)}

    def _form(self) -> dict[str, Any]:
        """Return how rows are read: columns, roles and the form of instructions."""
        if self.stage == "pt":
            return self._renamed({"text": self.columns["prompt"]})
        return self._instructions() if self.is_instructions else self._chats()

    def _instructions(self) -> dict[str, Any]:
        columns = self.columns
        names = {"instruction": columns["prompt"], "input": columns["query"]}
        names |= {"system": columns["system"], "history": columns["history"]}
        names["label"] = columns["kto_tag"]
        if self.stage == "dpo":
            names |= {"chosen": columns["chosen"], "rejected": columns["rejected"]}
        else:
            names["output"] = columns["response"]
        has_input = bool(columns["query"])
        form: dict[str, Any] = {"prompt": QUESTION if has_input else "{instruction}", "chat": True}
        if has_input:
            form["without_input"] = "{instruction}"
        return self._renamed(names) | {"row_format": form}

    def _chats(self) -> dict[str, Any]:
        columns, tags = self.columns, self.tags
        messages = columns["messages"]
        names: dict[str, str | None] = {
            "system": columns["system"],
            "tools": columns["tools"],
            "label": columns["kto_tag"],
        }
        if self.stage == "dpo":
            names |= {"prompt": messages, "chosen": columns["chosen"]}
            names["rejected"] = columns["rejected"]
        else:
            names["messages"] = messages
        if (messages, tags["role_tag"], tags["content_tag"]) == ("conversations", "from", "value"):
            if self.stage != "dpo":
                del names["messages"]  # LEMA reads ShareGPT's chats by their own names
            renamed = self._renamed(names)
            if self.stage == "dpo":
                renamed["columns"] |= {"role": "from", "content": "value"}
        else:
            renamed = self._renamed(names)
            fields = {"role": tags["role_tag"], "content": tags["content_tag"]}
            others = {ours: theirs for ours, theirs in fields.items() if theirs != ours}
            if others:
                renamed["columns"] = renamed.get("columns", {}) | others
        return renamed | self._roles()

    def _roles(self) -> dict[str, Any]:
        tags = self.tags
        roles = {
            "user": tags["user_tag"],
            "assistant": tags["assistant_tag"],
            "system": tags["system_tag"],
            "tool": tags["observation_tag"],
        }
        if tags == TAGS or all(name in (None, role) for role, name in roles.items()):
            return {}
        return {"roles": {role: name for role, name in roles.items() if name}}

    def _renamed(self, names: Mapping[str, str | None]) -> dict[str, Any]:
        columns = {ours: theirs for ours, theirs in names.items() if theirs and theirs != ours}
        return {"columns": columns} if columns else {}

    def notes(self) -> list[tuple[str, bool]]:
        """Return what LEMA does not carry of the data set, each with whether it changes the
        numbers.
        """
        notes = list[tuple[str, bool]]()
        columns = self.columns
        if self.stage in ("dpo", "kto") and self.is_instructions:
            what = "LEMA reads instructions with several answers, or with a label, as raw text"
            notes.append((f"{what}: write prompts and answers as messages", True))
        elif self.stage == "kto":
            what = "LEMA reads a label beside prompt and completion: write the last answer of "
            notes.append((f"{what}{columns['messages']} as completion", True))
        for kind in ("images", "videos", "audios"):
            if columns[kind]:
                notes.append((f"`lema train` reads no {kind}: their column is left out", True))
        if columns["tools"]:
            what = "its tools are not shown by the chat template here: give the model's own"
            notes.append((what, True))
        if self.about.get("num_samples") is not None:
            what = "num_samples: LLaMA-Factory draws the rows at random, LEMA takes the first"
            notes.append((f"{what} (max_samples)", True))
        if not self.about.get("hf_hub_url"):
            for place in ("ms_hub_url", "om_hub_url", "cloud_file_name"):
                if self.about.get(place):
                    what = f"{place}: LEMA reads the hub of Hugging Face, and files: fetch it first"
                    notes.append((what, True))
        if self.about.get("script_url") and not self.about.get("hf_hub_url"):
            notes.append(("script_url: LEMA runs no loading script: save its rows", True))
        for key in sorted(set(self.about) - KEYS):
            notes.append((f"{key}: LLaMA-Factory has no such key, and ignores it", False))
        return notes
