"""What the settings say of the form of the data: which columns are meant, which chat template, what is trained on."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from lema.config import LemaConfig
from lema.data.files import Row
from lema.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Forms", "Remarks", "TrainOn", "forms_of"]

TrainOn: TypeAlias = Literal["assistant", "last", "all", "completion"]
"""What is trained on: every answer; the last one; every token; or the answers after the user's last message."""

MESSAGE_FIELDS = ("role", "content")
"""Names of `columns` that mean fields of a message rather than columns of a row."""


@dataclass(frozen=True)
class Forms:
    """How rows are to be read."""

    columns: Mapping[str, str] = field(default_factory=dict)  # our name of a column to the data's
    chat_template: str | None = None  # a file, a Jinja text, or a name among the tokenizer's; None: the tokenizer's own
    train_on: TrainOn = "assistant"

    def renamed(self, row: Row) -> Row:
        """Return the row with the columns under our names.

        Raises:
            DataError: the row lacks a column that was named.
        """
        wanted = {ours: theirs for ours, theirs in self.columns.items() if ours not in MESSAGE_FIELDS}
        if not wanted:
            return row
        if missing := [theirs for theirs in wanted.values() if theirs not in row.values]:
            found = ", ".join(sorted(map(str, row.values)))
            what = f"the settings name the column {missing[0]!r}, and the row has {found or 'none'}"
            raise row.broken(what, how="mend `columns`, which holds our names and the data's: {prompt: question}")
        taken = set(wanted.values()) | set(wanted)
        values = {name: value for name, value in row.values.items() if name not in taken}
        return Row(values | {ours: row.values[theirs] for ours, theirs in wanted.items()}, row.source, row.line)

    def with_template(self, tokenizer: "PreTrainedTokenizerBase") -> "PreTrainedTokenizerBase":
        """Return the tokenizer with the chat template of the settings; a copy, since the tokenizer is the caller's.

        Raises:
            DataError: the setting is neither a Jinja text, nor a template of the tokenizer's, nor a file.
        """
        given, own = self.chat_template, tokenizer.chat_template
        if given is None:
            return tokenizer
        changed = copy.copy(tokenizer)
        if "{{" in given or "{%" in given:
            changed.chat_template = given
        elif isinstance(own, dict) and given in own:
            changed.chat_template = own[given]
        else:
            try:
                changed.chat_template = Path(given).expanduser().read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                how = "give a .jinja file, or the template itself"
                raise DataError(f"the chat template cannot be read: {error}", where="chat_template", how=how) from error
        return changed


def forms_of(config: LemaConfig) -> Forms:
    """Return what a run's settings say of the form of its data."""
    return Forms(dict(config.columns), config.chat_template, config.train_on)


@dataclass
class Remarks:
    """What a user should know of the data, each thing once: how many rows it holds for, and the first of them."""

    found: dict[str, tuple[int, str]] = field(default_factory=dict)

    def add(self, row: Row, what: str) -> None:
        """Count one more row for which this holds."""
        count, first = self.found.get(what, (0, row.origin))
        self.found[what] = (count + 1, first)

    def lines(self) -> tuple[str, ...]:
        """What was found, one line for each."""
        return tuple(
            f"{what} ({count:,} {'row' if count == 1 else 'rows'}, the first is {first})"
            for what, (count, first) in self.found.items()
        )
