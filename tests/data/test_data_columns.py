"""Columns say what a row is; a value of the wrong type is named with its file, line and place."""

import json

import pytest

from lema.data import Row
from lema.data.chat.messages import Chat
from lema.data.columns import Text, Tokens, detect, parse
from lema.errors import DataError

USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "hello"}


def example(values, chat_template=True):
    row = Row(values, "data.jsonl", 7)
    return parse(row, detect(row), chat_template=chat_template)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"text": "a"}, Text("", "a")),
        ({"text": "a", "id": 3, "messages": None}, Text("", "a")),
        ({"prompt": "q ", "completion": "a", "text": "both"}, Text("q ", "a")),
        ({"prompt": "", "completion": "a"}, Text("", "a")),
        ({"prompt": [USER], "completion": [ASSISTANT]}, Chat([USER, ASSISTANT], None, 1)),
        ({"messages": [USER, ASSISTANT]}, Chat([USER, ASSISTANT])),
        ({"messages": json.dumps([USER, ASSISTANT])}, Chat([USER, ASSISTANT])),
        (
            {"messages": [USER, ASSISTANT], "tools": '[{"name": "f"}]'},
            Chat([USER, ASSISTANT], [{"name": "f"}]),
        ),
        ({"conversations": [USER, ASSISTANT]}, Chat([USER, ASSISTANT])),
        (
            {
                "conversations": [
                    {"from": "human", "value": "hi"},
                    {"from": "gpt", "value": "hello"},
                ],
                "system": "Be.",
            },
            Chat([{"role": "system", "content": "Be."}, USER, ASSISTANT]),
        ),
        ({"instruction": "hi", "input": "", "output": "hello"}, Chat([USER, ASSISTANT])),
        (
            {"instruction": "a", "input": "b", "output": "c"},
            Chat([USER | {"content": "a\n\nb"}, ASSISTANT | {"content": "c"}]),
        ),
        ({"input_ids": [1, 2]}, Tokens([1, 2], [1, 2])),
        ({"input_ids": "[1, 2]", "labels": "[-100, 2]"}, Tokens([1, 2], [-100, 2])),
        (
            {"input_ids": [5, 1, 2, 0], "labels": [5, 9, 2, 0], "attention_mask": [0, 1, 1, 0]},
            Tokens([1, 2], [9, 2]),
        ),
    ],
)
def test_columns_decide(values, expected):
    assert example(values) == expected


def test_instructions_without_a_template_use_alpacas_words():
    text = example(
        {"instruction": "Add {1}", "input": "2 and 3", "output": "5"}, chat_template=False
    )
    assert text.completion == "5"
    assert text.prompt.endswith(
        "### Instruction:\nAdd {1}\n\n### Input:\n2 and 3\n\n### Response:\n"
    )
    assert "Input" not in example({"instruction": "a", "output": "b"}, chat_template=False).prompt


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"body": "a"}, "found: body"),
        ({"text": None}, "found: none"),
        ({"prompt": "a"}, "found: prompt"),
        ({"text": 3}, "should be text, not int"),
        ({"text": ["a"]}, "should be text, not list"),
        ({"text": "  \n"}, "'text' is empty"),
        ({"text": "a\0b"}, "NUL character"),
        ({"text": "a\ud800"}, "surrogate"),
        ({"prompt": "a", "completion": ""}, "'completion' is empty"),
        ({"prompt": "a", "completion": [ASSISTANT]}, "one of 'prompt' and 'completion' is text"),
        ({"prompt": [USER], "completion": [USER]}, "should begin with an assistant message"),
        ({"instruction": "a", "output": "b", "input": 5}, "'input' should be text, not int"),
        ({"messages": []}, "'messages' is empty"),
        ({"messages": "hello"}, "not JSON"),
        ({"messages": {"role": "user"}}, "should be a list, not dict"),
        ({"messages": ["hello"]}, "message 1"),
        ({"messages": [USER, {"content": "x"}]}, "messages, message 2"),
        ({"messages": [USER, {"role": None, "content": "x"}]}, "no 'role'"),
        ({"messages": [USER, {"role": "assistant"}]}, "no 'content'"),
        ({"messages": [{"role": 1, "content": "x"}]}, "'role' should be text, not int"),
        ({"messages": [{"role": "user", "content": 1}]}, "'content' should be text, not int"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "other than text"),
        ({"conversations": [{"from": "human"}]}, "lacks 'from' or 'value'"),
        ({"conversations": [{"from": "narrator", "value": "x"}]}, "'narrator' is not known"),
        ({"conversations": [{"from": "human", "value": 2}]}, "'value' should be text, not int"),
        ({"input_ids": []}, "'input_ids' is empty"),
        ({"input_ids": "1 2 3"}, "not JSON"),
        ({"input_ids": [1, 2.0]}, "position 1"),
        ({"input_ids": [1, True]}, "whole numbers, not True"),
        ({"input_ids": [[1, 2]]}, "whole numbers"),
        ({"input_ids": [1, 2], "labels": [1]}, "2 input_ids but 1 labels"),
        (
            {"input_ids": [1, 2], "labels": [1, None]},
            "'labels' should hold whole numbers, not None",
        ),
        ({"input_ids": [1, 2], "attention_mask": [1]}, "attention_mask of 1"),
    ],
)
def test_wrong_values_are_named(values, message):
    with pytest.raises(DataError) as caught:
        example(values)
    assert caught.value.where.startswith("data.jsonl:7")
    assert message in str(caught.value)
