"""Pairs and labelled rows, from files to batches."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from lema.data import prepare_data
from lema.data.dataset import first_rows
from lema.data.preference import EXAMPLE, ExampleColumn, PreferenceDataset, prepare_preferences
from lema.errors import DataError

PAIR = {
    "prompt": "The river",
    "chosen": " runs past the mill.",
    "rejected": " is asked a question, and the answer is no.",
}
CHAT = {
    "prompt": [{"role": "user", "content": "what is the name of the river?"}],
    "chosen": [{"role": "assistant", "content": "The river is long."}],
    "rejected": [{"role": "assistant", "content": "The bridge."}],
}
Make = Callable[..., PreTrainedTokenizerFast]


def read(
    rows: list[dict[str, Any]] | Path, tokenizer: Any, *, labelled: bool = False, **options: Any
) -> PreferenceDataset:
    return prepare_preferences(rows, tokenizer, labelled=labelled, **{"max_length": 100, **options})


def learnt(row: dict[str, list[int]], tokenizer: Any) -> str:
    return str(tokenizer.decode([one for one in row["labels"] if one != -100]))


def test_a_pair_has_one_prompt_and_ends_in_the_end_of_sequence(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    (chosen, rejected) = read([PAIR], tokenizer)[0]
    for row, side in ((chosen, "chosen"), (rejected, "rejected")):
        assert row["input_ids"] == tokenizer(PAIR["prompt"] + PAIR[side] + "</s>")["input_ids"]
        assert learnt(row, tokenizer) == f"{PAIR[side]}</s>"


def test_an_end_of_sequence_that_is_there_is_not_added(tokenizer: PreTrainedTokenizerFast) -> None:
    ended = PAIR | {"chosen": PAIR["chosen"] + "</s>"}
    assert read([ended], tokenizer)[0] == read([PAIR], tokenizer)[0]


def test_what_two_sides_begin_with_is_the_prompt_of_a_pair_without_one(
    make_tokenizer: Make, templates: Any
) -> None:
    tokenizer = make_tokenizer(templates["plain"])
    text = {side: PAIR["prompt"] + PAIR[side] for side in ("chosen", "rejected")}
    assert read([text], tokenizer)[0] == read([PAIR], tokenizer)[0]
    whole = {side: CHAT["prompt"] + CHAT[side] for side in ("chosen", "rejected")}
    assert read([whole], tokenizer)[0] == read([CHAT], tokenizer)[0]


def test_chats_are_written_by_the_template_and_their_answers_learnt(
    make_tokenizer: Make, templates: Any
) -> None:
    tokenizer = make_tokenizer(templates["plain"])
    chosen, rejected = read([CHAT], tokenizer)[0]
    assert learnt(chosen, tokenizer) == "The river is long.<|im_end|>\n"
    assert learnt(rejected, tokenizer) == "The bridge.<|im_end|>\n"


def test_long_rows_are_cut_and_examples_without_a_completion_dropped(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    long = PAIR | {"prompt": "The river " * 40}
    found = read([PAIR, long], tokenizer, max_length=12)
    assert (len(found), found.counts.dropped, found.counts.truncated) == (1, 1, 1)
    assert [len(row["input_ids"]) for row in found[0]] == [
        min(12, len(row["input_ids"])) for row in read([PAIR], tokenizer)[0]
    ]
    assert len(read([PAIR, PAIR], tokenizer, max_length=100)) == 2
    with pytest.raises(DataError, match="more than max_length=12"):
        read([PAIR], tokenizer, max_length=12, overlong="error")
    with pytest.raises(DataError, match="1 were dropped"):
        read([PAIR], tokenizer, max_length=12, overlong="drop")


def test_a_batch_of_pairs_says_of_each_row_what_it_is(tokenizer: PreTrainedTokenizerFast) -> None:
    data = read([PAIR, PAIR | {"prompt": "A question"}, PAIR | {"prompt": "The mill"}], tokenizer)
    batch: Any = data.batch_of([2, 0, 1], [0, 1])
    assert batch["input_ids"].shape[0] == 4
    about = batch[EXAMPLE]
    assert about[:, ExampleColumn.INDEX].tolist() == [1, 1, 2, 2]
    assert about[:, ExampleColumn.LABEL].tolist() == [1, 0, 1, 0]
    assert set(about[:, ExampleColumn.EXAMPLES].tolist()) == {3}
    chosen = [data[place][0] for place in range(3)]
    assert set(about[:, ExampleColumn.TOKENS].tolist()) == {
        sum(sum(one != -100 for one in row["labels"]) for row in chosen)
    }
    assert set(about[:, ExampleColumn.ALL_TOKENS].tolist()) == {
        sum(len(row["labels"]) - 1 for row in chosen)
    }


def test_labelled_rows_come_with_the_completion_of_the_row_before(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    rows = [
        {"prompt": prompt, "completion": completion, "label": label}
        for prompt, completion, label in (
            ("The river", " runs.", True),
            ("A question is", " asked.", False),
            ("user", " the mill", 1),
        )
    ]
    data = read(rows, tokenizer, labelled=True)
    batch: Any = data.batch_of([1, 2, 0], [1, 2, 0])
    assert batch[EXAMPLE][:, ExampleColumn.LABEL].tolist() == [0, 1, 1]
    for row, before in ((0, 0), (1, 1), (2, 2)):
        own = rows[[1, 2, 0][row]]
        other = rows[[0, 1, 2][before]]
        ids = batch["mismatched_input_ids"][row][
            batch["mismatched_attention_mask"][row] == 1
        ].tolist()
        expected = (
            tokenizer(own["prompt"])["input_ids"]
            + tokenizer(other["completion"] + "</s>")["input_ids"][1:]
        )
        assert ids == expected
        labels = [one for one in batch["mismatched_labels"][row].tolist() if one != -100]
        assert labels == tokenizer(other["completion"] + "</s>")["input_ids"][1:]


def test_a_pair_is_two_labelled_rows_that_do_not_lie_side_by_side(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    data = read([PAIR, PAIR | {"prompt": "The mill"}], tokenizer, labelled=True)
    batch: Any = data.batch_of([0, 1, 2, 3], [0, 1, 2, 3])
    assert batch[EXAMPLE][:, ExampleColumn.LABEL].tolist() == [1, 1, 0, 0]


def test_the_first_examples_of_kept_tokens_keep_what_is_said_of_the_data(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lema.data.cache.SMALL", 0)
    file = tmp_path / "pairs.jsonl"
    file.write_text(
        "".join(json.dumps(PAIR | {"prompt": f"The {number}"}) + "\n" for number in range(3))
    )
    data = prepare_preferences(
        file, tokenizer, labelled=False, max_length=100, cache=tmp_path / "kept"
    )
    first = first_rows(data, 2)
    assert first.notes == data.notes and data.notes
    assert list(first) == data[:2]


def test_held_back_examples_and_fingerprints(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [PAIR | {"prompt": f"The {number}"} for number in range(8)]
    data = read(rows, tokenizer)
    train, held = data.split(2, seed=1)
    assert (len(train), len(held)) == (6, 2)
    both = [*train, *held]
    assert sorted(map(str, both)) == sorted(map(str, data))
    assert (
        data.fingerprint()
        == read(rows, tokenizer).fingerprint()
        != read(rows[::-1], tokenizer).fingerprint()
    )


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "The river"}, "the columns do not form a preference example"),
        ({"prompt": "a", "completion": "b", "label": True}, "objective: kto"),
        (PAIR | {"rejected": PAIR["chosen"]}, "are equal"),
        (PAIR | {"chosen": CHAT["chosen"]}, "only some parts of the example are text"),
        (PAIR | {"chosen": ""}, "'chosen'|'text' is empty"),
        ({"chosen": CHAT["chosen"], "rejected": CHAT["rejected"]}, "begin differently"),
        (CHAT, "no chat template"),
    ],
)
def test_what_is_no_pair_is_refused(
    row: dict[str, Any], said: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(DataError, match=said):
        read([row], tokenizer)


def test_a_label_that_is_none_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match="'label' should be true or false, not 'good'"):
        read([{"prompt": "a", "completion": " b", "label": "good"}], tokenizer, labelled=True)


@pytest.mark.parametrize("side", ["prompt", "chosen", "rejected"])
@pytest.mark.parametrize("chat", [False, True])
def test_a_word_of_a_million_letters_is_refused_by_its_row(
    side: str, chat: bool, make_tokenizer: Make, templates: Any, write: Callable[..., Path]
) -> None:
    """A tokenizer takes gigabytes for it."""
    long = " " + "é" * ((1 << 20) + 1)
    row = CHAT | {side: [{**CHAT[side][0], "content": long}]} if chat else PAIR | {side: long}
    with pytest.raises(DataError, match="a word of more than 1,048,576 characters") as caught:
        read(write("rows.jsonl", [PAIR, row]), make_tokenizer(templates["plain"]))
    assert "rows.jsonl:2" in str(caught.value)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (PAIR, "set objective: dpo"),
        ({"chosen": "a b", "rejected": "a c"}, "set objective: dpo"),
        ({"prompt": "a", "completion": " b", "label": False}, "set objective: kto"),
        (
            {"messages": CHAT["prompt"], "chosen": CHAT["chosen"], "rejected": CHAT["rejected"]},
            "set objective: dpo",
        ),
    ],
)
def test_cross_entropy_does_not_learn_what_is_not_to_be_learnt(
    row: dict[str, Any], said: str, write: Callable[..., Path], tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(DataError, match=said):
        prepare_data(write("rows.jsonl", [row]), tokenizer, max_length=50)
