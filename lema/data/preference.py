"""Examples for preference objectives: pairs of a chosen and a rejected row, or rows with a label,
and their batches.

Rows are tokenised as TRL does: prompt and completion together, as the model meets them, and the
completion begins where these tokens part from those of the prompt alone. A pair without a prompt
has one: what its sides begin with alike.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, overload

import numpy as np
import numpy.typing as npt
import torch

from lema.data.batches import Batch, collate
from lema.data.chat.messages import Chat, read_messages, read_tools
from lema.data.chat.pictures import Picture, has_pictures
from lema.data.chat.template import Ahead, open_template, render_ahead
from lema.data.chat.tokens import DATED, encoded
from lema.data.columns import (
    IGNORED,
    check_without_images,
    left_out,
    media_column,
    parse,
    with_system,
)
from lema.data.dataset import CUT_IMAGE, Columns, TokenDataset, eval_mask
from lema.data.files import Row
from lema.data.forms import Forms, Remarks, check_ids, num_alike
from lema.data.media.reading import DecodedRow, MediaReading, with_column
from lema.data.media.rows import IMAGES, MediaRecord
from lema.data.read import Overlong, table_of
from lema.data.readers import Reader, Readers
from lema.data.row_forms import BITS, RowForm
from lema.data.sets.preshuffle import datasets_order
from lema.data.sets.sources import folders_of, given_files
from lema.errors import ConfigError, DataError

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

__all__ = ["EXAMPLE", "ExampleColumn", "PreferenceDataset", "prepare_preferences"]

EXAMPLE = "example"
"""The name, in a micro-batch, of int64 `[rows, 7]`, with the values that `Of` names for each
row.
"""


class ExampleColumn(IntEnum):
    """The columns of what is said of a row."""

    BATCH = 0  # the number of its batch in the step
    INDEX = 1  # of its example in the batch
    LABEL = 2  # 1: chosen, or desirable; 0: rejected
    EXAMPLES = 3  # how many examples the batch has, in all processes
    BATCHES = 4  # how many batches the step has
    TOKENS = 5  # how many tokens of completions the chosen rows of the batch have, in all processes
    ALL_TOKENS = 6  # in the same way, with their prompts, less the first token of each row


BATCH = 32
BATCH_CHARACTERS = 1 << 17  # rows that are rendered at once

Value: TypeAlias = str | list[dict[str, Any]]
"""Text, or messages for the chat template."""

TokenRow = dict[str, list[int]]


class PreferenceDataset(Sequence[list[TokenRow]]):
    """Examples in order: each a list of its rows, `[chosen, rejected]`, or one row. `rows`: of all
    examples, one after the other; labels are -100 in the prompts. `labels`: whether each example is
    desirable; None: examples are pairs. `max_length`: rows are cut at this many tokens."""

    def __init__(
        self, rows: TokenDataset, labels: npt.NDArray[np.int64] | None, max_length: int
    ) -> None:
        self.rows = rows
        self._labels = labels
        self._max_length = max_length
        self.counts = rows.counts
        self.notes = rows.notes
        self.rows_each = 2 if labels is None else 1

    def __len__(self) -> int:
        return len(self.rows) // self.rows_each

    @overload
    def __getitem__(self, index: int) -> list[TokenRow]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[TokenRow]]: ...
    def __getitem__(self, index: int | slice) -> list[TokenRow] | list[list[TokenRow]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return [
            self._cut(self.rows[index * self.rows_each + side]) for side in range(self.rows_each)
        ]

    def _cut(self, row: TokenRow) -> TokenRow:
        # images are in prompts, of which nothing is cut off here
        return {
            name: values if name == IMAGES else values[: self._max_length]
            for name, values in row.items()
        }

    @property
    def has_images(self) -> bool:
        """Whether any example has images."""
        return self.rows.has_images

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """The length of each example's longest row in tokens, int32 `[examples]`; no token is
        read for it.
        """
        longest: npt.NDArray[np.int32] = self.rows.lengths.reshape(-1, self.rows_each).max(axis=1)
        return np.minimum(longest, self._max_length)

    def fingerprint(self) -> str:
        """A digest of all examples in order: whether a run resumes on the data it began with."""
        labels = None if self._labels is None else self._labels.tolist()
        about = json.dumps([self.rows.fingerprint(), labels, self._max_length])
        return hashlib.blake2b(about.encode(), digest_size=16).hexdigest()

    def select(self, examples: Sequence[int] | npt.NDArray[np.int64]) -> PreferenceDataset:
        """The examples at these places, in this order."""
        indices = np.asarray(examples, dtype=np.int64)
        rows = (indices[:, None] * self.rows_each + np.arange(self.rows_each)).reshape(-1)
        labels = None if self._labels is None else self._labels[indices]
        return PreferenceDataset(self.rows.select(rows), labels, self._max_length)

    def first_rows(self, count: int) -> PreferenceDataset:
        """The first so many examples, with the notes on all of them."""
        labels = None if self._labels is None else self._labels[:count]
        rows = self.rows.first_rows(count * self.rows_each)
        return PreferenceDataset(rows, labels, self._max_length)

    def preshuffled(self, seed: int) -> PreferenceDataset:
        """The same examples in the order of `lema.data.sets.preshuffle`."""
        return self.select(datasets_order(len(self), seed))

    def split(
        self, eval_split: float | int, seed: int
    ) -> tuple[PreferenceDataset, PreferenceDataset]:
        """Examples to train on and examples to evaluate on, drawn as `TokenDataset.split` draws
        rows.
        """
        chosen = eval_mask(len(self), eval_split, seed)
        return self.select(np.flatnonzero(~chosen)), self.select(np.flatnonzero(chosen))

    def num_tokens(self, index: int) -> int:
        """The length of the longest row of example `index`, in tokens."""
        rows = range(index * self.rows_each, (index + 1) * self.rows_each)
        return min(self._max_length, max(map(self.rows.num_tokens, rows)))

    def batch_of(
        self,
        examples: Sequence[int],
        mine: Sequence[int],
        pad_token_id: int = 0,
        number: int = 0,
        count: int = 1,
    ) -> Batch:
        """Return the rows of `mine`, which this process has of a batch of `examples`, the
        `number`-th of `count` in its step. Each row of labelled examples also comes with the
        completion of the one before it in the batch, the first with that of the last:
        `mismatched_input_ids` and so on."""
        rows = [row for index in mine for row in self[index]]
        batch = collate(rows, pad_token_id, untrained=True)
        about = torch.zeros((len(rows), len(ExampleColumn)), dtype=torch.long)
        first_rows = [self[index][0] for index in examples]
        chosen_rows = [
            row for row, index in zip(first_rows, examples, strict=True) if self._label(index, 0)
        ]
        about[:, ExampleColumn.TOKENS] = sum(
            sum(label != IGNORED for label in row["labels"][1:]) for row in chosen_rows
        )
        about[:, ExampleColumn.ALL_TOKENS] = sum(len(row["labels"]) - 1 for row in chosen_rows)
        about[:, ExampleColumn.EXAMPLES] = len(examples)
        about[:, ExampleColumn.BATCH] = number
        about[:, ExampleColumn.BATCHES] = count
        at = {index: number for number, index in enumerate(examples)}
        for number, index in enumerate(index for index in mine for _ in range(self.rows_each)):
            about[number, ExampleColumn.INDEX] = at[index]
            about[number, ExampleColumn.LABEL] = self._label(index, number % self.rows_each)
        batch[EXAMPLE] = about  # type: ignore[literal-required] # of rows alone
        if self._labels is not None:
            mismatched = collate(
                [self._mismatched(index, examples[at[index] - 1]) for index in mine], untrained=True
            )
            mismatched.setdefault("attention_mask", torch.ones_like(mismatched["input_ids"]))
            batch.update({f"mismatched_{name}": tensor for name, tensor in mismatched.items()})  # type: ignore[typeddict-item] # names are put together
        return batch

    def _label(self, example: int, row: int) -> int:
        return int(row == 0) if self._labels is None else int(self._labels[example])

    def _mismatched(self, example: int, other_example: int) -> TokenRow:
        """The prompt of one example with the completion of another."""
        prompt_row = self.rows[example]
        completion_row = self.rows[other_example]
        start = _start(prompt_row["labels"])
        begins = _start(completion_row["labels"])
        completion = completion_row["input_ids"][begins:]
        labels = [IGNORED] * start + completion
        row = {"input_ids": prompt_row["input_ids"][:start] + completion, "labels": labels}
        if IMAGES in prompt_row:
            row[IMAGES] = prompt_row[IMAGES]
        return self._cut(row)


def _form_of(values: Sequence[Any]) -> RowForm:
    """Return the form of an example: texts, or messages."""
    return "completion" if isinstance(values[0], str) else "chat"


def prepare_preferences(
    data: str | Path | Iterable[Any],
    tokenizer: PreTrainedTokenizerBase,
    *,
    labelled: bool,
    max_length: int,
    overlong: Overlong = "truncate",
    vocab_size: int | None = None,
    forms: Forms | None = None,
    cache: Path | None = None,
    images: MediaReading | None = None,
) -> PreferenceDataset:
    """Read and tokenise examples, given and cached as `prepare_data` takes them, their `images` as
    well; with `labelled` they are rows with a label, which a pair is made two of. "drop" leaves out
    the example of a longer row; so is one of which no token of a completion would be left.
    `DataError`: no rows, a malformed row (named by file and line), or none left."""
    files = given_files(data)
    readers = Readers(files, forms or Forms(), tokenizer)
    if labelled and readers.cuts_left():
        what = "rows with labels are cut at their end, because completions change their prompts"
        raise ConfigError(what, where="truncation_side", how="leave it out, or set overlong: drop")
    images = None if images is None else images.at(folders_of(files))

    def gather(rows: Iterable[Row], _: Row | None = None) -> Columns:
        remarks = Remarks()
        columns = Columns(remarks=remarks.counts)
        for reader, group in readers.grouped(rows):
            assert reader.tokenizer is not None, "examples are never token ids"
            for row, examples, ahead, pictures in _read(group, reader, images, labelled=labelled):
                if examples is None:
                    columns.leave_out(row)
                    continue
                seen = None if images is None or not pictures else images.pictures(row, pictures)
                date = reader.forms.template_date
                encoding = _Encoding(reader.tokenizer, row, date, ahead, images, seen)
                for number, (values, label) in enumerate(examples):
                    tokens, record = _tokenized(values, encoding, vocab_size)
                    if encoding.date is not None and not isinstance(values[0], str):
                        remarks.add(row, DATED.format(encoding.date))
                    mark = GOOD * label | SECOND * (number > 0)
                    side = reader.forms.truncation_side
                    formed = replace(row, form=BITS[_form_of(values)])
                    limits = _Limits(max_length, overlong, labelled, side)
                    _take(columns, formed, tokens, mark, limits, record)
        return columns

    settings: dict[str, Any] = {
        "task": "kto" if labelled else "pairs",
        "columns": dict(readers.run.forms.columns),
    }
    settings |= {"max_length": max_length, "overlong": overlong, "vocab_size": vocab_size}
    date = readers.run.forms.template_date
    settings |= {} if date is None else {"template_date": date}
    settings |= readers.run.forms.described() | readers.described()
    run = readers.run.tokenizer
    rows = TokenDataset(table_of(data, files, gather, run, settings, cache, images))
    return _as_examples(rows, max_length, labelled=labelled)


def _as_examples(rows: TokenDataset, max_length: int, *, labelled: bool) -> PreferenceDataset:
    """Return rows as examples. Rejected rows come after all chosen ones, because next to a row with
    its prompt a completion is not mismatched."""
    marks = rows.marks[:: 1 if labelled else 2]
    dataset = PreferenceDataset(
        rows, (marks & GOOD).astype(np.int64) if labelled else None, max_length
    )
    second = (marks & SECOND) > 0
    return dataset.select(np.argsort(second, kind="stable")) if second.any() else dataset


class _Limits(NamedTuple):
    """How long rows may be, and what becomes of longer ones."""

    max_length: int
    overlong: Overlong
    labelled: bool
    side: Literal["right", "left"]  # that is cut off


def _take(
    columns: Columns,
    row: Row,
    tokens: Sequence[tuple[list[int], list[int]]],
    mark: int,
    limits: _Limits,
    record: MediaRecord | None,
) -> None:
    """Take in the rows of an example, or drop it."""
    max_length, _, labelled, side = limits
    longest = max(len(ids) for ids, _ in tokens)
    if not _fits(row, tokens, limits):
        columns.drop(row, longest)
        return
    left = side == "left" and not labelled
    records = [
        None if record is None else record.shifted(max(0, len(ids) - max_length) if left else 0)
        for ids, _ in tokens
    ]
    if any(images is not None and not images.is_whole(max_length) for images in records):
        columns.drop(row, longest, CUT_IMAGE)
        return
    for (ids, learnt), images in zip(tokens, records, strict=True):
        if left:
            cut = learnt[:-max_length]
            columns.append(row, ids[-max_length:], learnt[-max_length:], cut, mark, images)
            continue
        # Labelled rows stay whole, because completions also stand behind shorter prompts.
        end = len(ids) if labelled else max_length
        columns.append(row, ids[:end], learnt[:end], learnt[max_length:], mark, images)


def _fits(row: Row, tokens: Sequence[tuple[list[int], list[int]]], limits: _Limits) -> bool:
    """Whether the rows of an example are kept: they are short enough, or some of each completion
    is left of them.
    """
    max_length, overlong, _, side = limits
    longest = max(len(ids) for ids, _ in tokens)
    if longest > max_length and overlong == "error":
        how = "raise max_length, shorten the row, or set overlong to truncate or drop"
        raise row.broken(
            f"the row has {longest:,} tokens, more than max_length={max_length:,}", how=how
        )
    start = min(_start(learnt) for _, learnt in tokens)
    return longest <= max_length or (overlong != "drop" and (side == "left" or start < max_length))


GOOD = 1
SECOND = 2
"""What rows of examples are marked with: desirable; the second of two examples that a pair was
made of.
"""

Side: TypeAlias = tuple[Value, Value]
"""A prompt and a completion."""

Examples: TypeAlias = list[tuple[list[Value], bool]] | None
"""Of a row, each with its label: the prompt, and the prompt with each completion. None: the row
is left out.
"""


def _examples(row: Row, forms: Forms, *, labelled: bool) -> Iterator[tuple[list[Side], bool]]:
    """Yield the examples of a row: their sides, chosen first, and the label."""
    present = {name for name, value in row.values.items() if value is not None}
    if present.issuperset(("chosen", "rejected")):
        prompt, chosen, rejected = _pair(row, forms)
        if labelled:
            yield from (([(prompt, chosen)], True), ([(prompt, rejected)], False))
        else:
            yield [(prompt, chosen), (prompt, rejected)], True
        return
    if labelled and present.issuperset(("prompt", "completion", "label")):
        prompt = _value(row, "prompt", forms, may_be_empty=True)
        completion = _value(row, "completion", forms)
        _check_alike(row, prompt, completion)
        label = row.values["label"]
        if label not in (True, False, 0, 1, "true", "false", "True", "False"):
            raise row.broken(f"'label' should be true or false, not {label!r}")
        yield [(prompt, completion)], str(label).lower() in ("true", "1")
        return
    expected = "chosen + rejected, with or without prompt"
    expected += "; or prompt + completion + label" if labelled else ""
    columns = ", ".join(sorted(map(str, present))) or "none"
    how = f"name the columns {expected}"
    if not labelled and present.issuperset(("completion", "label")):
        how += "; or set objective: kto for rows with a label"
    raise row.broken(f"the columns do not form a preference example (found: {columns})", how=how)


def _pair(row: Row, forms: Forms) -> tuple[Value, Value, Value]:
    chosen = _value(row, "chosen", forms)
    rejected = _value(row, "rejected", forms)
    _check_alike(row, chosen, rejected)
    if chosen == rejected:
        raise row.broken(
            "'chosen' and 'rejected' are equal", how="remove the row, because it has no preference"
        )
    if row.values.get("prompt") is not None:
        prompt = _value(row, "prompt", forms, may_be_empty=True)
        _check_alike(row, prompt, chosen)
        return prompt, chosen, rejected
    end = min(num_alike(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
    if isinstance(chosen, str) and end > 0 and chosen[end - 1] == " ":
        end -= 1  # because tokens of words begin with the space before them
    if not isinstance(chosen, str) and end == 0:
        raise row.broken(
            "'chosen' and 'rejected' begin differently, so they have no prompt",
            how="give a 'prompt'",
        )
    return chosen[:end], chosen[end:], rejected[end:]


def _check_alike(row: Row, first: Value, second: Value) -> None:
    if isinstance(first, str) != isinstance(second, str):
        how = "write all as text, or all as lists of messages"
        raise row.broken("only some parts of the example are text", how=how)


def _value(row: Row, column: str, forms: Forms, *, may_be_empty: bool = False) -> Value:
    """Return a column that holds text or messages, checked as those of other rows are; one message
    alone is a list of it."""
    value: Any = row.values[column]
    if not isinstance(value, str):
        value = [value] if isinstance(value, Mapping) else value
        return read_messages(
            Row({column: value}, row.source, row.line), column, forms.fields, forms.roles
        ).messages
    if not (may_be_empty and not value):
        parse(Row({"text": value}, row.source, row.line), ("text",), chat_template=False)
    return str(value)


def _read(
    rows: Iterable[Row], reader: Reader, images: MediaReading | None, *, labelled: bool
) -> Iterator[tuple[Row, Examples, Ahead, tuple[Picture, ...]]]:
    """Yield each row with its examples, what templates have written for them, and its pictures, of
    several rows at once, because that is faster. What is wrong with a row is raised after those
    before it are yielded."""
    tokenizer, date = reader.tokenizer, reader.forms.template_date
    assert tokenizer is not None, "examples are never token ids"
    renamed = map(reader.forms.renamed, rows)
    for batch in _batches(renamed, reader.forms, images, labelled=labelled):
        asked = []
        for row, examples, _ in batch:
            for prompt, *wholes in (values for values, _ in examples or ()):
                if isinstance(prompt, list):
                    with suppress(DataError):  # which is raised when it is rendered alone
                        template = open_template(
                            tokenizer, read_tools(row), row, date, messages=prompt
                        )
                        asked.append((template, prompt, True))
                        asked += [
                            (template, conversation, False)
                            for conversation in wholes
                            if isinstance(conversation, list)
                        ]
        ahead = render_ahead(asked)
        yield from ((row, examples, ahead, pictures) for row, examples, pictures in batch)


def _batches(
    rows: Iterable[Row], forms: Forms, images: MediaReading | None, *, labelled: bool
) -> Iterator[list[tuple[Row, Examples, tuple[Picture, ...]]]]:
    batch = list[tuple[Row, Examples, tuple[Picture, ...]]]()
    size = 0
    try:
        for row in rows:
            examples = None if left_out(row) else list(_values(row, forms, labelled=labelled))
            pictures: tuple[Picture, ...] = ()
            if examples:
                examples, pictures = _with_images(row, examples, forms, images)
            batch.append((row, examples, pictures))
            size += sum(len(str(value)) for value in row.values.values())
            if len(batch) == BATCH or size > BATCH_CHARACTERS:
                yield batch
                batch = []
                size = 0
    except DataError:
        yield batch
        raise
    yield batch


def _values(row: Row, forms: Forms, *, labelled: bool) -> Iterator[tuple[list[Value], bool]]:
    for sides, label in _examples(row, forms, labelled=labelled):
        if isinstance(sides[0][0], list):
            prompt = with_system(row, Chat(sides[0][0]), forms).messages
            sides = [(prompt, completion) for _, completion in sides]
        yield [sides[0][0], *(prompt + completion for prompt, completion in sides)], label  # type: ignore[operator] # two texts, or two lists


def _with_images(
    row: Row, examples: list[tuple[list[Value], bool]], forms: Forms, images: MediaReading | None
) -> tuple[list[tuple[list[Value], bool]], tuple[Picture, ...]]:
    """Return the examples of a row with its images in their prompts, and the images. `DataError`:
    images stand elsewhere, or the model is opened for text alone."""
    prompt = examples[0][0][0]
    if images is None:
        if any(
            not isinstance(value, str) and has_pictures(value)
            for values, _ in examples
            for value in values
        ):
            what = "'content' holds something other than text"
            raise row.broken(what, how="set modalities: all for a model that sees images")
        if not isinstance(prompt, str):
            check_without_images(row, Chat(prompt))
        return examples, ()
    if isinstance(prompt, str):
        if media_column(row) is not None:
            what = "the row has images, and only chats have places for them"
            raise row.broken(what, how="write the row as messages")
        return examples, ()
    for (_, *conversations), _ in examples:
        if any(
            not isinstance(messages, str) and has_pictures(messages[len(prompt) :])
            for messages in conversations
        ):
            what = "a completion holds an image, and images belong to prompts"
            raise row.broken(what, how="move the image to the prompt")
    chat = with_column(row, Chat(prompt, pictures=_pictures(row, forms)))
    changed: list[tuple[list[Value], bool]] = [
        (
            [
                chat.messages,
                *(chat.messages + messages[len(prompt) :] for messages in conversations),  # type: ignore[operator] # lists, as the prompt
            ],
            label,
        )
        for (_, *conversations), label in examples
    ]
    return changed, chat.pictures


def _pictures(row: Row, forms: Forms) -> tuple[Picture, ...]:
    """Return the images that the messages of a row name, of its prompt."""
    column = next(name for name in ("prompt", "chosen", "completion") if row.values.get(name))
    value = row.values[column]
    values = [value] if isinstance(value, Mapping) else value
    inner = Row({column: values}, row.source, row.line)
    return read_messages(inner, column, forms.fields, forms.roles).pictures


class _Encoding(NamedTuple):
    """How the values of a row become tokens."""

    tokenizer: PreTrainedTokenizerBase
    row: Row
    date: str | None
    ahead: Ahead
    reading: MediaReading | None = None  # None: rows have no images
    pictures: DecodedRow | None = None  # those of the row; None: it has none

    def image_ids_of(self, value: Value, *, is_prompt: bool) -> tuple[list[int], MediaRecord]:
        """Return the tokens of messages with images, and the record of these."""
        assert self.reading is not None, "rows with images are refused where none are read"
        assert self.pictures is not None, "the row has images"
        assert not isinstance(value, str), "only chats have images"
        row = self.row
        template = open_template(
            self.tokenizer, read_tools(row), row, self.date, self.ahead, messages=value
        )
        text = template.render(value, row, prompt=is_prompt)
        expanded, record = self.reading.expanded(text, (), self.pictures, row)
        return expanded.ids.tolist(), record

    def ids_of(self, value: Value, *, is_prompt: bool = False) -> list[int]:
        """Return the tokens of a prompt, or of a prompt with a completion, which ends in the
        token of an end.
        """
        tokenizer = self.tokenizer
        row = self.row
        if not isinstance(value, str):
            template = open_template(tokenizer, read_tools(row), row, self.date, self.ahead)
            return encoded(
                tokenizer, template.render(value, row, prompt=is_prompt), row, has_special=True
            )
        end = tokenizer.eos_token
        if end is None:
            what = (
                "the tokenizer has no end-of-sequence token, so the model cannot learn where a "
                "text ends"
            )
            raise DataError(
                what, where="tokenizer", how="set eos_token in its tokenizer_config.json"
            )
        if is_prompt:
            return encoded(tokenizer, value, row, has_special=False)
        ids = encoded(
            tokenizer, value if value.endswith(end) else value + end, row, has_special=False
        )
        while len(ids) > 1 and ids[-2] == ids[-1] == tokenizer.eos_token_id:
            ids.pop()  # because the data, or the tokenizer, may write it too
        return ids


def _tokenized(
    values: Sequence[Value], encoding: _Encoding, vocab_size: int | None
) -> tuple[list[tuple[list[int], list[int]]], MediaRecord | None]:
    """Return the tokens of each side, and labels that are -100 in the prompt, which is as long
    on all sides; and the record of the prompt's images, if it has some.
    """
    record = None
    if encoding.pictures is None:
        before = encoding.ids_of(values[0], is_prompt=True)
        wholes = [encoding.ids_of(value) for value in values[1:]]
    else:
        before, record = encoding.image_ids_of(values[0], is_prompt=True)
        wholes = [encoding.image_ids_of(value, is_prompt=False)[0] for value in values[1:]]
        if any(ids[: record.end] != before[: record.end] for ids in wholes):
            what = "the chat template writes the images of the prompt otherwise with an answer"
            raise encoding.row.broken(what, how="use the chat template of the model's processor")
    start = min(num_alike(before, ids) for ids in wholes)
    for ids in wholes:
        if len(ids) <= max(start, 1):
            raise encoding.row.broken(
                "a completion has no token to train on", how="remove the row, or fill it"
            )
        check_ids(encoding.row, {"input_ids": ids}, vocab_size)
        if encoding.reading is not None and record is None:
            encoding.reading.check_tokens(encoding.row, ids)
    return [(ids, [IGNORED] * start + ids[start:]) for ids in wholes], record


def _start(labels: Sequence[int]) -> int:
    return next(at for at, label in enumerate(labels) if label != IGNORED)
