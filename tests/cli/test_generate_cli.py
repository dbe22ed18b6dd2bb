"""`lema generate --prompts`: what is read, what is written, and what a run that was stopped goes
on with.
"""

import io
import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from clirun import CHATS, TEXTS, config_writer, lema, write_rows
from smallrun import SENTENCES, tokenizer

from lema import LemaConfig, LemaModel
from lema.data import prepare_data
from lema.data.columns import alpaca_prompt
from lema.model.files import ModelFiles
from lema_tools.generation.stream import ShownText

Read = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def config(llama: Path, tmp_path: Path) -> Path:
    return config_writer(llama, tmp_path)()


def results(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_file_of_prompts_becomes_a_file_of_results(
    config: Path, tmp_path: Path, capfd: Any
) -> None:
    prompts = write_rows(tmp_path / "prompts.txt", [{"text": text} for text in SENTENCES[:5]])
    out = tmp_path / "out.jsonl"
    capfd.readouterr()
    assert (
        lema(
            "generate",
            config,
            "--prompts",
            prompts,
            "--output",
            out,
            "--max-new-tokens",
            3,
            "--batch-size",
            2,
        )
        == 0
    )
    printed, said = capfd.readouterr()
    assert printed == ""
    assert "5 prompts, 2 at once, prompts of up to " in said
    assert " of keys and values on the device, " in said
    assert "15 tokens, " in said
    found = results(out)
    assert [one["index"] for one in found] == list(range(5))
    assert [one["prompt"] for one in found] == SENTENCES[:5]
    lengths = [len(tokenizer()(text)["input_ids"]) for text in SENTENCES[:5]]
    assert [one["prompt_tokens"] for one in found] == lengths
    assert {(one["completion_tokens"], one["finish_reason"]) for one in found} == {(3, "length")}
    assert (
        lema("generate", config, "-p", SENTENCES[0], "-p", SENTENCES[1], "--max-new-tokens", 3) == 0
    )
    assert capfd.readouterr().out == "".join(one["completion"] + "\n" for one in found[:2])


def test_a_run_that_was_stopped_goes_on_and_ends_the_same(
    config: Path, tmp_path: Path, capfd: Any
) -> None:
    rows = [{"prompt": text, "id": number} for number, text in enumerate(SENTENCES[:7])]
    prompts = write_rows(tmp_path / "prompts.jsonl", rows)
    out = tmp_path / "out.jsonl"
    command = [
        "generate",
        config,
        "--prompts",
        prompts,
        "--output",
        out,
        "--max-new-tokens",
        4,
        "--batch-size",
        2,
    ]
    command += ["--temperature", 0.9, "--seed", 5]
    assert lema(*command) == 0
    whole = out.read_bytes()
    assert [one["id"] for one in results(out)] == list(range(7))
    assert lema(*command) == 2
    assert "the output already has results" in capfd.readouterr().err
    lines = whole.splitlines(keepends=True)
    out.write_bytes(lines[5] + lines[2] + lines[0][:10])  # in any order, and the last cut off
    assert lema(*command, "--resume") == 0
    assert out.read_bytes() == whole
    write_rows(prompts, [{"prompt": "other"}, *rows[1:]])
    assert lema(*command, "--resume") == 2
    assert f"{out}:1" in capfd.readouterr().err
    assert out.read_bytes() == whole


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--temperature", "1e-300"),
        ("--temperature", "1e308"),
        ("--temperature", "nan"),
        ("--repetition-penalty", "0"),
        ("--top-p", "nan"),
        ("--top-k", "9" * 30),
        ("--seed", "9" * 20),
        ("--max-new-tokens", "9" * 4000),
        ("--batch-size", str(2**64)),
    ],
)
def test_numbers_at_their_edges_are_named(
    option: str, value: str, config: Path, capfd: Any
) -> None:
    capfd.readouterr()
    assert lema("generate", config, "-p", "a", "--do-sample", option, value) == 2
    error = capfd.readouterr().err
    assert option in error and "Traceback" not in error and len(error) < 1000


def test_results_are_there_when_a_later_batch_fails(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lema.train.inference import texts

    prompts = write_rows(tmp_path / "prompts.txt", [{"text": one} for one in SENTENCES[:6]])
    out = tmp_path / "o.jsonl"
    real = texts.complete
    calls = []

    def complete(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args, **options)

    monkeypatch.setattr(texts, "complete", complete)
    command = [
        "generate",
        config,
        "--prompts",
        prompts,
        "--output",
        out,
        "--max-new-tokens",
        2,
        "--batch-size",
        2,
    ]
    assert lema(*command) == 130
    assert len(results(out)) == 4
    assert lema(*command, "--resume") == 0
    assert [one["index"] for one in results(out)] == list(range(6))
    assert len(calls) == 4


def test_messages_and_with_chat_texts_go_through_the_template(
    config: Path, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = [{"role": "user", "content": "corn"}]
    rows = {"prompt": "corn"}, {"prompt": said}, {"messages": said}
    found = []
    for row in rows:
        monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(row) + "\n"))
        capfd.readouterr()
        assert lema("generate", config, "--prompts", "-", "--max-new-tokens", 3, "--chat") == 0
        found.append(json.loads(capfd.readouterr().out))
        assert found[-1].items() >= row.items()
    assert len({one["completion"] for one in found}) == 1
    templated = "[user]corn[end][assistant]"
    assert lema("generate", config, "-p", templated, "--max-new-tokens", 3) == 0
    assert capfd.readouterr().out == found[0]["completion"] + "\n"
    assert found[0]["prompt_tokens"] == len(tokenizer()(templated)["input_ids"])
    monkeypatch.setattr("sys.stdin", io.StringIO("corn\nmill\n\n"))
    assert lema("generate", config, "--prompts", "-", "--max-new-tokens", 1) == 0
    assert [json.loads(line)["prompt"] for line in capfd.readouterr().out.splitlines()] in (
        ["corn", "mill"],
        ["mill", "corn"],
    )


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--prompts", "{prompts}", "-p", "corn"], 2, "prompts must come from one place"),
        ([], 2, "prompts must come from one place"),
        (["-p", "corn", "--top-k", "5"], 2, "--top-k"),
        (["-p", "corn", "--temperature", "0", "--do-sample"], 2, "--do-sample"),
        (["-p", "corn", "--resume"], 2, "--output"),
        (["-p", "corn", "--kv", "disk"], 2, "'disk' is not a place"),
        (["-p", "corn", "--max-new-tokens", "127"], 3, "more than the 128 that the model takes"),
        (["--prompts", "{answered}"], 3, "the last message is the assistant's"),
        (["--prompts", "{columns}"], 3, "no prompt: its columns are question"),
        (
            ["--prompts", "{prompts}", "--set", "device_memory=1MB", "--max-new-tokens", "90"],
            4,
            "do not fit",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    config: Path, tmp_path: Path, arguments: list[str], code: int, said: str, capfd: Any
) -> None:
    places = {
        "prompts": write_rows(tmp_path / "prompts.txt", [{"text": "the miller"}] * 64),
        "answered": write_rows(
            tmp_path / "answered.jsonl",
            [{"messages": [{"role": "assistant", "content": "I am the miller"}]}],
        ),
        "columns": write_rows(tmp_path / "columns.jsonl", [{"question": "who?"}]),
    }
    batch = ["--batch-size", "64"]
    assert lema("generate", config, *(one.format(**places) for one in arguments), *batch) == code
    assert said in capfd.readouterr().err


def test_a_prompt_is_written_as_the_rows_of_the_training_were(
    llama: Path, tmp_path: Path, capfd: Any
) -> None:
    """After a run on chats `--prompt` is a message, and after one on text it is text, though the
    tokenizer has a chat template; the adapter's directory says which, without the data."""
    texts = ["[user]corn[end][assistant]", "corn"]
    for name, rows, written in (("chats", CHATS, texts[0]), ("texts", TEXTS, texts[1])):
        data = write_rows(tmp_path / f"{name}.jsonl", rows)
        out = tmp_path / name
        run = config_writer(llama, tmp_path)(
            train_data=str(data),
            eval_data=str(data),
            eval_prompts=["corn"],
            eval_prompts_max_new_tokens=3,
            output_dir=str(out),
        )
        assert lema("train", run) == 0
        data.unlink()
        found = []
        for asked in (["-p", "corn"], ["--raw", "-p", written]):
            capfd.readouterr()
            assert lema("generate", out, *asked, "--max-new-tokens", 3) == 0
            found.append(capfd.readouterr())
        assert found[0].out == found[1].out
        kind = "chats" if name == "chats" else "text"
        assert f"because the run was trained on {kind}" in found[0].err
        assert "because" not in found[1].err
        with closing(LemaModel.from_pretrained(out)) as model:
            assert model.generate("corn", 3) == model.generate(written, 3, chat=False)
            last = model.generate(written, 3, chat=False, do_sample=False)
        assert results(out / "samples.jsonl")[-1]["completion"] == last[0]
    assert lema("generate", run, "--raw", "--chat", "-p", "corn") == 2


def test_alpaca_rows_make_prompts_instructions(llama: Path, tmp_path: Path, capfd: Any) -> None:
    base = shutil.copytree(llama, tmp_path / "bare")
    (base / "chat_template.jinja").unlink()
    about = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(about | {"max_position_embeddings": 512}))
    rows = [{"instruction": f"grind {n}", "output": "corn"} for n in range(4)]
    data = write_rows(tmp_path / "alpaca.jsonl", rows)
    run = config_writer(base, tmp_path)(train_data=str(data), max_length=128)
    found = []
    for asked in (["-p", "grind"], ["--raw", "-p", alpaca_prompt("grind")]):
        capfd.readouterr()
        assert lema("generate", run, *asked, "--max-new-tokens", 3) == 0
        found.append(capfd.readouterr())
    assert found[0].out == found[1].out and "prompts are instructions" in found[0].err
    files = ModelFiles(LemaConfig(str(base)))
    files.note_rows(prepare_data(data, tokenizer(), max_length=64))  # where there is a template
    assert files.row_forms == ("chat",)


def test_a_model_without_a_run_goes_by_its_tokenizer(llama: Path, capfd: Any) -> None:
    found = []
    for asked in (["-p", "corn"], ["--raw", "-p", "[user]corn[end][assistant]"]):
        capfd.readouterr()
        assert lema("generate", llama, *asked, "--max-new-tokens", 3) == 0
        found.append(capfd.readouterr())
    assert found[0].out == found[1].out
    assert "because the tokenizer has a chat template" in found[0].err


def test_a_text_is_shown_as_it_is_made_but_for_half_characters_and_strings_to_stop_at() -> None:
    encode = tokenizer()
    parts = list[str]()
    shown = ShownText(encode, ["river"], parts.append)
    shown.put(torch.tensor([[1, 2, 3]]))  # the prompt
    for token in encode("mühle by the rim river and on").input_ids:
        shown.put(torch.tensor([token]))
    shown.end()
    assert "".join(parts) == "mühle by the rim \n" and len(parts) > 4
    assert not any("\ufffd" in part for part in parts)
