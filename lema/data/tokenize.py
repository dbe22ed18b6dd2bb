"""Rows as token ids and labels, with the beginning and the end of each sequence marked once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from lema.data.chat.messages import Chat
from lema.data.chat.pieces import Ids, Learnt
from lema.data.chat.tokens import Chats, check_words, tokenizing
from lema.data.chat.turns import Span, TemplateCache
from lema.data.columns import (
    IGNORED,
    Example,
    Kind,
    Text,
    Tokens,
    left_out,
    media_column,
    num_trained,
    parse,
)
from lema.data.files import Row
from lema.data.forms import Forms, Remarks, check_ids
from lema.data.media.reading import MediaReading, with_column
from lema.data.row_forms import form_bit
from lema.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Ints", "Reading", "tokenize_rows"]

Ints: TypeAlias = npt.NDArray[np.int32]
NOTHING = np.empty(0, np.int32)
BATCH = 64
BATCH_CHARACTERS = 1 << 17  # that are tokenised at once
Draft: TypeAlias = Tokens | tuple[str, list[Span], bool] | None
"""A row before it is tokenised: text, its trained parts, and whether it has its special tokens; or
tokens that were given; None, where it is not to be trained on."""


@dataclass
class Reading:
    """What rows are read with; it lives as long as a data set is read."""

    tokenizer: PreTrainedTokenizerBase | None  # None will do for rows that are token ids already
    forms: Forms = field(default_factory=Forms)
    vocab_size: int | None = None  # tokens that the model knows; None: ids are not checked
    remarks: Remarks = field(default_factory=Remarks)
    images: MediaReading | None = None  # None: rows have no images

    @cached_property
    def tokenize(self) -> Callable[[str, Sequence[Span], bool], tuple[Ids, Learnt]]:
        """The tokenizer's way from a text to tokens, with what is known of it."""
        assert self.tokenizer is not None
        return tokenizing(self.tokenizer)

    @cached_property
    def chats(self) -> Chats:
        """The tokenizer's chats."""
        assert self.tokenizer is not None
        cache = TemplateCache.of(self.tokenizer, trains_prompt=self.forms.trains_prompt)
        return Chats(
            self.tokenizer,
            self.forms.train_on,
            self.remarks,
            cache,
            self.forms.template_date,
            self.forms.eot_tokens,
        )


def tokenize_rows(
    rows: Iterable[tuple[Row, Kind]], reading: Reading
) -> Iterator[tuple[Row, Ints, Ints]]:
    """Yield token ids and labels of rows, none of a row that says not to be trained on. Text and
    completions end in the end-of-sequence token, once, as a trained token: else the model never
    learns to stop. Tokens that the tokenizer puts in front stand there once, also where the text
    already begins with them. `DataError`: a row is malformed, has nothing to learn, or holds ids
    outside the vocabulary. All rows before it have been yielded."""
    for drafts in _drafts(rows, reading):
        encoded = iter(
            [reading.tokenize(*draft) for _, draft in drafts if isinstance(draft, tuple)]
        )
        for row, draft in drafts:
            if draft is None:
                yield row, NOTHING, NOTHING
                continue
            if isinstance(draft, Tokens):
                check_ids(row, {"input_ids": draft.ids, "labels": draft.labels}, reading.vocab_size)
                ids = np.array(draft.ids, np.int32)
                labels = np.array(draft.labels, np.int32)
            else:
                ids, learnt = next(encoded)
                if not draft[2]:
                    ids, learnt = _bordered(
                        ids, learnt, cast("PreTrainedTokenizerBase", reading.tokenizer)
                    )
                check_ids(row, {"input_ids": ids}, reading.vocab_size)
                labels = np.where(learnt, ids, np.int32(IGNORED))
            if reading.images is not None:
                reading.images.check_tokens(row, ids)
            if num_trained(labels) == 0:
                how = "the loss counts tokens after the first; remove the row, or fix its labels"
                raise row.broken("the row has no token to train on", how=how)
            yield row, ids, labels


def _drafts(
    rows: Iterable[tuple[Row, Kind]], reading: Reading
) -> Iterator[list[tuple[Row, Draft]]]:
    """Yield rows before they are tokenised, several at once, because a processor is faster at one
    thing after another; what is wrong with a row is raised after those before it are yielded."""
    for examples in _examples(rows, reading):
        chats = [(example, row) for row, example in examples if isinstance(example, Chat)]
        if chats:
            reading.chats.prepare(chats)
        drafts = list[tuple[Row, Draft]]()
        try:
            for row, example in examples:
                draft = None if example is None else _draft(row, example, reading)
                if isinstance(draft, tuple):
                    check_words(row, draft[0])
                drafts.append((row, draft))
        except DataError:
            yield drafts
            raise
        yield drafts


def _examples(
    rows: Iterable[tuple[Row, Kind]], reading: Reading
) -> Iterator[list[tuple[Row, Example | None]]]:
    """Yield what rows hold, of several at once; None, of a row that is not to be trained on."""
    examples = list[tuple[Row, Example | None]]()
    size = 0
    try:
        for row, kind in rows:
            example = None if left_out(row) else _example(row, kind, reading)
            formed = row if example is None else replace(row, form=form_bit(example))
            examples.append((formed, example))
            size += _size(example)
            if len(examples) == BATCH or size > BATCH_CHARACTERS:
                yield examples
                examples = []
                size = 0
    except DataError:
        yield examples
        raise
    yield examples


def _size(example: Example | None) -> int:
    """About how many characters an example has."""
    if isinstance(example, Tokens):
        return 64 * len(example.ids)  # a Python number takes more memory than a character
    if isinstance(example, Chat):
        texts = (message.get("content") for message in example.messages)
        if example.pictures:
            return BATCH_CHARACTERS  # because its row may hold the bytes of images
        return sum(
            len(text) if isinstance(text, str) else BATCH_CHARACTERS // BATCH for text in texts
        )
    return len(example.prompt) + len(example.completion) if example is not None else 0


def _example(row: Row, kind: Kind, reading: Reading) -> Example:
    tokenizer = reading.tokenizer
    if (
        tokenizer is not None
        and kind[0] in ("text", "prompt", "instruction")
        and tokenizer.eos_token_id is None
    ):
        what = (
            "the tokenizer has no end-of-sequence token, so the model cannot learn where a "
            "text ends"
        )
        how = "set eos_token in its tokenizer_config.json"
        raise DataError(what, where=str(tokenizer.name_or_path) or "tokenizer", how=how)
    has_template = tokenizer is not None and bool(tokenizer.chat_template)
    example = parse(row, kind, chat_template=has_template, forms=reading.forms)
    if tokenizer is None and not isinstance(example, Tokens):
        raise row.broken(
            f"the data are '{kind[0]}' and there is no tokenizer", how="give the model's tokenizer"
        )
    if isinstance(example, Text) and reading.forms.system_prompt and not _has_system(reading.forms):
        reading.remarks.add(row, "system_prompt is of chats; rows of text do not get it")
    return _with_images(row, example, reading)


def _with_images(row: Row, example: Example, reading: Reading) -> Example:
    """Return an example with the images of its row. `DataError`: there are some, and the row is no
    chat."""
    if reading.images is None:
        return example
    if isinstance(example, Chat):
        return with_column(row, example)
    if media_column(row) is not None:
        what = "the row has images, and only chats have places for them"
        raise row.broken(what, how="write the row as messages")
    return example


def _has_system(forms: Forms) -> bool:
    """Whether the form of instructions has a place for the system message."""
    return "{system}" in str(forms.row_format)


def _draft(row: Row, example: Example, reading: Reading) -> Draft:
    if isinstance(example, Tokens):
        return example
    if isinstance(example, Chat):
        if example.pictures:
            return _draft_with_images(row, example, reading)
        if reading.forms.train_on == "contents":
            tokens = reading.chats.contents(example, row)
            return tokens and Tokens(*tokens)
        rendered = reading.chats.render(example, row)
        return rendered and (*rendered, True)
    if example.separate:
        return _separated(example, reading)
    text = example.prompt + example.completion
    return text, [(0 if reading.forms.train_on == "all" else len(example.prompt), len(text))], False


def _draft_with_images(row: Row, example: Chat, reading: Reading) -> Draft:
    """Return a chat with images as tokens, and keep the record of its images for the row."""
    assert reading.images is not None, "rows with images are refused where none are read"
    if reading.forms.train_on == "contents":
        what = "train_on: contents is for rows of text, and this one has images"
        raise row.broken(what, how="set train_on: assistant")
    rendered = reading.chats.render(example, row)
    if rendered is None:
        return None
    text, spans = rendered
    check_words(row, text)
    pictures = reading.images.pictures(row, example.pictures)
    expanded, record = reading.images.expanded(text, spans, pictures, row)
    reading.images.records[row.origin] = record
    labels = np.where(expanded.learnt, expanded.ids, np.int32(IGNORED))
    return Tokens(expanded.ids.tolist(), labels.tolist())


def _separated(example: Text, reading: Reading) -> Tokens:
    """Return a prompt and its answer that were tokenised each for itself."""
    tokenizer = cast("PreTrainedTokenizerBase", reading.tokenizer)
    prompt, answer = (
        list(tokenizer(text, verbose=False)["input_ids"])
        for text in (example.prompt, example.completion)
    )
    if answer[:1] == [tokenizer.bos_token_id]:
        del answer[0]
    if tokenizer.eos_token_id is not None and answer[-1:] != [tokenizer.eos_token_id]:
        answer.append(tokenizer.eos_token_id)
    learnt = prompt if reading.forms.train_on == "all" else [IGNORED] * len(prompt)
    return Tokens(prompt + answer, learnt + answer)


def _bordered(ids: Ints, learnt: Learnt, tokenizer: PreTrainedTokenizerBase) -> tuple[Ints, Learnt]:
    """The tokens with one that begins a sequence, at most, and one that ends it, which is
    trained on.
    """
    bos = tokenizer.bos_token_id
    eos = tokenizer.eos_token_id
    first = int(bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos)
    last = len(ids)
    while last > first and ids[last - 1] == eos:
        last -= 1
    return np.append(ids[first:last], np.int32(eos)), np.append(learnt[first:last], True)
