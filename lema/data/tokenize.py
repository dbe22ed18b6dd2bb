"""One row as token ids and labels, with the beginning and the end of the sequence marked once each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from lema.data.chat.messages import Chat
from lema.data.chat.tokens import Chats, tokenize_spans
from lema.data.chat.turns import Known
from lema.data.columns import IGNORED, Kind, Text, Tokens, num_trained, parse
from lema.data.files import Row
from lema.data.forms import Forms, Remarks
from lema.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Reading", "check_tokenizer", "tokenize_row"]


@dataclass
class Reading:
    """What rows are read with; it lives as long as a data set is read."""

    tokenizer: "PreTrainedTokenizerBase | None"  # None will do for rows that are token ids already
    forms: Forms = field(default_factory=Forms)
    vocab_size: int | None = None  # tokens that the model knows; None: ids are not checked
    remarks: Remarks = field(default_factory=Remarks)

    @cached_property
    def chats(self) -> Chats:
        """The tokenizer's chats."""
        assert self.tokenizer is not None
        return Chats(self.tokenizer, self.forms.train_on, self.remarks, Known.of(self.tokenizer))


def tokenize_row(row: Row, kind: Kind, reading: Reading) -> tuple[list[int], list[int]]:
    """Token ids and labels of a row; a label is the token's own id where it is learnt and -100 elsewhere.

    Text and completions end in the end-of-sequence token, once, and it is learnt: else the model never learns to
    stop. Tokens that the tokenizer puts in front stand there once, also where the text already begins with them.
    A row whose messages all say not to be trained on has no tokens. The kind is from `lema.data.columns.detect`.

    Raises:
        DataError: the row is malformed, has nothing to learn, or holds ids outside the vocabulary.
    """
    tokenizer = reading.tokenizer
    has_template = tokenizer is not None and bool(tokenizer.chat_template)
    example = parse(row, kind, chat_template=has_template, forms=reading.forms)
    if isinstance(example, Tokens):
        ids, labels = example.ids, example.labels
    else:
        if tokenizer is None:
            raise row.broken(f"the data are '{kind[0]}' and there is no tokenizer", how="give the model's tokenizer")
        if isinstance(example, Chat):
            ids, learnt = reading.chats.tokenize(example, row)
            if not ids:
                return [], []
        else:
            ids, learnt = _tokenize(example, tokenizer, whole=reading.forms.train_on == "all")
        labels = [token if learn else IGNORED for token, learn in zip(ids, learnt, strict=True)]
    _check_range(row, {"input_ids": ids, "labels": labels if isinstance(example, Tokens) else []}, reading.vocab_size)
    if num_trained(labels) == 0:
        how = "the loss counts tokens after the first whose label is not -100; remove the row or mend its labels"
        raise row.broken("the row has no token to learn", how=how)
    return ids, labels


def check_tokenizer(tokenizer: "PreTrainedTokenizerBase", kind: Kind) -> None:
    """Text and completions need an end-of-sequence token.

    Raises:
        DataError: the tokenizer has none.
    """
    if kind[0] in ("text", "prompt", "instruction") and tokenizer.eos_token_id is None:
        what = "the tokenizer has no end-of-sequence token, so the model could not learn where a text ends"
        how = "set eos_token in its tokenizer_config.json"
        raise DataError(what, where=str(tokenizer.name_or_path) or "tokenizer", how=how)


def _tokenize(example: Text, tokenizer: "PreTrainedTokenizerBase", *, whole: bool) -> tuple[list[int], list[bool]]:
    check_tokenizer(tokenizer, ("text",))
    text = example.prompt + example.completion
    first = 0 if whole else len(example.prompt)
    ids, learnt = tokenize_spans(text, [(first, len(text))], tokenizer, add_special_tokens=True)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if bos is not None and ids[:2] == [bos, bos]:
        ids, learnt = ids[1:], learnt[1:]
    while ids and ids[-1] == eos:
        ids, learnt = ids[:-1], learnt[:-1]
    return [*ids, eos], [*learnt, True]


def _check_range(row: Row, columns: Mapping[str, list[int]], vocab_size: int | None) -> None:
    limit = 2**31 if vocab_size is None else vocab_size
    how = "use the tokenizer of the model being trained"
    for column, values in columns.items():
        learnt = [value for value in values if value != IGNORED] if column == "labels" else values
        if learnt and (min(learnt) < 0 or max(learnt) >= limit):
            token = min(learnt) if min(learnt) < 0 else max(learnt)
            what = f"{column} holds {token}, which is outside the vocabulary of {limit} tokens"
            raise row.broken(what, at=f"position {values.index(token)}", how=how)
