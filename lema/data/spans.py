"""Which tokens of a text lie in given stretches of its characters."""

from itertools import takewhile
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Span", "tokenize_spans"]

Span: TypeAlias = tuple[int, int]
"""First character and the one after the last."""


def tokenize_spans(
    text: str, spans: list[Span], tokenizer: "PreTrainedTokenizerBase", *, add_special_tokens: bool
) -> tuple[list[int], list[bool]]:
    """The token ids of the text, and for each whether it lies in one of the spans.

    The text is tokenised as a whole, as the model will meet it. A token across the start of a span lies in it (it
    holds the first characters to learn); one across the end does not (it holds characters which come later).
    """
    if not tokenizer.is_fast:
        return _by_prefixes(text, spans, tokenizer, add_special_tokens)
    encoded = tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=True, verbose=False)
    inside = [any(start < end <= stop for start, stop in spans) for _, end in encoded["offset_mapping"]]
    return list(encoded["input_ids"]), inside


def _by_prefixes(
    text: str, spans: list[Span], tokenizer: "PreTrainedTokenizerBase", add_special_tokens: bool
) -> tuple[list[int], list[bool]]:
    """Tokenizers written in Python do not know characters: compare with the tokens of the text up to each border."""

    def encode(part: str) -> list[int]:
        return list(tokenizer(part, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])

    ids = encode(text)
    inside = [False] * len(ids)
    for start, stop in spans:
        first = _common(ids, encode(text[:start]))
        last = len(ids) if stop == len(text) else _common(ids, encode(text[:stop]))
        inside[first:last] = [True] * (last - first)
    return ids, inside


def _common(ids: list[int], other: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, other, strict=False)))
