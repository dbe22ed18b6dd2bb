"""`lema data` shows what a run will see; a run that opens kept tokens is the run that tokenises."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clirun import (
    CHATS,
    TEXTS,
    assert_refused,
    assert_same_adapter,
    config_writer,
    lema,
    write_rows,
)
from smallrun import token_rows, tokenizer

from lema.data import cache, prepare_data, read
from lema_tools.data import _tokens


@pytest.fixture
def write_config(llama: Path, tmp_path: Path) -> Callable[..., Path]:
    return config_writer(llama, tmp_path)


def shown(capfd: pytest.CaptureFixture[str], *words: Any) -> Any:
    capfd.readouterr()
    assert lema("data", *words) == 0
    return capfd.readouterr().out


def test_what_is_shown_is_what_the_data_set_holds(
    write_config: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    long = {
        "messages": [*CHATS[0]["messages"][:1], {"role": "assistant", "content": "miller " * 40}]
    }
    rows = [*CHATS, long | {"id": 7}, CHATS[0] | {"train": False}]
    file = write_rows(tmp_path / "chats.jsonl", rows)
    config = write_config(train_data=str(file), eval_split=2)
    expected = prepare_data(file, tokenizer(), max_length=64)
    found = json.loads(shown(capfd, config, "--json", "--rows", "2"))
    assert found["counts"]["rows"] == 9 and found["counts"]["tokens"] == expected.counts.tokens
    assert found["held_back"] == 2 and found["sources"] == {str(file): 9}
    assert (
        found["lengths"]["longest"] == 64
        and sum(number for _, number in found["lengths"]["histogram"]) == 9
    )
    whys = [(one["line"], one["why"]) for one in found["skipped"]]
    assert whys == [(9, "truncated"), (10, "left out because of train: false")]
    assert len(found["first"]) == 2
    for index, row in enumerate(found["first"]):
        assert [token["id"] for token in row["tokens"]] == expected[index]["input_ids"]
        labels = expected[index]["labels"]
        assert [token["trained"] for token in row["tokens"]] == [
            False,
            *(label != -100 for label in labels[1:]),
        ]
        assert "".join(token["text"] for token in row["tokens"]) == tokenizer().decode(
            expected[index]["input_ids"]
        )
        assert row["origin"] == expected.origin(index)


def test_a_reader_sees_words_and_brackets(
    write_config: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = write_rows(tmp_path / "chats.jsonl", [CHATS[0] | {"id": 7}, *CHATS[1:]])
    out = shown(capfd, write_config(train_data=str(file)))
    assert "8 rows, " in out and f"{file}  8" in out
    assert "LEMA does not use the column 'id' (1 row" in out
    last = out.split(f"{file}:1: ")[1]
    answer = "".join(
        part[1:-1] for part in last.split("|") if part.startswith("[") and part.endswith("]")
    )
    assert answer.endswith("the one[end]") and "miller" not in answer
    assert f"{file}:2: " not in out, "one row is shown unless more are asked for"


def test_tokens_that_command_a_terminal_are_written_out() -> None:
    token = {"id": 5, "text": "\x1b[2J", "trained": True}
    told = _tokens({"origin": "rows.jsonl:1", "tokens": [token]}, plain=True).plain
    assert "[\\x1b[2J]" in told and "\x1b" not in told


def test_rows_of_token_ids_need_no_tokenizer(
    write_config: Any, llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((llama / "config.json").read_bytes())
    file = write_rows(tmp_path / "tokens.jsonl", token_rows(4))
    config = write_config(train_data=str(file), model_name_or_path=str(bare))
    found = json.loads(shown(capfd, config, "--json"))
    assert [token["text"] for token in found["first"][0]["tokens"]] == [
        str(one) for one in token_rows(4)[0]["input_ids"]
    ]


def test_pairs_are_shown_row_by_row(
    write_config: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pairs = [
        {"prompt": "the miller ", "chosen": f"grinds {n}", "rejected": f"reads {n}"}
        for n in range(4)
    ]
    file = write_rows(tmp_path / "pairs.jsonl", pairs)
    found = json.loads(
        shown(capfd, write_config(train_data=str(file), objective="dpo"), "--json", "--rows", "2")
    )
    assert found["counts"]["rows"] == 8
    told = [
        "".join(one["text"] for one in row["tokens"] if one["trained"]) for row in found["first"]
    ]
    assert told == [" grinds 0<eos>", " reads 0<eos>"]


def test_data_sets_by_name_are_read_one_after_the_other(
    write_config: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    one = write_rows(tmp_path / "one.jsonl", TEXTS)
    other = write_rows(tmp_path / "two.jsonl", CHATS)
    config = write_config(
        train_data={"texts": str(one), "chats": [str(other)]}, eval_data={"texts": str(one)}
    )
    assert json.loads(shown(capfd, config, "--json"))["sources"] == {str(one): 8, str(other): 8}
    assert lema("train", config) == 0
    assert "training data: 16 rows" in capfd.readouterr().out


def test_what_cannot_be_shown_is_refused(
    write_config: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path / "bad.jsonl", [*TEXTS, {"text": ""}])
    assert_refused(
        capfd, 3, ["bad.jsonl:9"], "data", write_config(train_data=str(tmp_path / "bad.jsonl"))
    )
    mixture = tmp_path / "phases.yaml"
    mixture.write_text(
        f"model_name_or_path: m\ntrain_data: {{bad: {tmp_path / 'bad.jsonl'}}}\nphases:\n"
        "- {trains: full, tokens: 1e6, mixture: {bad: 1.0}, learning_rate: 1e-4}\n",
        encoding="utf-8",
    )
    assert_refused(capfd, 2, ["several data sets", "lema plan"], "data", mixture)


def test_a_run_goes_on_with_kept_tokens_and_tokenises_none(
    write_config: Any,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run that began without the cache, as runs did before there was one, is resumed with it."""
    monkeypatch.setattr(cache, "SMALL", 0)
    settings: dict[str, Any] = {
        "max_steps": 4,
        "eval_split": 2,
        "save_steps": 1,
        "lr_scheduler_type": "constant",
    }
    whole = write_config(**settings, data_cache=False, output_dir=str(tmp_path / "whole"))
    assert lema("train", whole) == 0
    parts = write_config(**settings, data_cache=False, output_dir=str(tmp_path / "parts"))
    assert lema("train", parts, "--set", "max_steps=1") == 0
    kept = f"data_cache={tmp_path / 'cache'}"
    assert lema("train", parts, "--resume", "--set", "max_steps=2", "--set", kept) == 0
    assert "kept in" in capfd.readouterr().out

    def refuse(*_: Any) -> None:
        raise AssertionError("a row is tokenised")

    monkeypatch.setattr(read, "tokenize_rows", refuse)
    assert lema("train", parts, "--resume", "--set", kept) == 0
    assert_same_adapter(tmp_path / "whole", tmp_path / "parts")


def test_shares_are_shown_and_a_run_of_them_goes_on(
    write_config: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The steps of a run that was stopped are those of one that was not; other shares are
    another run.
    """
    files = {
        "few": str(write_rows(tmp_path / "few.jsonl", CHATS[:3])),
        "all": str(write_rows(tmp_path / "all.jsonl", CHATS)),
    }
    settings: dict[str, Any] = {
        "train_data": files,
        "mixture": {"few": 0.5, "all": 0.5},
        "max_steps": 4,
        "save_steps": 1,
    }
    settings |= {"lr_scheduler_type": "constant"}
    whole = write_config(**settings, output_dir=str(tmp_path / "whole"))
    assert json.loads(shown(capfd, whole, "--json"))["sources"] == {
        files["few"]: 8,
        files["all"]: 8,
    }
    assert lema("train", whole) == 0
    assert "few 8 rows, each 2.67 times" in capfd.readouterr().out
    parts = write_config(**settings, output_dir=str(tmp_path / "parts"))
    assert lema("train", parts, "--set", "max_steps=2") == 0
    other = json.dumps({"few": 0.4, "all": 0.6})
    assert_refused(capfd, 2, ["mixture"], "train", parts, "--resume", "--set", f"mixture={other}")
    assert lema("train", parts, "--resume") == 0
    assert_same_adapter(tmp_path / "whole", tmp_path / "parts")
