"""Prompts: rows of text or of messages, from a file or from standard input, each as the token
ids it begins with.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lema.config import LemaConfig
from lema.data.chat.messages import Chat, read_messages
from lema.data.chat.pictures import PARTS
from lema.data.chat.template import in_forms, open_template
from lema.data.chat.tokens import check_roles, encoded
from lema.data.columns import alpaca_prompt, media_column
from lema.data.files import Row
from lema.data.forms import check_ids, num_positions, text_of
from lema.data.media.reading import MediaReading, with_column
from lema.data.media.rows import RowMedia
from lema.data.row_forms import PromptForm
from lema.data.sets.sources import load_rows
from lema.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

__all__ = ["Prompt", "fitting", "has_images", "is_chat_with_images", "prompt_ids", "prompt_of"]
__all__ += ["read_prompts", "written"]

STDIN = "standard input"
RESULTS = frozenset(
    {
        *("index", "completion", "finish_reason", "prompt_tokens", "completion_tokens"),
        *("base_completion", "base_finish_reason"),
    }
)


def read_prompts(path: Path) -> list[Row]:
    """Return the rows of a file, or of standard input where the path is `-`: its lines, or the JSON
    object on each. `DataError`: there are none, or one is malformed; names file and line."""
    if str(path) != "-":
        return load_rows(path)
    rows = [Row(values, STDIN, number) for number, values in _piped(sys.stdin.read())]
    if not rows:
        raise DataError("there are no prompts", where=STDIN, how="write one on each line")
    return rows


def _piped(text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    objects = bool(lines) and lines[0][1].lstrip().startswith("{")
    for number, line in lines:
        if not objects:
            yield number, {"prompt": line.rstrip("\r")}
            continue
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"no JSON: {error.msg}", where=f"{STDIN}:{number}", how="one object per line"
            ) from error
        if not isinstance(values, dict):
            raise DataError(
                "a row should be a JSON object", where=f"{STDIN}:{number}", how='{"prompt": "..."}'
            )
        yield number, values


def written(row: Row) -> dict[str, Any]:
    """Return the columns of a row that results show, less those that results have; a line of
    text is its `prompt`.
    """
    values = {name: value for name, value in row.values.items() if name not in RESULTS}
    return {"prompt": values["text"]} if list(values) == ["text"] else values


def prompt_ids(
    row: Row, tokenizer: PreTrainedTokenizerBase, *, form: PromptForm = "text"
) -> list[int]:
    """Return the token ids that a row's text begins with. A row has `messages`, or a `prompt` that
    is text or messages. Messages, and as a "chat" text, which is the user's, go through the
    tokenizer's template as far as the assistant's turn. As "alpaca" a text is the instruction in
    Alpaca's words, and as "text" it is continued as it is. `DataError`: the row has neither, it is
    malformed, or the template does not take it."""
    return prompt_of(row, tokenizer, form=form).ids


class Prompt(NamedTuple):
    """A row as what a model continues."""

    ids: list[int]
    images: RowMedia | None = None  # of the row; None: it has none


def prompt_of(
    row: Row,
    tokenizer: PreTrainedTokenizerBase,
    *,
    form: PromptForm = "text",
    reading: MediaReading | None = None,
) -> Prompt:
    """Return the tokens that a row's text begins with, as `prompt_ids` describes, and its images.

    Args:
        row: has `images` as rows of training have them, or parts for them in its messages.
        tokenizer: has the chat template.
        form: how a text is written; one with images is a chat.
        reading: reads images; None: a row with images is refused.

    Raises:
        DataError: as `prompt_ids`, an image cannot be used, or the model is open for text alone.
    """
    values = written(row)
    column = next((name for name in ("messages", "prompt") if values.get(name) is not None), None)
    if column is None:
        how = 'write {"prompt": "..."} or {"messages": [...]}, or lines of text in a .txt file'
        raise row.broken(f"the row has no prompt: its columns are {', '.join(values)}", how=how)
    if isinstance(prompt := values[column], str):
        text = text_of(row, prompt, f"'{column}'")
        if not text.strip():
            raise row.broken(f"'{column}' is empty", how="remove the row, or fill it")
        if form != "chat" and not has_images(row):
            written_text = alpaca_prompt(text) if form == "alpaca" else text
            ids = encoded(tokenizer, written_text, row, has_special=False)
            if reading is not None:
                reading.check_tokens(row, ids)
            return Prompt(ids)
        prompt = [{"role": "user", "content": text}]
    row = Row({**values, column: prompt}, row.source, row.line)
    conversation = read_messages(row, column, {})
    if reading is not None:
        conversation = with_column(row, conversation)
    elif has_images(row):
        how = "use --set modalities=all for a model that sees images, or remove them"
        raise row.broken("the row has images, and the model was opened for text alone", how=how)
    return _rendered(row, conversation, tokenizer, reading)


def _rendered(
    row: Row,
    conversation: Chat,
    tokenizer: PreTrainedTokenizerBase,
    reading: MediaReading | None,
) -> Prompt:
    """Return a conversation as far as the assistant's turn."""
    if conversation.messages[-1]["role"] == "assistant":
        how = "end with the user's message; remove the answer from a chat that has one"
        raise row.broken(
            "the last message is the assistant's, so there is nothing to answer", how=how
        )
    template = open_template(tokenizer, conversation.tools, row, messages=conversation.messages)
    check_roles(conversation, template, row)
    rendered = next(
        in_forms(
            conversation.messages, lambda messages: template.render(messages, row, prompt=True)
        )
    )
    if reading is None or not conversation.pictures:
        ids = encoded(tokenizer, rendered, row, has_special=True)
        if reading is not None:
            reading.check_tokens(row, ids)
        return Prompt(ids)
    pictures = reading.pictures(row, conversation.pictures)
    expanded, record = reading.expanded(rendered, [], pictures, row)
    return Prompt(expanded.ids.tolist(), reading.rows(record))


def has_images(row: Row) -> bool:
    """Whether a row names images, in a column of its own or in its messages."""
    if media_column(row) is not None:
        return True
    contents = [
        message.get("content")
        for messages in _chats(row)
        for message in messages
        if isinstance(message, Mapping)
    ]
    return any(
        isinstance(part, Mapping) and part.get("type") in PARTS
        for content in contents
        if isinstance(content, list | tuple)
        for part in content
    )


def is_chat_with_images(row: Row) -> bool:
    """Whether a row of training or evaluation is a chat with images."""
    return bool(_chats(row)) and has_images(row)


def _chats(row: Row) -> list[Sequence[Any]]:
    """Return the lists of messages of a row."""
    columns = ("messages", "conversations", "prompt", "chosen")
    values = [row.values.get(name) for name in columns]
    return [value for value in values if isinstance(value, list | tuple)]


def fitting(
    rows: Sequence[Row],
    prompts: Sequence[Sequence[int]],
    new: int,
    model: PreTrainedConfig,
    settings: LemaConfig | None = None,
) -> None:
    """Refuse prompts with no tokens, with tokens that the model has no row of embeddings for, or
    with more than it has positions for, as the config of its text part says, `model`, and the
    `settings`. `DataError`: it names the first."""
    positions = num_positions(model, settings)
    for row, prompt in zip(rows, prompts, strict=True):
        if not prompt:
            raise row.broken(
                "the prompt has no tokens", how="give a prompt of at least one character"
            )
        check_ids(row, {"the prompt": prompt}, getattr(model, "vocab_size", None))
        if positions is not None and len(prompt) + new > positions:
            what = (
                f"{len(prompt):,} tokens and {new:,} new ones are more than the {positions:,} "
                "that the model takes"
            )
            raise row.broken(what, how="shorten the prompt, or request fewer new tokens")
