"""Tokenizers that put tokens before and after every text: each stands once, and no prompt is at
its end.
"""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedConfig, PreTrainedTokenizerFast, XLNetConfig

from lema.data import Row
from lema.data.preference import prepare_preferences
from lema.data.prompts import fitting, prompt_ids
from lema.engine.generation import checked, encoded
from lema.errors import DataError

BEFORE = "<s> $A"
AROUND = "<s> $A </s>"
PAIRS = [
    {"prompt": "w10", "chosen": " w20", "rejected": " w30"},
    {"prompt": "<s> w10", "chosen": " w20 </s>", "rejected": " w30 </s>"},
]


def tokenizer_adding(single: str) -> PreTrainedTokenizerFast:
    words = Tokenizer(
        models.WordLevel(
            {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{n}": n for n in range(3, 40)}},
            unk_token="<unk>",
        )
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special: Any = [("<s>", 1), ("</s>", 2)]
    pair = f"{single} {single.replace('$A', '$B')}"
    words.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=special
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.mark.parametrize("single", [BEFORE, AROUND])
@pytest.mark.parametrize("pair", PAIRS)
def test_texts_of_preferences_begin_and_end_once(single: str, pair: dict[str, str]) -> None:
    tokenizer = tokenizer_adding(single)
    ((chosen, rejected),) = prepare_preferences([pair], tokenizer, labelled=False, max_length=16)
    assert chosen == {"input_ids": [1, 10, 20, 2], "labels": [-100, -100, 20, 2]}
    assert rejected == {"input_ids": [1, 10, 30, 2], "labels": [-100, -100, 30, 2]}
    labelled = {"prompt": pair["prompt"], "completion": pair["chosen"], "label": True}
    ((only,),) = prepare_preferences([labelled], tokenizer, labelled=True, max_length=16)
    assert only == chosen


@pytest.mark.parametrize("single", [BEFORE, AROUND])
@pytest.mark.parametrize("text", ["w10 w11", "<s> w10 w11"])
def test_a_prompt_begins_once_and_goes_on(single: str, text: str) -> None:
    tokenizer = tokenizer_adding(single)
    assert prompt_ids(Row({"prompt": text}, "rows", 1), tokenizer) == [1, 10, 11]
    assert encoded(tokenizer, [text]) == [[1, 10, 11]]
    ended = f"{text} </s>"  # which a user may write, to have a second text begun
    assert encoded(tokenizer, [ended]) == [[1, 10, 11, 2]]


def test_a_prompt_with_a_token_that_the_model_has_no_row_for_is_named() -> None:
    model = PreTrainedConfig(vocab_size=12, max_position_embeddings=8)
    row = Row({"prompt": "w10 w13"}, "prompts.jsonl", 4)
    known = [1, 10, 11]
    unknown = [1, 10, 13]
    fitting([row], [known], 5, model)
    said = "the prompt holds 13, which is outside the vocabulary of 12 tokens"
    with pytest.raises(DataError, match=said) as caught:
        fitting([row], [unknown], 1, model)
    assert "prompts.jsonl:4" in str(caught.value.where) and "position 2" in str(caught.value.where)
    with pytest.raises(DataError, match=said):
        checked([known, unknown], 12)
    with pytest.raises(DataError, match="more than the 8 that the model takes"):
        fitting([row], [known], 6, model)
    fitting([row], [known], 6, PreTrainedConfig(vocab_size=12))
    fitting([row], [known], 6, XLNetConfig(vocab_size=12))  # whose -1 positions are any number
