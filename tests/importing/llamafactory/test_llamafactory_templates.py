"""Chats have the token ids and targets that LLaMA-Factory gives them, template by template.

`tokens.json` was made by LLaMA-Factory's own code at ff6d4d1 (0.9.6.dev0, 18 August 2026), with the
small tokenizer of `tokenizer.json`: for each template and chat
`SupervisedDatasetProcessor._encode_data_example` of src/llamafactory/data/processor/supervised.py
after `Template.fix_special_tokens`, with `cutoff_len` 4096 and the options named (of reasoning
templates `enable_thinking`, which it keeps as an attribute). `trained` has the stretches whose
label is not -100; `other_targets` the places in them whose label is not their token.
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
from lema_tools.importing.llamafactory.templates import Format, chat_template, formats

HERE = Path(__file__).parent
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
CASES: list[dict[str, Any]] = json.loads((HERE / "tokens.json").read_text(encoding="utf-8"))


def rendered(case: dict[str, Any]) -> tuple[list[int], list[list[int]]]:
    """The token ids that LEMA gives a chat, and the stretches that are trained on."""
    options = case["options"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(HERE / "tokenizer.json"), bos_token="<s>", eos_token=case["eos"]
    )
    tokenizer.chat_template = chat_template(
        Format.named(case["template"]),
        default_system=options.get("default_system"),
        thinks=options.get("enable_thinking", True),
        last_thought_only=options.get("mask_history", False),
    )
    kind = "last" if options.get("mask_history") else "assistant"
    forms = Forms(train_on="all" if options.get("train_on_prompt") else kind)
    messages = [{"role": role, "content": text} for role, text in CHATS[case["chat"]]]
    row = Row({"messages": messages}, "chats", 1)
    ids, labels = tokenized(row, detect(row), Reading(tokenizer, forms))
    spans = list[list[int]]()
    for place, label in enumerate(labels):
        if label == -100:
            continue
        if spans and spans[-1][1] == place:
            spans[-1][1] += 1
        else:
            spans.append([place, place + 1])
    return [int(token) for token in ids], spans


def check(case: dict[str, Any]) -> None:
    """Compare a chat with what LLaMA-Factory makes of it."""
    form = Format.named(case["template"])
    ids, spans = rendered(case)
    assert ids == case["ids"]
    if form.efficient_eos and case["chat"] in ("turns", "thought"):
        assert "other_targets" in case or case["options"].get("mask_history")
        assert spans[-1] == case["trained"][-1]
    else:
        assert "other_targets" not in case
        assert spans == case["trained"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['template']}-{case['chat']}")
def test_chats_have_the_tokens_and_targets_of_the_template(case: dict[str, Any]) -> None:
    check(case)


def test_expectations_cover_thirty_templates() -> None:
    assert len({case["template"] for case in CASES}) >= 30
    assert {case["template"] for case in CASES} <= formats().keys()


def test_a_template_refuses_tools_rather_than_leave_them_out() -> None:
    text = chat_template(Format.named("qwen3"))
    assert "raise_exception('this chat template shows no tools')" in text
    assert "raise_exception('this chat template shows no tool calls')" in text
