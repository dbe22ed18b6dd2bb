"""How the rows of each file are read: with the settings of the run, or those of its data set."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from lema.data.chat.template import date_for
from lema.data.files import Row
from lema.data.forms import Forms
from lema.data.sets.sources import DataFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Reader", "Readers"]


@dataclass(frozen=True)
class Reader:
    """The forms of rows, and the tokenizer with their chat template; None: they are token ids."""

    forms: Forms
    tokenizer: "PreTrainedTokenizerBase | None"

    @classmethod
    def of(cls, forms: Forms, tokenizer: "PreTrainedTokenizerBase | None") -> "Reader":
        """Return the reader of the forms, with their template and the date that it is told."""
        if tokenizer is None:
            return cls(forms, None)
        tokenizer = forms.with_template(tokenizer)
        date = date_for(tokenizer, forms.template_date)
        return cls(replace(forms, template_date=date), tokenizer)

    def described(self) -> dict[str, Any]:
        """Return all that decides the tokens of rows besides the tokenizer."""
        template = None if self.tokenizer is None else self.tokenizer.chat_template
        about: dict[str, Any] = {
            "columns": dict(self.forms.columns),
            "train_on": self.forms.train_on,
        }
        about |= {"chat_template": template, "template_date": self.forms.template_date}
        return about | self.forms.described()


class Readers:
    """The readers of all rows: that of the run, and those of data sets with settings of their own.

    Args:
        files: what is read; None: rows from memory.
        forms: of the run.
        tokenizer: of the model.

    Attributes:
        run: the reader of rows that have no settings of their own.
    """

    def __init__(
        self,
        files: Iterable[DataFile] | None,
        forms: Forms,
        tokenizer: "PreTrainedTokenizerBase | None",
    ) -> None:
        self.run = Reader.of(forms, tokenizer)
        self._by_label: Mapping[str, Reader] = {
            file.label: Reader.of(forms.of_data_set(file.options), tokenizer)
            for file in files or ()
            if file.options
        }

    def described(self) -> dict[str, Any]:
        """Return what of the data sets' own settings decides tokens; empty: none has any."""
        by_label = {label: reader.described() for label, reader in self._by_label.items()}
        return {"readers": by_label} if by_label else {}

    def cuts_left(self) -> bool:
        """Whether the beginning of any row is cut off if it is too long."""
        return any(reader.forms.truncation_side == "left" for reader in self.all())

    def all(self) -> list[Reader]:
        """Return every reader, the run's first."""
        return [self.run, *self._by_label.values()]

    def grouped(self, rows: Iterable[Row]) -> Iterator[tuple[Reader, Iterator[Row]]]:
        """Yield the rows that come one after the other and are read in the same way."""
        if not self._by_label:
            yield self.run, iter(rows)
            return
        for label, group in groupby(rows, key=lambda row: row.source):
            yield self._by_label.get(label, self.run), group
