"""What is learnt: completions and answers with the token that ends them, and nothing of the
prompt.
"""

import pytest
from support.tokenized import tokenized
from transformers import ByT5Tokenizer

from lema.data import Row, TokenDataset, prepare_data
from lema.data.chat.tokens import tokenizing
from lema.data.columns import detect
from lema.data.forms import Forms
from lema.data.tokenize import Reading
from lema.errors import DataError

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the river?"},
    {"role": "assistant", "content": "Long."},
    {"role": "user", "content": "And the mill?"},
    {"role": "assistant", "content": "Old, the mill is old."},
]
ANSWERS = ["Long.<|im_end|>", "Old, the mill is old.<|im_end|>"]


def tokenize(tokenizer, values, **forms):
    vocab_size = forms.pop("vocab_size", None)
    forms = Forms(**forms)
    row = forms.renamed(Row(values, "data.jsonl", 3))
    return tokenized(row, detect(row, forms), Reading(tokenizer, forms, vocab_size))


def learnt_stretches(tokenizer, ids, labels):
    """The learnt text, one string for each unbroken stretch."""
    stretches = []
    current = []
    for token, label in zip([*ids, -1], [*labels, -100], strict=True):
        assert label in (token, -100)
        if label != -100:
            current.append(token)
        elif current:
            stretches.append(tokenizer.decode(current))
            current = []
    return stretches


@pytest.mark.parametrize("around", ["$A", "<s> $A", "<s> $A </s>"])
@pytest.mark.parametrize(
    "text", ["the river", "<s>the river", "the river</s>", "<s>the river</s></s>"]
)
def test_text_begins_and_ends_once(make_tokenizer, around, text):
    tokenizer = make_tokenizer(around=around)
    ids, labels = tokenize(tokenizer, {"text": text})
    assert (
        ids.count(tokenizer.eos_token_id) == 1 and ids[-1] == labels[-1] == tokenizer.eos_token_id
    )
    starts = around.startswith("<s>") or text.startswith("<s>")
    assert ids.count(tokenizer.bos_token_id) == starts == (ids[0] == tokenizer.bos_token_id)
    assert labels[1:] == ids[1:]


@pytest.mark.parametrize("around", ["$A", "<s> $A", "<s> $A </s>"])
def test_only_the_completion_and_the_end_are_learnt(make_tokenizer, around):
    tokenizer = make_tokenizer(around=around)
    values = {"prompt": "What is the river?\n", "completion": "The river is long."}
    ids, labels = tokenize(tokenizer, values)
    assert learnt_stretches(tokenizer, ids, labels) == ["The river is long.</s>"]
    assert ids.count(tokenizer.eos_token_id) == 1
    # Training meets the prompt as generation will: the same tokens in front.
    prompt = make_tokenizer(around=around.removesuffix(" </s>"))(values["prompt"])["input_ids"]
    assert ids[: len(prompt)] == prompt and set(labels[: len(prompt)]) == {-100}


def test_a_token_across_the_border_is_learnt(tokenizer):
    ids, labels = tokenize(tokenizer, {"prompt": "The river ", "completion": "bridge"})
    assert learnt_stretches(tokenizer, ids, labels) == [" bridge</s>"]


def test_python_tokenizers_agree(templates):
    tokenizer = ByT5Tokenizer()
    ids, labels = tokenize(tokenizer, {"prompt": "naïve: ", "completion": "très"})
    assert learnt_stretches(tokenizer, ids, labels) == ["très</s>"]
    assert ids.count(tokenizer.eos_token_id) == 1
    tokenizer.chat_template = templates["strict"]
    ids, labels = tokenize(tokenizer, {"messages": CHAT[1:]})
    assert learnt_stretches(tokenizer, ids, labels) == ["Long.\n", "Old, the mill is old.\n"]


def test_both_ways_to_find_spans_agree(tokenizer):
    text = "The river runs past the mill: what is the name? The name is long — très long."
    spans = [(4, 9), (29, 48), (60, len(text))]
    ids, by_offsets = tokenizing(tokenizer)(text, spans, False)

    class Slow:
        name_or_path = "slow"

        def __call__(self, part, **kwargs):
            return tokenizer(part, **kwargs)

    same, by_prefixes = tokenizing(Slow())(text, spans, False)
    assert same.tolist() == ids.tolist() and by_prefixes.tolist() == by_offsets.tolist()
    assert by_offsets.any() and not by_offsets.all()


@pytest.mark.parametrize("template", ["plain", "marked"])
def test_only_answers_are_learnt_with_their_end(make_tokenizer, template, templates):
    tokenizer = make_tokenizer(templates[template])
    ids, labels = tokenize(tokenizer, {"messages": CHAT})
    assert learnt_stretches(tokenizer, ids, labels) == ANSWERS
    # as generation renders it, nothing added in front
    assert ids == tokenizer.apply_chat_template(CHAT)["input_ids"]


def test_without_an_end_token_the_newline_ends_the_answer(make_tokenizer, templates):
    tokenizer = make_tokenizer(templates["strict"])
    ids, labels = tokenize(tokenizer, {"messages": CHAT[1:]})
    assert learnt_stretches(tokenizer, ids, labels) == ["Long.\n", "Old, the mill is old.\n"]


@pytest.mark.parametrize("template", ["plain", "marked", "rewriting"])
def test_a_prompt_of_messages_is_not_learnt(make_tokenizer, template, templates):
    tokenizer = make_tokenizer(templates[template])
    ids, labels = tokenize(tokenizer, {"prompt": CHAT[:4], "completion": CHAT[4:]})
    thought = "(thinking)" if template == "rewriting" else ""
    assert learnt_stretches(tokenizer, ids, labels) == [thought + ANSWERS[1]]


def test_instructions_go_through_the_template(make_tokenizer, templates):
    tokenizer = make_tokenizer(templates["plain"])
    ids, labels = tokenize(
        tokenizer, {"instruction": "What is the river?", "input": "", "output": "Long."}
    )
    assert learnt_stretches(tokenizer, ids, labels) == ANSWERS[:1]
    assert tokenizer.decode(ids).startswith("<|im_start|>user\nWhat is the river?<|im_end|>")


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (None, CHAT, "no chat template"),
        ("plain", CHAT[:2], "no message is the assistant's"),
        ("plain", CHAT[2:], "begins with the assistant"),
        ("strict", CHAT, "no system role"),
    ],
)
def test_chats_which_cannot_be_masked_are_named(
    make_tokenizer, template, messages, message, templates
):
    tokenizer = make_tokenizer(template and templates[template])
    with pytest.raises(DataError, match=message) as caught:
        tokenize(tokenizer, {"messages": messages})
    assert caught.value.where.startswith("data.jsonl:3")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"input_ids": [1, 9]}, "input_ids holds 9, which is outside the vocabulary of 9"),
        ({"input_ids": [1, -1]}, "input_ids holds -1"),
        ({"input_ids": [1, 2], "labels": [1, -1]}, "labels holds -1"),
        ({"input_ids": [1, 2], "labels": [-100, 12]}, "labels holds 12"),
        ({"input_ids": [1, 2], "labels": [-100, -100]}, "no token to train on"),
        ({"input_ids": [1, 2], "labels": [1, -100]}, "no token to train on"),
        ({"input_ids": [1]}, "no token to train on"),
        ({"input_ids": [1, 2], "attention_mask": [0, 0]}, "no token to train on"),
    ],
)
def test_tokens_which_cannot_be_learnt_are_named(values, message):
    with pytest.raises(DataError, match=message) as caught:
        tokenize(None, values, vocab_size=9)
    assert caught.value.where.startswith("data.jsonl:3")


def test_ids_of_any_size_are_an_error_and_not_an_overflow():
    for token in (2**31, 2**63, 2**70):
        with pytest.raises(DataError, match="outside the vocabulary"):
            tokenize(None, {"input_ids": [1, token]})


def test_a_tokenizer_larger_than_the_model_is_found(tokenizer):
    assert isinstance(
        prepare_data([{"text": "the river"}], tokenizer, max_length=64, vocab_size=400),
        TokenDataset,
    )
    with pytest.raises(DataError, match="outside the vocabulary of 50"):
        prepare_data([{"text": "the river"}], tokenizer, max_length=64, vocab_size=50)


def test_a_tokenizer_without_an_end_is_refused_for_text_only(make_tokenizer, templates):
    tokenizer = make_tokenizer(templates["plain"], eos=None)
    assert len(prepare_data([{"messages": CHAT}], tokenizer, max_length=256)) == 1
    with pytest.raises(DataError, match="no end-of-sequence token"):
        prepare_data([{"text": "the river"}], tokenizer, max_length=64)


def test_a_row_longer_than_the_tokenizer_expects_is_quiet(make_tokenizer, templates, caplog):
    tokenizer = make_tokenizer(templates["marked"])
    tokenizer.model_max_length = 8
    tokenize(tokenizer, {"text": "the river " * 20})
    tokenize(tokenizer, {"messages": CHAT})
    assert not caplog.records


def test_a_word_of_a_million_letters_is_refused_by_its_row_and_a_text_of_as_many_words_is_not(
    make_tokenizer,
):
    """A tokenizer takes gigabytes for the first."""
    tokenizer = make_tokenizer()
    with pytest.raises(DataError, match="a word of more than 1,048,576 characters") as caught:
        tokenize(tokenizer, {"text": "é" * ((1 << 20) + 1)})
    assert "data.jsonl:3" in str(caught.value)
    ids, _ = tokenize(tokenizer, {"text": "the river " * 110_000})
    assert len(ids) >= 220_000
