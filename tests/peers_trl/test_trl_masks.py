"""What is learnt of a chat, and what TRL's `assistant_only_loss` learns of it, for every chat
template TRL comes with.

Under the template that TRL trains with, tokens and masks are equal. Under the model's own template,
which TRL replaces, all that is learnt here is learnt there where the text is the same; TRL learns
besides what a generation prompt gives and what follows the end of a turn.
"""

import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trl.chat_template_utils
from jinja2 import TemplateError
from support.tokenized import tokenized
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast
from trl.chat_template_utils import get_training_chat_template

from lema import LemaConfig
from lema.data import Forms, Row, load_rows
from lema.data.columns import detect
from lema.data.tokenize import Reading
from lema.errors import DataError
from lema.model.files import ModelFiles, read_data
from lema.train.batch import as_rows

TEMPLATES = {
    file.stem: file
    for file in sorted(
        Path(trl.chat_template_utils.__file__).with_name("chat_templates").glob("*.jinja")
    )
    if not file.stem.endswith("_training")
}
BAR = "\N{FULLWIDTH VERTICAL LINE}"
TOKENS = re.compile(
    rf"<\|[^<>|{{}}]{{1,30}}\|>|<{BAR}[^<>]{{1,30}}{BAR}>|<(?:start|end)_of_(?:turn|utterance)>|\[/?INST\]"
    r"|<\|(?:turn|tool_call|tool_response)>|<(?:turn|tool_call|tool_response)\|>"
)

SYSTEM = {"role": "system", "content": "Be brief."}
FIRST = [
    {"role": "user", "content": "What is the river?"},
    {"role": "assistant", "content": "Long."},
]
SECOND = [
    {"role": "user", "content": "And the mill?"},
    {"role": "assistant", "content": "Old, the mill is old."},
]
THOUGHT = [SECOND[0], SECOND[1] | {"reasoning_content": "Wheels turn."}]
FUNCTION = {"name": "weather", "arguments": {"city": "Paris", "n": 3}}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "id": "abcdefghi", "function": FUNCTION}],
}
OUTPUT = {"role": "tool", "content": "sunny", "name": "weather", "tool_call_id": "abcdefghi"}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "where"}},
    "required": ["city"],
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "How it is.", "parameters": SCHEMA},
}
CHATS: dict[str, tuple[list[dict[str, Any]], Any]] = {
    "one turn": (FIRST, None),
    "turns": ([*FIRST, *SECOND], None),
    "system": ([SYSTEM, *FIRST, *SECOND], None),
    "reasoning": ([*FIRST, *THOUGHT], None),
    "tools": ([FIRST[0], CALL, OUTPUT, FIRST[1], *SECOND], [TOOL]),
    "a call": ([FIRST[0], CALL], [TOOL]),
}


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<s>", "</s>"]
    options = {"special_tokens": specials, "initial_alphabet": alphabet, "show_progress": False}
    bpe.train_from_iterator(
        ["the river and the mill"], trainers.BpeTrainer(vocab_size=300, **options)
    )
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")
    made.add_special_tokens({"additional_special_tokens": sorted(set(TOKENS.findall(template)))})
    made.chat_template = template
    return made


def ours(made: Any, messages: Any, tools: Any, template: str | None) -> tuple[list[int], list[int]]:
    """Token ids, and 1 where one is learnt."""
    forms = Forms(chat_template=template)
    row = Row({"messages": messages, "tools": tools}, "chat", 1)
    ids, labels = tokenized(row, detect(row), Reading(forms.with_template(made), forms))
    return ids, [int(label != -100) for label in labels]


def theirs(
    made: Any, messages: Any, tools: Any, template: str
) -> tuple[list[int], list[int]] | None:
    """The same of TRL's way; None: the template does not take the chat."""
    own_words = [message["content"] for message in messages if message.get("content")]
    try:
        how = {"chat_template": template, "return_dict": True, "return_assistant_tokens_mask": True}
        encoded = made.apply_chat_template(messages, tools=tools, **how)
    except (TemplateError, TypeError, ValueError):
        return None
    # a template of images with text
    if own_words and own_words[-1] not in made.decode(encoded["input_ids"]):
        blocks = [
            {**one, "content": [{"type": "text", "text": one["content"]}]} for one in messages
        ]
        encoded = made.apply_chat_template(blocks, tools=tools, **how)
    return encoded["input_ids"], encoded["assistant_masks"]


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_masks_are_those_of_trl(name: str, chat: str) -> None:
    (messages, tools), own = CHATS[chat], TEMPLATES[name].read_text()
    made = tokenizer(own)
    try:
        trained_with = get_training_chat_template(made) or own
    except ValueError:  # TRL has none
        trained_with = ""
    if not trained_with:
        assert any(ours(made, messages, tools, None)[1])
        return
    expected = theirs(made, messages, tools, trained_with)
    try:
        found = ours(made, messages, tools, trained_with)
    except DataError as error:
        # TRL learns an end token alone where the template leaves out a tool call, or all words.
        assert expected is None or "leaves out" in str(error)
        return
    if expected is not None:
        assert found == expected
        check_own(made, messages, tools, expected)


# What becomes of words in parts under the templates that TRL trains with, where it is not what
# becomes of words.
PARTS = {
    "the words are left out": {"qwen3", "qwen3_instruct_2507"},
    "the list is written as Python or JSON writes it": {
        *("cohere2", "gemma", "lfm2", "lfm2_v2", "llama3"),
        *("nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra"),
    },
    "the template fails": {
        "cohere",
        "deepseek_r1_distill",
        "deepseekv3",
        "gptoss",
        "phi3",
        "phi3_5",
        "qwen2_5",
    },
}
# Beside these: a blank after the words of the system, a tool's output as Python writes it, a
# newline before a call.
PARTS_IN_PLACES = {
    ("diffusion_gemma", "system"),
    ("glm4moe", "tools"),
    ("qwen3_vl", "tools"),
    ("qwen3_vl", "a call"),
}


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_words_in_parts_are_learnt_as_words_and_where_trl_differs_is_known(
    name: str, chat: str
) -> None:
    (messages, tools), own = CHATS[chat], TEMPLATES[name].read_text()
    parts = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in messages]
    made = tokenizer(own)
    try:
        found = ours(made, messages, tools, None)
    except DataError as error:
        with pytest.raises(DataError, match=re.escape(str(error).partition("\n")[0])):
            ours(made, parts, tools, None)
        return
    assert ours(made, parts, tools, None) == found
    try:
        trained_with = get_training_chat_template(made) or own
    except ValueError:
        return
    how = {"chat_template": trained_with, "return_dict": True, "return_assistant_tokens_mask": True}
    expected = theirs(made, messages, tools, trained_with)
    try:
        encoded = made.apply_chat_template(parts, tools=tools, **how)
    except (TemplateError, TypeError):
        raw = chat == "system" and name in PARTS[
            "the list is written as Python or JSON writes it"
        ] | {"qwen3"}
        assert (
            expected is None or raw or name in {*PARTS["the template fails"], "qwen3_instruct_2507"}
        )
        return
    if expected is None or (encoded["input_ids"], encoded["assistant_masks"]) == expected:
        assert expected is None or name not in set().union(*PARTS.values())
        return
    written = made.decode(encoded["input_ids"])
    if name in PARTS["the words are left out"]:
        assert messages[0]["content"] not in written
    elif (name, chat) not in PARTS_IN_PLACES:
        assert name in PARTS["the list is written as Python or JSON writes it"]
        assert re.search(r"[\"']type[\"']: ", written)


def check_own(made: Any, messages: Any, tools: Any, expected: tuple[list[int], list[int]]) -> None:
    ids, learnt = ours(made, messages, tools, None)
    if ids != expected[0]:
        # TRL shows the thoughts of earlier turns, empty ones too
        assert "<think>" in made.decode(expected[0])
        return
    asked = [message["role"] for message in messages].index("assistant")
    prompt = made.apply_chat_template(
        messages[:asked], tools=tools, tokenize=False, add_generation_prompt=True
    )
    extra = []
    stretch = []
    for token, here, there in zip([*ids, 0], [*learnt, 0], [*expected[1], 0], strict=True):
        assert there or not here or made.decode([token]) == "<|tool_response>"
        if there and not here:
            stretch.append(token)
        elif stretch:
            extra.append(made.decode(stretch))
            stretch = []
    for text in extra:
        assert (
            not text.replace("</s>", "").strip()
            or text in prompt
            or text == f"<{BAR}tool▁outputs▁end{BAR}>"
        ), text


def test_a_dataset_of_the_library_is_read_as_a_list_of_rows() -> None:
    """Arrow fills the fields that a message does not have with nulls, which say nothing."""
    from datasets import Dataset

    template = TEMPLATES["qwen3"].read_text()
    rows = [
        {"messages": CHATS["tools"][0]},
        {"messages": [FIRST[0], FIRST[1] | {"train": False}, *SECOND]},
    ]
    files = SimpleNamespace(config=LlamaConfig(), tokenizer=tokenizer(template))
    said: list[str] = []
    config = LemaConfig("model", device="cpu")
    found = as_rows(Dataset.from_list(rows), config, cast(ModelFiles, files), said.append)
    expected = as_rows(rows, config, cast(ModelFiles, files), said.append)
    assert [row["labels"] for row in found] == [row["labels"] for row in expected]
    assert as_rows(found, config, None, said.append) is found
    assert said[0].startswith("data: 2 rows")
    streamed = as_rows(
        Dataset.from_list(rows).to_iterable_dataset(), config, cast(ModelFiles, files), said.append
    )
    assert streamed.fingerprint() == found.fingerprint() == expected.fingerprint()


def test_the_library_keeps_a_directory_as_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A data set that is named as one of the hub is read from the Arrow files in the library's
    cache.
    """
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"text": f"the river {n}"} for n in range(2500)]
    (tmp_path / "rivers").mkdir()
    (tmp_path / "rivers/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = load_rows(f"hub:{tmp_path / 'rivers'}?split=train")
    assert [row.values for row in found] == rows
    assert found[-1].origin.endswith(".arrow:2500")


def test_the_library_streams_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of a stream are those of the data set's files; none of these is kept, and a
    changed one is read.
    """
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "rivers").mkdir()
    for part in range(2):
        rows = [{"text": f"the river {part} {n}"} for n in range(700)]
        (tmp_path / f"rivers/train-{part}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    source = {"path": str(tmp_path / "rivers"), "streaming": True}
    config = LemaConfig(
        "model",
        train_data=cast(Any, source),
        max_train_samples=1000,
        data_cache=str(tmp_path / "kept"),
    )
    files = SimpleNamespace(
        config=LlamaConfig(), tokenizer=tokenizer(TEMPLATES["qwen3"].read_text())
    )
    read = partial(read_data, config, cast(ModelFiles, files), config.train_data)
    streamed = read()
    again = read()
    assert (
        not list(tmp_path.rglob("*.arrow")) and len(list((tmp_path / "kept").glob("*/tokens"))) == 1
    )
    whole = as_rows(f"hub:{tmp_path / 'rivers'}", config, cast(ModelFiles, files), lambda _: None)
    assert streamed.fingerprint() == again.fingerprint() == whole.select(range(1000)).fingerprint()
    (tmp_path / "rivers/train-0.jsonl").write_text('{"text": "the only one"}\n')
    assert len(read()) == 701


@pytest.mark.parametrize(
    "split",
    [
        "train[33%:66%]",
        "train[:10]+train[50%:]",
        "train[-7:]",
        "test[:3]+train[90%:]",
        "train[5:-5]",
    ],
)
def test_a_part_of_a_split_has_the_rows_of_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str
) -> None:
    """Row for row, of a directory that the library reads and of a file that LEMA reads itself."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "rivers"
    folder.mkdir()
    for name, count in (("train", 37), ("test", 13)):
        lines = [json.dumps({"text": f"{name} {number}"}) + "\n" for number in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    expected = list(datasets.load_dataset(str(folder), split=split)["text"])
    rows = load_rows({"path": str(folder), "split": split})
    assert [row.values["text"] for row in rows] == expected
    if "test" not in split:
        alone = {"path": str(folder / "train.jsonl"), "split": split}
        assert [row.values["text"] for row in load_rows(alone)] == expected
