"""A data set may say itself which of its rows are read, and how."""

import json

import pytest
from smallrun import write_model

from lema import LemaConfig
from lema.config.problems import SettingsError
from lema.data import load_rows, prepare_data
from lema.data.forms import forms_of
from lema.data.preference import prepare_preferences
from lema.data.read import mixed
from lema.data.sets.slices import SplitPart, parse_split
from lema.data.sets.sources import data_files, names_of
from lema.errors import ConfigError, DataError
from lema.model.files import ModelFiles


def config_of(**settings):
    return LemaConfig(model_name_or_path="model", **settings)


def words(rows, tokenizer, index=0):
    """What of a row is trained on, as text, and all of it."""
    ids, labels = rows[index].values()
    trained = [token for token, label in zip(ids, labels, strict=True) if label != -100]
    return tokenizer.decode(trained), tokenizer.decode(ids)


@pytest.fixture
def lines(write):
    """A file of 25 rows of text."""
    return str(write("a.jsonl", [{"text": f"row {number}"} for number in range(25)]))


def texts(source):
    return [row.values["text"].removeprefix("row ") for row in load_rows(source)]


def test_each_data_set_is_read_with_its_own_settings(write, make_tokenizer, templates):
    tokenizer = make_tokenizer(templates["plain"])
    chats = write(
        "chats.jsonl", [{"dialog": [{"who": "human", "text": "a?"}, {"who": "bot", "text": "b"}]}]
    )
    pairs = write("pairs.jsonl", [{"question": "the river?", "answer": "the mill"}] * 3)
    train_data = {
        "chats": {
            "path": str(chats),
            "columns": {"messages": "dialog", "role": "who", "content": "text"},
            "train_on": "all",
        },
        "pairs": {
            "path": str(pairs),
            "columns": {"prompt": "question", "completion": "answer"},
            "max_samples": 2,
        },
    }
    config = config_of(train_data=train_data)
    assert config.train_data == train_data
    files = data_files(config.train_data)
    rows = prepare_data(files, tokenizer, max_length=64)
    assert len(rows) == 3 and [rows.origin(at).rsplit("/")[-1] for at in (0, 2)] == [
        "chats.jsonl:1",
        "pairs.jsonl:2",
    ]
    assert words(rows, tokenizer)[0].startswith("<|im_start|>user\na?")
    assert words(rows, tokenizer, 1) == ("the mill</s>", "<s>the river?the mill</s>")
    halves = mixed(config_of(train_data=train_data, mixture={"chats": 0.5, "pairs": 0.5}), rows)
    assert len(halves) == 4


def test_what_a_data_set_says_decides_the_kept_tokens(write, make_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("lema.data.cache.SMALL", 0)
    path = str(write("pairs.jsonl", [{"prompt": "the river?", "completion": "the mill", "q": "a"}]))
    prints = set()
    sources = [
        path,
        {"path": path, "train_on": "all"},
        {"path": path, "columns": {"prompt": "q"}},
        {"path": path, "split": "train[:1]"},
    ]
    for source in (*sources, *sources):
        rows = prepare_data(source, make_tokenizer(), max_length=64, cache=tmp_path / "tokens")
        prints.add(rows.fingerprint())
    assert len(prints) == 3 and len(list((tmp_path / "tokens").iterdir())) == 3


@pytest.mark.parametrize(
    ("split", "rows"),
    [
        ("train", range(25)),
        ("train[:20%]", range(5)),
        ("train[10%:30%]", range(2, 8)),
        ("train[:-5]", range(20)),
        ("train[-5:]", range(20, 25)),
        ("train[3:7]", range(3, 7)),
        ("train[90%:]", range(22, 25)),
        ("train[:2] + train[-20%:]", [0, 1, *range(20, 25)]),
        ("train[20:]+train[:3]", [*range(20, 25), 0, 1, 2]),
    ],
)
def test_a_part_of_a_split_has_the_rows_that_the_library_gives(lines, write, split, rows):
    assert texts({"path": lines, "split": split}) == [str(number) for number in rows]
    more = write("b.jsonl", [{"text": f"row {number}"} for number in range(25)])
    lines_of = [json.loads(line)["text"] for line in more.read_text().splitlines()]
    halves = [
        str(
            write(
                f"h{half}.jsonl", [{"text": text} for text in lines_of[half * 12 : 12 + 13 * half]]
            )
        )
        for half in (0, 1)
    ]
    assert texts({"path": "json", "data_files": halves, "split": split}) == [
        str(number) for number in rows
    ]


def test_bounds_are_rounded_as_the_library_rounds_them():
    (part,) = parse_split("train[33%:66%]", "data")
    assert part == SplitPart("train", 33, 66, percent=True) and part.bounds(50) == (16, 33)
    (part,) = parse_split("train[:33%](pct1_dropremainder)", "data")
    assert part.bounds(199) == (0, 33)
    with pytest.raises(ValueError, match="needs 100 rows"):
        part.bounds(99)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("test", "there is no 'test'"),
        ("train[:20", "is no part of a split"),
        ("train[:120%]", "more than 100 percent"),
        ("train[30:]", "has no rows: train has 25 rows"),
        ("train[:5](closest)", "asks for the rounding"),
    ],
)
def test_a_part_that_is_not_there_is_refused(lines, split, message):
    with pytest.raises(DataError, match=message):
        load_rows({"path": lines, "split": split})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"path": "a.jsonl", "colums": {}}, "did you mean columns"),
        ({"path": "a.jsonl", "revision": "v1"}, "revision is of data sets of the hub"),
        ({"named": {"path": "a.jsonl", "train_on": "some"}}, "train_on must be one of"),
        ({"named": {"pth": "a.jsonl"}}, "path"),
        ([{"path": "a.jsonl", "columns": {"question": "prompt"}}], "write {prompt: question}"),
    ],
)
def test_what_is_wrong_with_a_data_set_is_said(source, message):
    with pytest.raises(SettingsError, match=message):
        config_of(train_data=source)


@pytest.mark.parametrize(
    ("row_format", "text"),
    [
        ("auto", "<|im_start|>user\nname it\n\nthe river<|im_end|>\n"),
        ("chat", "<|im_start|>user\nname it\n\nthe river<|im_end|>\n"),
        ("alpaca", "### Instruction:\nname it\n\n### Input:\nthe river\n\n### Response:\n"),
        ("Q: {instruction} {input}\nA: ", "Q: name it the river\nA: "),
        ({"prompt": "{instruction}/{input}", "chat": True}, "user\nname it/the river<|im_end|>"),
        ({"prompt": "{x} {instruction}{input}"}, "{x} name itthe river"),
    ],
)
def test_instructions_are_written_as_the_settings_say(
    make_tokenizer, templates, write, row_format, text
):
    row = {"instruction": "name it", "input": "the river", "output": "long"}
    tokenizer = make_tokenizer(templates["plain"])
    source = {"path": str(write("a.jsonl", [row])), "row_format": row_format}
    data = prepare_data(
        data_files(config_of(train_data=source).train_data), tokenizer, max_length=256
    )
    assert text in words(data, tokenizer)[1]
    assert words(data, tokenizer)[0].strip().startswith("long")
    run = forms_of(config_of(row_format=row_format))
    assert prepare_data([row], tokenizer, max_length=256, forms=run)[0] == data[0]


def test_a_form_without_a_place_for_an_input_is_refused(make_tokenizer, write):
    path = str(write("a.jsonl", [{"instruction": "name it", "input": "x", "output": "long"}]))
    forms = forms_of(
        config_of(row_format={"prompt": "Q {instruction}{input}", "without_input": "{instruction}"})
    )
    rows = [
        {"instruction": "it", "input": " ", "output": "o"},
        {"instruction": "it", "output": "o"},
    ]
    data = prepare_data(rows, make_tokenizer(), max_length=64, forms=forms)
    assert data[0] == data[1] and words(data, make_tokenizer())[1] == "<s>ito</s>"
    with pytest.raises(DataError, match="row_format has no place for it"):
        prepare_data(
            path,
            make_tokenizer(),
            max_length=64,
            forms=forms_of(config_of(row_format="{instruction}")),
        )
    with pytest.raises(SettingsError, match="auto, alpaca, chat, or a text with"):
        config_of(row_format="sharegpt")


def test_instructions_have_system_messages_and_earlier_turns(make_tokenizer, templates):
    row = {"instruction": "c", "output": "d", "system": "be kind", "history": [["a", "b"]]}
    tokenizer = make_tokenizer(templates["plain"])
    data = prepare_data(
        [row], tokenizer, max_length=256, forms=forms_of(config_of(row_format="chat"))
    )
    plain = "<|im_start|>{}\n{}<|im_end|>\n"
    turns = (
        ("system", "be kind"),
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c"),
        ("assistant", "d"),
    )
    assert words(data, tokenizer)[1] == "".join(plain.format(*turn) for turn in turns)
    before = prepare_data([row], tokenizer, max_length=256)  # as ever
    assert "be kind" not in words(before, tokenizer)[1] and "'system'" in str(before.notes)


CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
OWN = [{"role": "system", "content": "own"}, *CHAT]


@pytest.mark.parametrize(
    ("messages", "settings", "system"),
    [
        (CHAT, {"system_prompt": "be kind"}, "be kind"),
        (OWN, {"system_prompt": "be kind"}, "own"),
        (OWN, {"system_prompt": "be kind", "drop_system_messages": True}, "be kind"),
        (OWN, {"drop_system_messages": True}, None),
        (CHAT, {}, None),
    ],
)
@pytest.mark.parametrize("kind", ["messages", "prompt", "pair"])
def test_chats_get_the_system_message_of_the_settings(
    make_tokenizer, templates, messages, settings, system, kind
):
    tokenizer = make_tokenizer(templates["plain"])
    forms = forms_of(config_of(**settings))
    other = [*messages[:-1], {"role": "assistant", "content": "c"}]
    rows = {
        "messages": {"messages": messages},
        "prompt": {"prompt": messages[:-1], "completion": messages[-1:]},
        "pair": {"chosen": messages, "rejected": other},
    }
    if kind == "pair":
        prepared = prepare_preferences(
            [rows[kind]], tokenizer, labelled=False, max_length=64, forms=forms
        )
        ids = prepared[0][0]["input_ids"]
    else:
        ids = prepare_data([rows[kind]], tokenizer, max_length=64, forms=forms)[0]["input_ids"]
    head = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    text = tokenizer.decode(ids)
    assert text == f"{head}<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"


@pytest.mark.parametrize("name", ["roles", "fields", "nested"])
def test_roles_and_fields_have_the_names_of_the_data(make_tokenizer, templates, name):
    tokenizer = make_tokenizer(templates["plain"])
    turns = {
        "roles": [{"role": "customer", "content": "a"}, {"role": "agent", "content": "b"}],
        "fields": [{"from": "customer", "value": "a"}, {"from": "agent", "value": "b"}],
        "nested": [{"by": {"who": "customer"}, "said": "a"}, {"by": {"who": "agent"}, "said": "b"}],
    }[name]
    columns = {"roles": {}, "fields": {}, "nested": {"role": "by.who", "content": "said"}}[name]
    roles = {"user": ["customer", "human"], "assistant": "agent"}
    column = "conversations" if name == "fields" else "messages"
    settings = {"columns": columns}
    forms = forms_of(config_of(roles=roles, **settings))
    row = {column: turns}
    data = prepare_data([row], tokenizer, max_length=64, forms=forms)
    assert (
        words(data, tokenizer)[1]
        == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    )
    with pytest.raises(DataError, match=r"roles: \{assistant: (customer|agent)\}"):
        prepare_data([row], tokenizer, max_length=64, forms=forms_of(config_of(**settings)))


def test_a_preference_row_has_one_message_a_side(make_tokenizer, templates):
    """As axolotl's chat data have it: messages before, and one message a side."""
    tokenizer = make_tokenizer(templates["plain"])
    row = {
        "conversation": [{"sender": "human", "text": "a"}],
        "chosen": {"sender": "model", "text": "b"},
        "rejected": {"sender": "model", "text": "c"},
    }
    columns = {"prompt": "conversation", "role": "sender", "content": "text"}
    forms = forms_of(config_of(columns=columns, roles={"assistant": "model"}))
    prepared = prepare_preferences([row], tokenizer, labelled=False, max_length=64, forms=forms)
    plain = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"
    assert [tokenizer.decode(side["input_ids"]) for side in prepared[0]] == [
        plain.format(word) for word in "bc"
    ]
    wrong = row | {"chosen": {"sender": "model", "words": "b"}}
    with pytest.raises(DataError, match=r"no 'text'[^\n]*\n.*chosen, message 1"):
        prepare_preferences([wrong], tokenizer, labelled=False, max_length=64, forms=forms)


def test_a_field_that_is_missing_is_named_with_the_setting_that_names_it(make_tokenizer, templates):
    turns = [{"from": "user", "value": "a"}, {"from": "assistant", "value": "b"}]
    with pytest.raises(
        DataError, match=r"it has from, value(.|\n)*columns: \{role: from, content: value\}"
    ):
        prepare_data([{"messages": turns}], make_tokenizer(templates["plain"]), max_length=64)


def test_the_end_of_a_row_is_kept_if_its_beginning_is_cut(make_tokenizer):
    """As TRL's `keep_end` does: of a pair each row is cut for itself."""
    tokenizer = make_tokenizer()
    row = {"prompt": "the river runs past the mill", "completion": " and under the bridge"}
    left = forms_of(config_of(truncation_side="left"))
    whole = prepare_data([row], tokenizer, max_length=64)[0]
    data = prepare_data([row], tokenizer, max_length=8, forms=left)
    assert data[0] == {name: values[-8:] for name, values in whole.items()}
    assert data.counts.truncated == 1 and data.counts.cut_tokens == len(whole["labels"]) - 8
    pair = {"prompt": row["prompt"], "chosen": " and on", "rejected": row["completion"]}
    for max_length in (64, 4):
        sides = prepare_preferences(
            [pair], tokenizer, labelled=False, max_length=max_length, forms=left
        )[0]
        if max_length == 64:
            full = sides
    assert sides == [{name: values[-4:] for name, values in side.items()} for side in full]
    with pytest.raises(ConfigError, match="cut at their end"):
        prepare_preferences([pair], tokenizer, labelled=True, max_length=4, forms=left)


def test_a_data_set_with_a_dated_template_has_the_date_of_the_run(tmp_path, write):
    """So that its rows are the same if the run goes on the next day."""
    model = write_model(tmp_path / "model")
    source = {"path": "a.jsonl", "chat_template": "{{ strftime_now('%d %b %Y') }}"}
    config = LemaConfig(str(model), train_data={"a": source, "b": "b.jsonl"})
    assert ModelFiles(config).dated(config, "2026-03-31").template_date == "2026-03-31"
    plain = LemaConfig(str(model), train_data={"path": "a.jsonl", "train_on": "last"})
    assert ModelFiles(plain).dated(plain, "2026-03-31").template_date is None


def test_data_sets_are_listed_by_their_names_or_those_of_their_files():
    listed = ["data/a.jsonl", {"path": "data/b.jsonl", "train_on": "all"}, {"path": "org/name"}]
    assert names_of(config_of(train_data=listed).train_data) == ["a.jsonl", "b.jsonl", "name"]
    assert names_of({"one": "data/a.jsonl", "two": listed[1]}) == ["one", "two"]
    assert names_of(listed[1]) == ["b.jsonl"] and names_of(None) == []
