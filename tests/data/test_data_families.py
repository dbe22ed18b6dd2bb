"""The chat templates of many model families: what is learnt is each answer's words and its end
token, whatever else the template does with messages, in chats with a system message or without,
with reasoning, and with tools."""

import json
from copy import deepcopy
from typing import Any

import pytest
from support.chatfamilies import FAMILIES, Family
from support.tokenized import reworded, tokenized

from lema.data import Row, prepare_data
from lema.data.columns import detect
from lema.data.forms import Forms
from lema.data.tokenize import Reading
from lema.errors import DataError

SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = [
    {"role": "user", "content": "What is the river?"},
    {"role": "user", "content": "And the mill?"},
]
ANSWERED = [
    {"role": "assistant", "content": "Long."},
    {"role": "assistant", "content": "Old, the mill is old."},
]
CHAT = [ASKED[0], ANSWERED[0], ASKED[1], ANSWERED[1]]
FUNCTION = {"name": "weather", "arguments": {"city": "Paris", "n": 3}}
CALL = {
    "role": "assistant",
    "tool_calls": [{"id": "abcdefghi", "type": "function", "function": FUNCTION}],
}
OUTPUT = {"role": "tool", "content": "sunny", "tool_call_id": "abcdefghi", "name": "weather"}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "d", "parameters": {"type": "object"}},
}
CALLING = {name: family for name, family in FAMILIES.items() if family.call is not None}


# Their generation prompt opens a thought, and they write an answer without one as if it did not.
OPENED = {"Nemotron", "DeepSeek V3", "DeepSeek R1", "MiniMax"}


@pytest.fixture
def tokenizer_of(make_tokenizer):
    """The tokenizer of a family."""

    def make(family: Family) -> Any:
        tokenizer = make_tokenizer(family.template)
        specials = [one for one in family.specials if one not in ("<s>", "</s>")]
        tokenizer.add_special_tokens({"additional_special_tokens": specials})
        return tokenizer

    return make


@pytest.fixture
def learnt(tokenizer_of):
    """What is learnt of a chat under a family's template, a text for each stretch; checks the
    tokens besides.
    """

    def learn(
        family: Family, messages: list[dict[str, Any]], tools: Any = None, **forms: Any
    ) -> list[str]:
        tokenizer = tokenizer_of(family)
        values = {"messages": messages, "tools": tools}
        row = Row(values, "data.jsonl", 3)
        as_given = deepcopy(values)
        reading = Reading(tokenizer, Forms(**forms))
        ids, labels = tokenized(row, detect(row), reading)
        # What is remembered of the template is right, for this chat and for others of its shape.
        assert tokenized(row, detect(row), reading) == (ids, labels)
        if all(isinstance(one.get("content") or "", str) for one in messages):
            other = Row(
                {**values, "messages": [reworded(one) for one in messages]}, "data.jsonl", 4
            )
            alone = tokenized(other, detect(other), Reading(tokenizer, Forms(**forms)))
            assert tokenized(other, detect(other), reading) == alone
        assert values == as_given
        if family.own and tools is None:
            assert ids == tokenizer.apply_chat_template(messages)["input_ids"]
        assert ids[:2] != [tokenizer.bos_token_id] * 2
        stretches: list[list[int]] = [[]]
        for token, label in zip(ids, labels, strict=True):
            stretches[-1:] = [[*stretches[-1], token]] if label != -100 else [stretches[-1], []]
        return [tokenizer.decode(stretch) for stretch in stretches if stretch]

    return learn


@pytest.mark.parametrize("name", FAMILIES)
def test_each_answer_is_learnt_with_its_end(name, learnt):
    family = FAMILIES[name]
    expected = [family.learnt("Long.", False), family.learnt("Old, the mill is old.", True)]
    assert learnt(family, CHAT) == expected
    assert learnt(family, CHAT[:2]) == [family.learnt("Long.", True)]
    if family.system:
        assert learnt(family, [SYSTEM, *CHAT]) == expected
    else:
        with pytest.raises(DataError, match="System role not supported"):
            learnt(family, [SYSTEM, *CHAT])


def in_parts(message: dict[str, Any], cut: int) -> dict[str, Any]:
    words = [one for one in (message["content"][:cut], message["content"][cut:]) if one]
    return {**message, "content": [{"type": "text", "text": one} for one in words]}


@pytest.mark.parametrize("name", FAMILIES)
def test_words_in_parts_are_learnt_as_they_are_in_one_and_as_they_are_generated(name, tokenizer_of):
    family = FAMILIES[name]
    tokenizer = tokenizer_of(family)
    for messages in (
        CHAT,
        CHAT[:2],
        [*CHAT[:3], ANSWERED[1] | {"reasoning_content": "Wheels turn."}],
    ):
        found = []
        for cut in (None, 0, 3):  # as one text, in one part, in two
            given = messages if cut is None else [in_parts(one, cut) for one in messages]
            row = Row({"messages": given}, "data.jsonl", 3)
            found.append(tokenized(row, detect(row), Reading(tokenizer, Forms())))
        (ids, labels), *others = found
        assert others == [(ids, labels)] * 2
        last = max(number for number, label in enumerate(labels) if label != -100)
        first = max(
            (number + 1 for number, label in enumerate(labels[:last]) if label == -100), default=0
        )
        before = tokenizer.decode(ids[:first])
        prompt = tokenizer.apply_chat_template(
            messages[:-1], tokenize=False, add_generation_prompt=True
        )
        if name == "no generation prompt":
            assert before == f"{prompt}### assistant:\n"
        else:
            assert prompt in {before, f"{before}\n", f"{before}<think>\n"} and (
                prompt == before or name in OPENED
            )


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_that_is_not_to_be_learnt_is_not(name, learnt):
    family = FAMILIES[name]
    first = family.learnt("Long.", False)
    last = family.learnt("Old, the mill is old.", True)
    quiet = [ASKED[0], ANSWERED[0] | {"train": False}, ASKED[1], ANSWERED[1]]
    assert learnt(family, quiet) == [last]
    assert learnt(family, [*CHAT[:3], ANSWERED[1] | {"weight": 0}]) == [first]
    assert learnt(family, CHAT, train_on="last") == [last]


@pytest.mark.parametrize("name", FAMILIES)
def test_words_that_look_like_the_template_are_found_all_the_same(name, learnt):
    """The same words in every message, blanks around them, and tags that templates cut at."""
    family = FAMILIES[name]
    same = [{"role": message["role"], "content": "the mill"} for message in CHAT]
    # a token across the border has the blank in front
    found = [text.lstrip(" ") for text in learnt(family, same)]
    assert found == [family.learnt("the mill", last).lstrip(" ") for last in (False, True)]
    odd = [ASKED[0], {"role": "assistant", "content": "<b>a</b> assistant\n<|x|> b <i>"}]
    assert learnt(family, odd) == [family.learnt("<b>a</b> assistant\n<|x|> b <i>", True)]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tool_call_is_learnt_as_the_template_writes_it_or_refused(name, learnt):
    family = FAMILIES[name]
    chat = [ASKED[0], CALL, OUTPUT, ANSWERED[0]]
    if family.call is None:
        with pytest.raises(
            DataError, match=r"leaves out the tool call|the chat template rejects this chat"
        ):
            learnt(family, chat[:2], [TOOL])
        return
    assert learnt(family, chat[:2], [TOOL]) == [family.call_last or family.call]
    if family.call_last is None:
        assert learnt(family, chat, [TOOL]) == [family.call, family.learnt("Long.", True)]
    again = [*chat, ASKED[1], ANSWERED[1]]
    expected = [
        family.call,
        family.learnt("Long.", False),
        family.learnt("Old, the mill is old.", True),
    ]
    assert learnt(family, again, [TOOL]) == expected


@pytest.mark.parametrize("name", CALLING)
def test_arguments_written_as_json_are_not_quoted_again(name, learnt):
    written = deepcopy(CALL)
    written["tool_calls"][0]["function"]["arguments"] = json.dumps(FUNCTION["arguments"])
    flat = {"role": "assistant", "content": "", "tool_calls": [{**FUNCTION, "id": "abcdefghi"}]}
    for message in (written, flat):
        same = learnt(CALLING[name], [ASKED[0], CALL], [TOOL])
        assert learnt(CALLING[name], [ASKED[0], message], [TOOL]) == same


@pytest.mark.parametrize("name", FAMILIES)
def test_reasoning_is_learnt_where_the_template_shows_it(name, learnt):
    family = FAMILIES[name]
    thought = {"role": "assistant", "content": "Old.", "reasoning_content": "Wheels turn."}
    last = family.thought or family.learnt("Old.", True)
    assert learnt(family, [*CHAT[:3], thought]) == [family.learnt("Long.", False), last]
    earlier = [ASKED[0], thought, ASKED[1], ANSWERED[1]]
    assert learnt(family, earlier) == [
        family.learnt("Old.", False),
        family.learnt("Old, the mill is old.", True),
    ]


def test_there_are_twenty_families_and_more():
    assert len({family.template for family in FAMILIES.values()}) >= 25


def test_what_a_template_leaves_out_is_said_once(make_tokenizer):
    tokenizer = make_tokenizer(FAMILIES["ChatML"].template)
    tokenizer.add_special_tokens({"additional_special_tokens": list(FAMILIES["ChatML"].specials)})
    row = {
        "messages": [ASKED[0], ANSWERED[0] | {"reasoning_content": "Wheels turn."}],
        "tools": [TOOL],
    }
    data = prepare_data([row, row], tokenizer, max_length=256)
    assert data.notes == (
        "the chat template does not show the tools (2 rows, the first is rows:1)",
        "the chat template leaves out reasoning, or text next to a tool call, in some messages "
        "(2 rows, the first is rows:1)",
    )
