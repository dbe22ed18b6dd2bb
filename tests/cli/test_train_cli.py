"""`lema train`, `eval`, `generate` and `prepare` on files: what a user types, and what is
printed and written.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clirun import (
    CHATS,
    PAIRS,
    TEXTS,
    Rows,
    assert_refused,
    assert_same_adapter,
    config_writer,
    lema,
    write_rows,
)
from smallrun import SENTENCES, adapter_of, token_rows, tokenizer, whole_model, write_model

from lema import LemaModel
from lema.data import prepare_data
from lema.train.metrics import read_metrics


@pytest.fixture
def write_config(llama: Path, tmp_path: Path) -> Callable[..., Path]:
    return config_writer(llama, tmp_path)


@pytest.mark.picture
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "rows", "all_learnt"),
    [
        ("data.jsonl", TEXTS, True),
        ("data.json", TEXTS, True),
        ("data.txt", TEXTS, True),
        ("data.csv", PAIRS, False),
        ("data.parquet", PAIRS, False),
        ("chats.jsonl", CHATS, False),
        ("tokens.parquet", token_rows(8), False),
    ],
)
def test_training_reads_every_format_and_says_what_it_found(
    name: str,
    rows: Rows,
    all_learnt: bool,
    write_config: Any,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    file = write_rows(tmp_path / name, rows)
    config = write_config(train_data=str(file), eval_split=2)
    capfd.readouterr()
    assert lema("train", config) == 0
    out, err = capfd.readouterr()
    assert err == ""
    lines = out.splitlines()
    train, evaluation = prepare_data(file, tokenizer(), max_length=64).split(2, 42)
    assert lines[0] == f"training data: {train.counts}"
    assert lines[1] == f"evaluation data: {evaluation.counts}"
    assert (train.counts.rows, evaluation.counts.rows) == (6, 2)
    assert (train.counts.trained_tokens == train.counts.tokens - 6) is all_learnt
    assert re.fullmatch(r"plan: fits in [\d.]+ GB of device memory, 4 rows at once", lines[2])
    assert re.fullmatch(
        r"8 layers \(0 resident\), \d+ kB of weights; [\d,]+ adapter parameters; device cpu",
        lines[3],
    )
    steps = [line for line in lines if line.startswith("step") and " eval loss " not in line]
    assert [line.split()[:2] for line in steps] == [["step", "1/2"], ["step", "2/2"]]
    for word in ("lr 5.00e-03", "tok/s", "read", "memory"):
        assert word in steps[1]
    assert sum(" eval loss " in line for line in lines) == 1
    assert re.fullmatch(
        r"ended at step 2 after [\d.]+ ?\w+: mean loss \d\.\d{4}, [\d.]+k? tokens/s", lines[-5]
    )
    assert re.fullmatch(
        r"best evaluation: eval_loss \d\.\d{4} at step 2, the adapter is from the last step",
        lines[-4],
    )
    out = tmp_path / "out"
    assert lines[-3:] == [
        f"adapter: {out}",
        f"next: lema generate {out} -p TEXT",
        f"next: lema report {out}",
    ]
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert {
        "adapter_model.safetensors",
        "adapter_config.json",
        "metrics.jsonl",
        "loss.png",
    } <= written


@pytest.mark.filterwarnings("ignore:this run may learn nothing")
def test_a_run_says_which_step_was_best_and_begins_with_a_saved_adapter(
    llama: Path, write_config: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = {
        "eval_split": 2,
        "eval_steps": 1,
        "load_best_model_at_end": True,
        "max_train_samples": 4,
    }
    assert lema("train", write_config(**first)) == 0
    out = capfd.readouterr().out
    assert "training data: 4 rows, " in out
    assert re.search(
        r"\nbest evaluation: eval_loss \d\.\d{4} at step \d, whose adapter is kept\n", out
    )
    # Of the rank of the first, which nothing else names.
    second = write_config(
        adapter_name_or_path=str(tmp_path / "out"),
        output_dir=str(tmp_path / "second"),
        learning_rate=0.0,
        lora_rank=None,
        lora_alpha=None,
    )
    assert lema("plan", second, "--profile", "t4", "--json", "--set", "device=cpu") == 0
    planned = json.loads(capfd.readouterr().out)
    assert (
        lema("plan", second, "--profile", "t4", "--json", "--set", "adapter_name_or_path=null") == 0
    )
    fresh = json.loads(capfd.readouterr().out)
    assert planned["memory"] != fresh["memory"]
    assert lema("train", second) == 0
    assert_same_adapter(tmp_path / "second", tmp_path / "out")
    elsewhere = "--set", f"output_dir={tmp_path / 'third'}"
    assert_refused(
        capfd, 2, ["lora_rank is 7"], "train", second, "--set", "lora_rank=7", *elsewhere
    )


def test_the_whole_plan_of_a_run_that_is_not_timed_is_shown(
    write_config: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # nothing of which is read in a step
    model = write_model(tmp_path / "model", num_hidden_layers=2)
    config = write_config(
        model_name_or_path=str(model), device_memory=None, gradient_checkpointing=None
    )
    assert lema("train", config, "--verbose") == 0
    out = capfd.readouterr().out
    assert re.search(r"^fits, with [\d.]+ \wB of [\d.]+ GB of device memory$", out, re.MULTILINE)
    assert "tokens of full rows" in out and "an epoch" in out
    assert "tokens per second" not in out and "limited by" not in out and "takes" not in out


def test_token_ids_need_no_tokenizer(
    llama: Path, write_config: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(llama, bare, ignore=shutil.ignore_patterns("token*", "chat*"))
    rows = token_rows(6)
    write_rows(tmp_path / "tokens.jsonl", rows)
    assert (
        lema(
            "train",
            write_config(model_name_or_path=str(bare), train_data=str(tmp_path / "tokens.jsonl")),
        )
        == 0
    )
    tokens = sum(len(row["input_ids"]) for row in rows)
    assert f"6 rows, {tokens} tokens, {tokens - 12} of them trained on" in capfd.readouterr().out
    assert (
        lema(
            "train", write_config(model_name_or_path=str(bare), output_dir=str(tmp_path / "other"))
        )
        == 3
    )
    assert "the model has no tokenizer" in capfd.readouterr().err


def test_rows_that_are_cut_or_dropped_are_counted(
    write_config: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    long = " ".join(SENTENCES[:3])
    rows = [
        *PAIRS[:3],
        {"prompt": "corn", "completion": long},
        {"prompt": long, "completion": "corn"},
    ]
    write_rows(tmp_path / "data.jsonl", rows)
    assert lema("train", write_config(max_length=20, max_steps=1)) == 0
    assert "4 rows, " in (out := capfd.readouterr().out)
    assert re.search(
        r"1 rows truncated \(\d+ tokens cut off, \d+ of them to be trained on\); 1 rows dropped\n",
        out,
    )


def test_a_line_is_a_record_however_long_and_whatever_is_in_it(
    write_config: Any,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    out = tmp_path / "[bold]runs[bold]" / ":smile:"
    assert lema("train", write_config(output_dir=str(out), max_steps=1)) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[-3] == f"adapter: {out}"
    assert len(lines[0]) > 40
    assert lines[0].endswith("of them trained on")  # nothing is cut or dropped


@pytest.mark.slow
def test_a_run_resumes_where_it_stopped(
    write_config: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shared = {"lora_dropout": 0.1, "save_steps": 1, "lr_scheduler_type": "constant"}
    assert (
        lema("train", write_config(**shared, max_steps=4, output_dir=str(tmp_path / "straight")))
        == 0
    )
    config = write_config(**shared, max_steps=2)
    assert lema("train", config) == 0
    assert lema("train", config) == 2
    assert "checkpoints of an earlier run" in capfd.readouterr().err
    assert lema("train", config, "--resume", "--set", "max_steps=4") == 0
    out = capfd.readouterr().out
    assert [line.split()[1] for line in out.splitlines() if line.startswith("step")] == [
        "3/4",
        "4/4",
    ]
    assert_same_adapter(tmp_path / "out", tmp_path / "straight")
    assert lema("train", config, "--resume", "--set", "max_steps=4") == 0
    assert "nothing was left to train" in capfd.readouterr().out
    assert_same_adapter(tmp_path / "out", tmp_path / "straight")
    losses = [
        [row["loss"] for row in rows(tmp_path / name) if "loss" in row]
        for name in ("out", "straight")
    ]
    assert losses[0] == losses[1]


def rows(directory: Path) -> Rows:
    return read_metrics(directory / "metrics.jsonl")


@pytest.mark.slow
def test_evaluation_of_what_was_trained_agrees_with_training(
    write_config: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = write_config(eval_split=0.25, num_train_epochs=2.0, max_steps=None)
    assert lema("eval", config) == 0
    before = capfd.readouterr()
    assert before.err == f"no adapter in {tmp_path / 'out'} yet: this is the base model\n"
    assert lema("train", config) == 0
    last = next(row["eval_loss"] for row in reversed(rows(tmp_path / "out")) if "eval_loss" in row)
    capfd.readouterr()
    assert lema("eval", config) == 0
    found = dict(line.split() for line in capfd.readouterr().out.splitlines())
    assert float(found["eval_loss"]) == pytest.approx(last, rel=1e-5)
    assert float(found["eval_loss"]) < float(
        dict(line.split() for line in before.out.splitlines())["eval_loss"]
    )
    assert set(found) == {"eval_loss", "eval_perplexity", "eval_tokens"}
    assert (
        lema("eval", tmp_path / "out", "--data", tmp_path / "data.jsonl", "--set", "batch_size=1")
        == 0
    )
    tokens = prepare_data(tmp_path / "data.jsonl", tokenizer(), max_length=64).counts.trained_tokens
    assert f"eval_tokens {tokens}\n" in capfd.readouterr().out


@pytest.mark.slow
def test_generation_prints_what_the_whole_model_says(
    llama: Path, write_config: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = write_config()
    assert lema("train", config) == 0
    capfd.readouterr()
    encode = tokenizer()
    expected = []
    whole = whole_model(llama, tmp_path / "out")
    for prompt in ("the miller", "corn"):
        ids = encode(prompt, return_tensors="pt")["input_ids"]
        tokens = whole.generate(input_ids=ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
        expected.append(encode.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True))
    capfd.readouterr()
    for source in (config, tmp_path / "out"):
        assert (
            lema("generate", source, "-p", "the miller", "-p", "corn", "--max-new-tokens", 5) == 0
        )
        out, err = capfd.readouterr()
        assert out == "".join(text + "\n" for text in expected)
        assert err.splitlines() == [
            "prompts are continued as they are, because the run was trained on text; --chat writes "
            "them as messages"
        ]
    assert (
        lema(
            "generate",
            config,
            "-p",
            "corn",
            "--temperature",
            "0.9",
            "--top-p",
            "0.8",
            "--max-new-tokens",
            2,
        )
        == 0
    )
    assert "because the run was trained on text" in capfd.readouterr().err
    assert lema("generate", config, "-p", "") == 3
    assert "'prompt' is empty" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prepared", "prepared.safetensors"])
def test_a_prepared_model_trains_to_the_same_adapter(
    llama: Path, name: str, write_config: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert lema("prepare", llama, tmp_path / name) == 0
    assert re.search(
        rf"wrote {re.escape(str(tmp_path / name))}: .* in .* s, .*/s\n$", capfd.readouterr().out
    )
    single = name.endswith(".safetensors")
    one = (
        {"gbi_path": str(tmp_path / name)}
        if single
        else {"model_name_or_path": str(tmp_path / name)}
    )
    assert (
        lema("train", write_config(**one, output_dir=str(tmp_path / "one"), strategy="resident"))
        == 0
    )
    assert lema("train", write_config(output_dir=str(tmp_path / "shards"))) == 0
    assert_same_adapter(tmp_path / "one", tmp_path / "shards")


@pytest.mark.slow
def test_the_resolved_settings_are_what_the_run_uses(
    write_config: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = write_config()
    assert lema("config", "show", config, "--set", "lora_rank=2") == 0
    (tmp_path / "shown.yaml").write_text(capfd.readouterr().out)
    assert lema("train", tmp_path / "shown.yaml") == 0
    model = LemaModel.from_pretrained(tmp_path / "out")
    assert {
        tensor.shape[0] for name, tensor in adapter_of(model.skeleton).items() if "lora_A" in name
    } == {2}
    model.close()


def test_backends_that_run_here_are_listed(capfd: pytest.CaptureFixture[str]) -> None:
    assert lema("backends") == 0
    assert "cpu  ok\n  proven: x86-64, where all tests run\n" in capfd.readouterr().out


@pytest.mark.parametrize(("coefficient", "said"), [(0.001, True), (0.0, False)])
def test_a_routers_loss_that_is_left_out_is_said(
    coefficient: float,
    said: bool,
    write_config: Any,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    model = write_model(tmp_path / "model", router_aux_loss_coef=coefficient)
    file = write_rows(tmp_path / "data.jsonl", TEXTS)
    config = write_config(
        model_name_or_path=str(model), train_data=str(file), max_steps=1, report_to=[]
    )
    capfd.readouterr()
    assert lema("train", config) == 0
    assert ("leaves out the routers' auxiliary loss" in capfd.readouterr().out) is said


def test_a_run_says_once_that_no_tests_ran_with_a_release(
    write_config: Any,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lema.train.run.untested", lambda: "peft 0.99.1 (tests ran with 0.20)")
    config = write_config(train_data=str(write_rows(tmp_path / "data.jsonl", TEXTS)))
    assert lema("train", config) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines.count("not tested with peft 0.99.1 (tests ran with 0.20)") == 1
