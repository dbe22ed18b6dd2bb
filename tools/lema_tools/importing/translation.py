"""What a run of another trainer is as settings of LEMA, and how true that is, key by key."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from typing import Any, Protocol

__all__ = ["DefaultsTable", "ForeignRun", "Note", "Peer", "Translation"]


@dataclass(frozen=True)
class Note:
    """One key of another trainer that LEMA has otherwise, or not at all, and why."""

    key: str
    why: str
    """A whole sentence, or a clause, for the user: what LEMA does, and how to mend it."""
    changes_numbers: bool = True
    """Whether losses or weights of the run become others by it. If so, the import ends with exit
    code 3 unless the user accepts differences.
    """


@dataclass
class Translation:
    """Settings of LEMA for a run of another trainer, and what became of each of its keys.

    A translator fills it key by key; every key of the run is in exactly one of the three lists.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    """Every resolved setting by LEMA's name, those that equal LEMA's defaults included: they are
    left out when the file is written.
    """
    same: dict[str, str] = field(default_factory=dict)
    """Keys whose meaning is the same here, with what says it, such as `lora_rank: 32`."""
    differs: list[Note] = field(default_factory=list)
    """Keys that are carried with another meaning."""
    lost: list[Note] = field(default_factory=list)
    """Keys that are not carried."""

    def carry(self, key: str, value: object, setting: str) -> None:
        """Carry a key's value to a setting with the same meaning."""
        self.settings[setting] = value
        self.same[key] = f"{setting}: {value}"

    @property
    def changes(self) -> list[Note]:
        """The notes on keys by which the numbers of the run become others."""
        return [note for note in (*self.differs, *self.lost) if note.changes_numbers]


@dataclass(frozen=True)
class DefaultsTable:
    """A trainer's defaults, from the sources of one of its versions.

    Args:
        peer: the trainer's folder in this package, which has `defaults.json`: an object with
            `tool`, `version`, `commit`, `date` (of the commit), `sources` (the files read), and
            `defaults`: for each kind of run an object from key to value.
    """

    peer: str

    @cached_property
    def contents(self) -> Mapping[str, Any]:
        """The table as it is in its file."""
        text = files(f"lema_tools.importing.{self.peer}").joinpath("defaults.json")
        return dict(json.loads(text.read_text(encoding="utf-8")))

    @property
    def keys(self) -> frozenset[str]:
        """All keys that the trainer has, for any kind of run; those of nested ones have dots."""
        tables = self.contents["defaults"].values()
        return frozenset(self.contents.get("keys", ())).union(*tables)

    @property
    def origin(self) -> str:
        """The trainer, its version and the date of its sources, for a comment."""
        contents = self.contents
        return f"{contents['tool']} {contents['version']} of {contents['date']}"

    def of(self, kind: str) -> dict[str, Any]:
        """Return the defaults of a kind of run, such as `sft`; with those of every kind, which
        are named `all`.
        """
        defaults = self.contents["defaults"]
        return {**defaults.get("all", {}), **defaults.get(kind, {})}


@dataclass(frozen=True)
class ForeignRun:
    """A run as another trainer is asked for it: a file, a command line, or both."""

    values: Mapping[str, Any]
    """The keys of the file, with those of the command line laid over them."""
    words: Sequence[str] = ()
    """The words of the command line that are no options, such as `trl dpo`."""
    objective: str | None = None
    """What the run minimises, where the caller says it, such as `dpo`."""
    directory: str = "."
    """The directory of the file, against which the trainer's further files are found."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further options of `lema config import`, such as `dataset_info`."""


class Peer(Protocol):
    """Another trainer."""

    name: str
    """Its name in text, such as `LLaMA-Factory`."""

    def recognises(self, run: ForeignRun) -> bool:
        """Whether the words or the form of a run are those of this trainer alone."""

    def keys(self) -> frozenset[str]:
        """Return the keys that files of this trainer may have."""

    def translate(self, run: ForeignRun) -> Translation:
        """Return the run as settings of LEMA.

        Raises:
            ConfigError: a value is wrong for the trainer itself.
        """

    def origin(self) -> str:
        """Return the trainer's version and date whose defaults were used, for a comment."""
