"""Chats have the token ids that torchtune's tokenizers give them, and train on the same ones.

`tokens.json` was made by torchtune's own code at bd2a0fc (0.7.0): `tokenize_messages` of its
tokenizers, after `mask_messages(messages, "train_on_assistant")`, with `encode` of the small
tokenizer in tests/importing/llamafactory/tokenizer.json. `trained` has the stretches that are not
masked. Tokens at the end of a row that are masked are left out here, because nothing is computed
from them.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from support.tokenized import tokenized
from transformers import PreTrainedTokenizerFast

from lema.data import Forms, Row
from lema.data.columns import detect
from lema.data.tokenize import Reading
from lema_tools.importing.torchtune.templates import FAMILIES, chat_template

HERE = Path(__file__).parent
TOKENIZER = HERE.parent / "llamafactory" / "tokenizer.json"
CASES: list[dict[str, Any]] = json.loads((HERE / "tokens.json").read_text(encoding="utf-8"))
CHATS = {
    "single": [("user", "How cold is the lake?"), ("assistant", "Four degrees.")],
    "system": [
        ("system", "You are brief."),
        ("user", "Why do boats float?"),
        ("assistant", "Because water carries them."),
    ],
    "turns": [
        ("user", "hello"),
        ("assistant", "hello there"),
        ("user", "Is the lake cold?\nAnswer."),
        ("assistant", "It is cold in winter."),
    ],
    "thought": [
        ("user", "Is it cold?"),
        ("assistant", "<think>\nIt is winter.\n</think>\n\nYes."),
        ("user", "How cold?"),
        ("assistant", "<think>\nBelow ten.\n</think>\n\nFour."),
    ],
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['tokenizer']}-{case['chat']}")
def test_chats_have_the_tokens_and_targets_of_the_tokenizer(case: dict[str, Any]) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(TOKENIZER), bos_token="<s>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|endoftext|>"]})
    tokenizer.eos_token = "<|im_end|>" if "qwen" in case["tokenizer"] else "<|eot_id|>"
    tokenizer.chat_template = chat_template(FAMILIES[case["tokenizer"]])
    messages = [{"role": role, "content": text} for role, text in CHATS[case["chat"]]]
    row = Row({"messages": messages}, "chats", 1)
    ids, labels = tokenized(row, detect(row), Reading(tokenizer, Forms()))
    last = case["trained"][-1][1]
    assert [int(token) for token in ids] == case["ids"][:last]
    trained = {place for start, end in case["trained"] for place in range(start, end)}
    assert {place for place, label in enumerate(labels) if label != -100} == trained


@pytest.mark.parametrize("name", FAMILIES)
def test_templates_of_every_family_render_a_chat(name: str) -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(TOKENIZER), bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = chat_template(FAMILIES[name])
    messages = [{"role": role, "content": text} for role, text in CHATS["turns"]]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert "hello there" in text
    assert tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
