"""Which columns are meant, what says not to train, and what is trained on: obeyed, or refused in
words.
"""

import json

import pytest

from lema.data import Forms, prepare_data
from lema.errors import DataError

CHAT = [
    {"role": "user", "content": "What is the river?"},
    {"role": "assistant", "content": "Long."},
    {"role": "user", "content": "And the mill?"},
    {"role": "assistant", "content": "Old."},
]


@pytest.fixture
def learn(make_tokenizer, templates):
    """The learnt texts of each row, and the data set."""
    tokenizer = make_tokenizer(templates["plain"])

    def read(rows, **forms):
        data = prepare_data(rows, tokenizer, max_length=512, forms=Forms(**forms))
        texts = []
        for row in data:
            learnt = [
                "\n" if label == -100 else tokenizer.decode([label]) for label in row["labels"]
            ]
            texts.append([text for text in "".join(learnt).split("\n") if text])
        return texts, data

    return read


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_columns_are_read_by_the_names_that_are_given(learn, write, suffix):
    rows = [{"question": "What is the river?\n", "answer": "Long.", "id": "7"}]
    content = "question,answer,id\n" + ",".join(f'"{value}"' for value in rows[0].values()) + "\n"
    file = write(f"data{suffix}", rows if suffix == ".jsonl" else content)
    texts, data = learn(str(file), columns={"prompt": "question", "completion": "answer"})
    assert texts == [["Long.</s>"]]
    line = 1 if suffix == ".jsonl" else 2
    assert data.notes == (f"LEMA does not use the column 'id' (1 row, the first is {file}:{line})",)


def test_a_column_that_is_named_NONE_is_not_read(learn):
    row = {"instruction": "the hill", "input": "a place", "output": "high"}
    (ids, without, with_input) = (
        data[0]["input_ids"]
        for _, data in (
            learn([row], columns={"instruction": "instruction", "input": None}),
            learn([{**row, "input": ""}]),
            learn([row]),
        )
    )
    assert ids == without != with_input
    row = {"messages": "of another kind", "prompt": "the hill", "completion": "high"}
    texts, _ = learn([row], columns={"messages": None})
    assert texts == learn([{**row, "messages": None}])[0]


def test_columns_that_are_named_come_before_those_that_are_known(learn):
    row = {"text": "the river", "query": "the mill\n", "response": "Old."}
    texts, data = learn([row], columns={"prompt": "query", "completion": "response"})
    assert texts == [["Old.</s>"]] and "'text'" in data.notes[0]
    assert learn([{"completion": "the river"}], columns={"text": "completion"})[0] == [
        ["the river</s>"]
    ]


def test_fields_of_messages_are_read_by_the_names_that_are_given(learn):
    turns = [{"who": "human", "said": "What is the river?"}, {"who": "gpt", "said": "Long."}]
    columns = {"messages": "dialog", "role": "who", "content": "said"}
    assert learn([{"dialog": turns}], columns=columns)[0] == [["Long.<|im_end|>"]]


def test_a_named_column_that_is_not_there_is_refused(learn):
    with pytest.raises(
        DataError, match=r"name the column 'question', and the row has answer, prompt"
    ) as caught:
        learn(
            [{"prompt": "a", "answer": "b"}], columns={"prompt": "question", "completion": "answer"}
        )
    assert caught.value.where == "rows:1"
    with pytest.raises(DataError, match="say nothing to train on") as caught:
        learn([{"question": "a", "answer": "b"}])
    assert "columns: {prompt: question}" in caught.value.how


@pytest.mark.parametrize(
    "flag", [{"train": False}, {"weight": 0}, {"training": "false"}, {"train": None, "weight": 0.0}]
)
def test_a_message_that_says_not_to_be_learnt_is_read_and_not_learnt(learn, flag):
    rows = [{"messages": [CHAT[0], CHAT[1] | flag, *CHAT[2:]]}]
    texts, data = learn(rows)
    assert texts == [["Old.<|im_end|>"]]
    assert len(data[0]["input_ids"]) == len(learn([{"messages": CHAT}])[1][0]["input_ids"])
    shared = [
        {"from": "human", "value": "a"},
        {"from": "gpt", "value": "b"} | flag,
        {"from": "gpt", "value": "c"},
    ]
    assert learn([{"conversations": shared}])[0] == [["c<|im_end|>"]]


@pytest.mark.parametrize("flag", [{"train": False}, {"weight": 0}, {"train": "0"}])
@pytest.mark.parametrize(
    "row", [{"text": "a"}, {"messages": CHAT}, {"prompt": "a", "completion": "b"}]
)
def test_a_row_that_says_not_to_be_learnt_is_left_out_and_counted(learn, row, flag):
    texts, data = learn([row | flag, row | {"train": True, "weight": 1}])
    assert (
        len(texts) == 1
        and data.counts.left_out == 1
        and "1 left out because of train: false" in str(data.counts)
    )


def test_a_chat_of_which_nothing_is_to_be_learnt_is_left_out(learn):
    quiet = [
        message | ({"weight": 0} if message["role"] == "assistant" else {}) for message in CHAT
    ]
    assert learn([{"messages": quiet}, {"messages": CHAT}])[1].counts.left_out == 1
    with pytest.raises(DataError, match="1 say not to be trained on"):
        learn([{"messages": quiet}])


@pytest.mark.parametrize(
    ("message", "what"),
    [
        (
            {"role": "assistant", "content": "a", "weight": 0.5},
            "should be true or false, 1 or 0, not 0.5",
        ),
        ({"role": "assistant", "content": "a", "train": "no"}, "not 'no'"),
        ({"role": "user", "content": "a", "train": True}, "is not the assistant's"),
        (
            {"role": "assistant", "content": "a", "train_detail": [{"begin_offset": 0}]},
            "parts of a message",
        ),
        (
            {"role": "assistant", "content": " "},
            "the answer is empty, so only its end token would be trained on",
        ),
    ],
)
def test_what_cannot_be_obeyed_is_refused(learn, message, what):
    with pytest.raises(DataError, match=what) as caught:
        learn([{"messages": [CHAT[0], message, *CHAT[2:]]}])
    assert caught.value.where.startswith("rows:1, ") and "message 2" in caught.value.where
    with pytest.raises(DataError, match="not 3"):
        learn([{"text": "a", "weight": 3}])


def test_what_is_trained_on_is_chosen(learn):
    row = {"messages": [*CHAT, {"role": "assistant", "content": "Very."}]}
    answers = ["Long.<|im_end|>", "Old.<|im_end|>", "Very.<|im_end|>"]
    assert learn([row])[0] == [answers]
    assert learn([row], train_on="last")[0] == [answers[2:]]
    assert learn([row], train_on="completion")[0] == [answers[1:]]
    ((first, *_),), data = learn([row], train_on="all")
    assert first == "<|im_start|>user" and data[0]["labels"] == data[0]["input_ids"]
    pair = {"prompt": "What?\n", "completion": "Long."}
    assert learn([pair], train_on="last")[0] == [["Long.</s>"]]
    assert learn([pair], train_on="all")[0] == [["What?", "Long.</s>"]]
    split = {"prompt": row["messages"][:2], "completion": [CHAT[3], CHAT[2], row["messages"][4]]}
    assert learn([split])[0] == [answers[1:]]  # the user's words in a completion are not learnt
    assert learn([pair], train_on="all_but_prompts")[0] == [["Long.</s>"]]
    _, whole = learn([row], train_on="all_but_prompts")
    assert whole[0]["labels"] == whole[0]["input_ids"]
    # from where the prompt ends, ready for an answer; the user's words in a completion, too
    (lines,), _ = learn([split], train_on="all_but_prompts")
    assert (lines[0], lines[-1]) == tuple(answers[1:]) and "<|im_start|>user" in lines
    quiet = [CHAT[0], CHAT[1] | {"train": False}, *CHAT[2:]]
    with pytest.raises(
        DataError, match="the settings train on all words, but this message must not be trained on"
    ):
        learn([{"messages": quiet}], train_on="all")


def test_calls_of_sharegpt_are_tool_calls(make_tokenizer):
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments | "
        "tojson }}{% endfor %}"
        "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ "
        "'<|im_start|>assistant\n' }}{% endif %}"
    )
    turns = [
        {"from": "human", "value": "the weather?"},
        {
            "from": "function_call",
            "value": json.dumps({"name": "weather", "arguments": {"city": "Paris"}}),
        },
        {"from": "observation", "value": "sunny"},
        {"from": "gpt", "value": "Fine."},
    ]
    tokenizer = make_tokenizer(template)
    (row,) = prepare_data([{"conversations": turns}], tokenizer, max_length=256)
    learnt = tokenizer.decode([label for label in row["labels"] if label != -100])
    assert learnt == 'weather{"city": "Paris"}<|im_end|>Fine.<|im_end|>'
    turns[1]["value"] = "weather(Paris)"
    with pytest.raises(DataError, match="a tool call is not JSON"):
        prepare_data([{"conversations": turns}], tokenizer, max_length=256)


@pytest.mark.parametrize("how", ["text", "file", "name"])
def test_the_template_of_the_settings_is_taken(make_tokenizer, templates, tmp_path, how):
    tokenizer = make_tokenizer({"default": templates["strict"], "mine": templates["plain"]})
    file = tmp_path / "mine.jinja"
    file.write_text(templates["plain"])
    given = {"text": templates["plain"], "file": str(file), "name": "mine"}[how]
    own = tokenizer.chat_template
    (row,) = prepare_data(
        [{"messages": CHAT}], tokenizer, max_length=256, forms=Forms(chat_template=given)
    )
    assert tokenizer.decode(row["input_ids"]).startswith("<|im_start|>user")
    assert tokenizer.chat_template is own
    with pytest.raises(DataError, match="cannot be read") as caught:
        prepare_data(
            [{"messages": CHAT}], tokenizer, max_length=256, forms=Forms(chat_template="none.jinja")
        )
    assert caught.value.where == "chat_template"


def test_a_template_that_asks_for_words_is_refused_and_not_guessed_at(make_tokenizer):
    template = (
        "{% for m in messages %}{{ m.role + (m.content if m.content.startswith('L') else "
        "m.content[:2]) }}{% endfor %}"
    )
    with pytest.raises(
        DataError,
        match=r"reads the text of a message|changes the assistant's words|cannot be found",
    ):
        prepare_data([{"messages": CHAT}], make_tokenizer(template), max_length=256)


def test_marks_in_the_data_are_refused(learn):
    with pytest.raises(DataError, match="last private plane"):
        learn([{"messages": [CHAT[0], {"role": "assistant", "content": "a\U00108000b"}]}])


def test_a_template_is_rendered_once_for_a_chat_of_a_shape_seen_before(
    make_tokenizer, templates, monkeypatch
):
    from lema.data.chat.template import Template

    rendered = []
    render = Template.render
    monkeypatch.setattr(
        Template, "render", lambda self, *a, **k: rendered.append(1) or render(self, *a, **k)
    )
    tokenizer = make_tokenizer(templates["plain"])
    chats = [
        {"messages": [dict(one, content=f"{one['content']} {n}") for one in CHAT]}
        for n in range(50)
    ]
    prepare_data(chats[:1], tokenizer, max_length=256)
    first = len(rendered)
    prepare_data(chats, tokenizer, max_length=256)
    assert len(rendered) == 2 * first + 49


def test_what_is_cut_off_is_counted(learn, make_tokenizer):
    tokenizer = make_tokenizer()
    whole = prepare_data([{"text": "the river " * 20}], tokenizer, max_length=512)
    cut = prepare_data([{"text": "the river " * 20}], tokenizer, max_length=16).counts
    assert (cut.cut_tokens, cut.cut_trained) == (len(whole[0]["input_ids"]) - 16,) * 2
    assert f"1 rows truncated ({cut.cut_tokens:,} tokens cut off" in str(cut)


def test_an_answer_that_nothing_ends_is_said(make_tokenizer):
    template = (
        "{% for m in messages %}{{ ' ' + m.role + ': ' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ ' assistant: ' }}{% endif %}"
    )
    data = prepare_data([{"messages": CHAT}], make_tokenizer(template), max_length=256)
    assert data.notes == (
        "the chat template does not end an answer with a token at which a model could stop "
        "(1 row, the first is rows:1)",
    )
