"""The tokens that end what is trained on, as rows of tokens show them: a model that has learnt
them ends there, too.
"""

from typing import TYPE_CHECKING

from lema.data.forms import IGNORED, Rows
from lema.data.templates.named import end_token

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["stop_tokens_of"]

SAMPLED = 1000  # rows that are looked at, at even distances; rows of one data set end alike
BLANKS = 8  # tokens, at most, that a template writes after the end of the last turn


def stop_tokens_of(rows: Rows, tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    """Return the special tokens in which the rows end, the most frequent first.

    A row counts if its last trained tokens are the last but for blanks, which templates write
    between turns. One that was cut to the longest length does not. Only the last end of a row
    counts, because an answer in the middle of a chat may end in a token that elsewhere stands
    within an answer, as between the channels of gpt-oss."""
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
