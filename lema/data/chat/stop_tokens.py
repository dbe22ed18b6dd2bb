"""The tokens that end what is trained on, as rows of tokens show them: a model that has learnt
them ends there, too.
"""

from contextlib import suppress
from typing import TYPE_CHECKING

from lema.data.chat.template import in_forms, open_template
from lema.data.chat.tokens import encoded
from lema.data.files import Row
from lema.data.forms import IGNORED, Rows
from lema.data.templates.named import end_token
from lema.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["answer_stop_tokens", "stop_tokens_of"]

SAMPLED = 1000  # rows that are looked at, at even distances; rows of one data set end alike
BLANKS = 8  # tokens, at most, that a template writes after the end of the last turn


def stop_tokens_of(rows: Rows, tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    """Return the special tokens in which the rows end, the most frequent first.

    A row counts if its last trained tokens are the last but for blanks, which templates write
    between turns. One that was cut to the longest length does not. Only the last end of a row
    counts, because an answer in the middle of a chat may end in a token that elsewhere stands
    within an answer, as between channels of one answer."""
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= set(tokenizer.all_special_ids)
    _, end = end_token(tokenizer)
    special |= set() if end is None else {end}
    if tokenizer.bos_token_id != tokenizer.eos_token_id:
        special.discard(tokenizer.bos_token_id)
    counts = dict[int, int]()
    for index in range(0, len(rows), max(1, len(rows) // SAMPLED)):
        if getattr(rows, "is_cut", _never)(index):
            continue
        row = rows[index]
        ids, labels = (
            [int(token) for token in row[name][-BLANKS:]] for name in ("input_ids", "labels")
        )
        end = _end_of(ids, labels, special, tokenizer)
        if end is not None:
            counts[end] = counts.get(end, 0) + 1
    return tuple(sorted(counts, key=lambda end: -counts[end]))


def _never(_: int) -> bool:
    return False


def _end_of(
    ids: list[int], labels: list[int], special: set[int], tokenizer: "PreTrainedTokenizerBase"
) -> int | None:
    """Return the special token that ends a row and is trained; None: no such token does."""
    for token, label in zip(reversed(ids), reversed(labels), strict=True):
        if token in special:
            return token if label != IGNORED else None
        if str(tokenizer.decode([token])).strip():
            return None
    return None


def answer_stop_tokens(tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    """Return the special token in which the tokenizer's chat template ends an answer; none: it
    has no template, or one that ends answers in words."""
    if not tokenizer.chat_template:
        return ()
    row = Row({}, "the chat template", 1)
    answer = "0Aa0"  # which no template writes itself
    messages = [{"role": "user", "content": "."}, {"role": "assistant", "content": answer}]
    with suppress(DataError):  # a template may refuse such a chat; texts end elsewhere then
        template = open_template(tokenizer, None, row)
        rendered = next(in_forms(messages, lambda form: template.render(form, row)))
        ids = encoded(tokenizer, rendered.rpartition(answer)[2], row, has_special=True)
        special = {number for number, tok in tokenizer.added_tokens_decoder.items() if tok.special}
        special |= set(tokenizer.all_special_ids)
        return tuple(token for token in ids if token in special)[:1]
    return ()
