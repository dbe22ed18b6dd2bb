"""Prompts and answers that are tokenised each for itself end in one token, also where they are
empty or the tokenizer has no such token.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from lema.data.columns import Text
from lema.data.forms import IGNORED
from lema.data.tokenize import _separated


def reading(ids: dict[str, list[int]], eos: int | None) -> Any:
    """What `_separated` looks at, with a tokenizer of a few texts."""

    class Tokenizer:
        eos_token_id = eos
        bos_token_id = 1

        def __call__(self, text: str, *, verbose: bool) -> dict[str, list[int]]:
            return {"input_ids": ids[text]}

    return SimpleNamespace(tokenizer=Tokenizer(), forms=SimpleNamespace(train_on="assistant"))


@pytest.mark.parametrize(
    ("answer", "eos", "expected"),
    [([5], 2, [5, 2]), ([1, 5, 2], 2, [5, 2]), ([], 2, [2]), ([1], 2, [2]), ([5], None, [5])],
)
def test_an_answer_ends_once(answer: list[int], eos: int | None, expected: list[int]) -> None:
    tokens = _separated(Text("p", "a", True), reading({"p": [1, 7], "a": answer}, eos))
    assert tokens.ids == [1, 7, *expected]
    assert tokens.labels == [IGNORED, IGNORED, *expected]
