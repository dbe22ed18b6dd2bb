"""One row as lists of token ids and labels, as data sets have it."""

from typing import Any

from lema.data import Row
from lema.data.columns import Kind
from lema.data.tokenize import Reading, tokenize_rows

__all__ = ["reworded", "tokenized"]


def tokenized(row: Row, kind: Kind, reading: Reading) -> tuple[list[int], list[int]]:
    """Token ids and labels of a row."""
    ((_, ids, labels),) = tokenize_rows([(row, kind)], reading)
    return ids.tolist(), labels.tolist()


def reworded(message: dict[str, Any]) -> dict[str, Any]:
    """A message with other and longer words, and tags and blanks as they were."""
    text = message.get("content")
    return (
        {**message, "content": text.replace("the", "a much longer").replace("i", "ï")}
        if text
        else message
    )
