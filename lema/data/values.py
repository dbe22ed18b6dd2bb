"""The values of a row by type, each of which is checked or refused with the place where it stands."""

import json
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from lema.data.files import Row

__all__ = ["flag_of", "list_of", "num_alike", "text_of"]

_YES_OR_NO = {True: True, False: False, "true": True, "false": False, "1": True, "0": False}


def list_of(row: Row, column: str) -> list[Any]:
    """A list; or one written as JSON in a string, which is the only way a .csv can hold one."""
    value = row.values[column]
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise row.broken(f"'{column}' should be a list, and the text there is not JSON: {error}") from error
    elif hasattr(value, "tolist"):  # arrays and tensors, in rows from memory
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        raise row.broken(f"'{column}' should be a list, not {type(value).__name__}")
    if not value:
        raise row.broken(f"'{column}' is empty", how="remove the row, or fill it")
    return list(value)


def text_of(row: Row, value: Any, name: str, at: str = "") -> str:
    """A text that any tokenizer takes."""
    if not isinstance(value, str):
        raise row.broken(f"{name} should be text, not {type(value).__name__}", at=at)
    if "\0" in value:
        raise row.broken(f"{name} holds a NUL character", at=at, how="remove it; the text is probably damaged")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            what = f"{name} holds half a surrogate pair, which is no character"
            how = "the text was cut inside a character; repair or remove the row"
            raise row.broken(what, at=at, how=how) from error
    return value


def flag_of(row: Row, value: Any, name: str, at: str = "") -> bool:
    """Whether to train, as `train: false` or `weight: 0` say; a weight between the two is refused."""
    known = value.lower() if isinstance(value, str) else value
    if not isinstance(known, (bool, int, float, str)) or known not in _YES_OR_NO:
        what = f"{name} says what to train on and should be true or false, 1 or 0, not {value!r}"
        raise row.broken(what, at=at, how="answers have no weights in between; or rename it, if it means another thing")
    return _YES_OR_NO[known]


def num_alike(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many items two sequences begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
