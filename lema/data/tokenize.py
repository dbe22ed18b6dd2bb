"""Rows as token ids and labels, with the beginning and the end of each sequence marked once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from lema.data.chat.messages import Chat
from lema.data.chat.pieces import Pieces
from lema.data.chat.tokens import Chats, Learnt, tokenize_spans
from lema.data.chat.turns import Known, Span
from lema.data.columns import IGNORED, Kind, Tokens, left_out, num_trained, parse
from lema.data.files import Row
from lema.data.forms import Forms, Remarks
from lema.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Ints", "Reading", "tokenize_rows"]

Ints: TypeAlias = npt.NDArray[np.int32]
NOTHING = np.empty(0, np.int32)
BATCH, BATCH_CHARACTERS = 64, 1 << 17  # that are tokenised at once


@dataclass
class Reading:
    """What rows are read with; it lives as long as a data set is read."""

    tokenizer: PreTrainedTokenizerBase | None  # None will do for rows that are token ids already
    forms: Forms = field(default_factory=Forms)
    vocab_size: int | None = None  # tokens that the model knows; None: ids are not checked
    remarks: Remarks = field(default_factory=Remarks)

    @cached_property
    def pieces(self) -> Pieces | None:
        """What is known of the pieces of texts; None: the tokenizer takes them whole."""
        return None if self.tokenizer is None else Pieces.of(self.tokenizer)

    @cached_property
    def chats(self) -> Chats:
        """The tokenizer's chats."""
        assert self.tokenizer is not None
        return Chats(self.tokenizer, self.forms.train_on, self.remarks, Known.of(self.tokenizer))


@dataclass(slots=True)
class _Draft:
    """A row before it is tokenised: text, or tokens that were given; neither, where it is not to be trained on."""

    row: Row
    text: str = ""
    spans: list[Span] = field(default_factory=list)  # of the text that are learnt
    whole: bool = False  # whether the text has its special tokens
    given: Tokens | None = None


def tokenize_rows(rows: Iterable[tuple[Row, Kind]], reading: Reading) -> Iterator[tuple[Row, Ints, Ints]]:
    """Yield token ids and labels of rows, none of a row that says not to be trained on. Text and completions end in the
    end-of-sequence token, once, and it is learnt: else the model never learns to stop. Tokens that the tokenizer puts
    in front stand there once, also where the text already begins with them. `DataError`: a row is malformed, has
    nothing to learn, or holds ids outside the vocabulary. All rows before it have been yielded."""
    for drafts in _drafts(rows, reading):
        texts = [draft for draft in drafts if draft.spans]
        tokenizer = cast("PreTrainedTokenizerBase", reading.tokenizer)
        pairs = [draft.text for draft in texts], [draft.spans for draft in texts]
        encoded = iter(tokenize_spans(*pairs, tokenizer, texts[0].whole, reading.pieces) if texts else ())
        for draft in drafts:
            row, given = draft.row, draft.given
            if given is not None:
                columns = {"input_ids": given.ids, "labels": given.labels}
                _check_range(row, columns, reading.vocab_size)
                ids, labels = np.array(given.ids, np.int32), np.array(given.labels, np.int32)
            elif draft.spans:
                ids, learnt = next(encoded)
                if not draft.whole:
                    ids, learnt = _bordered(ids, learnt, tokenizer)
                _check_range(row, {"input_ids": ids}, reading.vocab_size)
                labels = np.where(learnt, ids, np.int32(IGNORED))
            else:
                yield row, NOTHING, NOTHING
                continue
            if num_trained(labels) == 0:
                how = "the loss counts tokens after the first whose label is not -100; remove the row, or fix labels"
                raise row.broken("the row has no token to train on", how=how)
            yield row, ids, labels


def _drafts(rows: Iterable[tuple[Row, Kind]], reading: Reading) -> Iterator[list[_Draft]]:
    """Yield what is to be tokenised together; what is wrong with a row is raised after those before it are yielded."""
    drafts, size = list[_Draft](), 0
    try:
        for row, kind in rows:
            draft = _Draft(row) if left_out(row) else _draft(row, kind, reading)
            if drafts and (len(drafts) == BATCH or size > BATCH_CHARACTERS or draft.whole != drafts[0].whole):
                yield drafts
                drafts, size = [], 0
            drafts.append(draft)
            # A Python number takes more memory than a character.
            size += len(draft.text) if draft.given is None else 64 * len(draft.given.ids)
    except DataError:
        yield drafts
        raise
    yield drafts


def _draft(row: Row, kind: Kind, reading: Reading) -> _Draft:
    tokenizer = reading.tokenizer
    if tokenizer is not None and kind[0] in ("text", "prompt", "instruction") and tokenizer.eos_token_id is None:
        what = "the tokenizer has no end-of-sequence token, so the model could not learn where a text ends"
        how = "set eos_token in its tokenizer_config.json"
        raise DataError(what, where=str(tokenizer.name_or_path) or "tokenizer", how=how)
    has_template = tokenizer is not None and bool(tokenizer.chat_template)
    example = parse(row, kind, chat_template=has_template, forms=reading.forms)
    if isinstance(example, Tokens):
        return _Draft(row, given=example)
    if tokenizer is None:
        raise row.broken(f"the data are '{kind[0]}' and there is no tokenizer", how="give the model's tokenizer")
    if isinstance(example, Chat):
        rendered = reading.chats.render(example, row)
        return _Draft(row) if rendered is None else _Draft(row, *rendered, whole=True)
    text = example.prompt + example.completion
    return _Draft(row, text, [(0 if reading.forms.train_on == "all" else len(example.prompt), len(text))])


def _bordered(ids: Ints, learnt: Learnt, tokenizer: PreTrainedTokenizerBase) -> tuple[Ints, Learnt]:
    """The tokens with one that begins a sequence, at most, and one that ends it, which is learnt."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    first, last = int(bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos), len(ids)
    while last > first and ids[last - 1] == eos:
        last -= 1
    return np.append(ids[first:last], np.int32(eos)), np.append(learnt[first:last], True)


def _check_range(row: Row, columns: Mapping[str, Sequence[int] | Ints], vocab_size: int | None) -> None:
    limit = 2**31 if vocab_size is None else vocab_size
    how = "use the tokenizer of the model being trained"
    for column, values in columns.items():
        known = np.asarray(values)
        wrong = (known < 0) & ((known != IGNORED) | (column != "labels")) | (known >= limit)
        if wrong.any():
            at = int(wrong.argmax())
            what = f"{column} holds {values[at]}, which is outside the vocabulary of {limit} tokens"
            raise row.broken(what, at=f"position {at}", how=how)
