"""`lema demo` shows what it says, writes what other tools read, and touches nothing that is not
its own.
"""

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lema.cli.app import app
from lema.cli.exitcodes import run
from lema.config import LemaConfig
from lema.data import prepare_data
from lema.errors import ConfigError, LemaError
from lema.train import LemaModel
from lema.train.metrics import read_metrics
from lema_tools.demo import claim, run_demo
from lema_tools.demo.run import MOST_DIFFERENCE, Outcome, check, logit_difference, next_commands

DIRECTORY = Path("lema-demo")  # the default; relative, as a user's is
STEPS = 24
# configs that several processes run: tests/neuron/test_launch.py has the commands in their headers
NEURON = "neuron_"
# which tests/train/test_image_runs.py and test_sound_runs.py run with models that see and hear
MEDIA = ("lora_images", "lora_audio")
CONFIGS = sorted(
    file
    for file in (Path(__file__).parents[2] / "configs").glob("*.yaml")
    if not file.name.startswith((NEURON, *MEDIA))
)


@dataclass(frozen=True)
class Finished:
    """A demo that ran: where from, what came of it, what it printed."""

    start: Path
    outcome: Outcome
    printed: str


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    start = tmp_path_factory.mktemp("demo")
    printed = io.StringIO()
    with contextlib.chdir(start):
        outcome = run_demo(DIRECTORY, max_steps=STEPS, console=Console(file=printed, width=80))
    return Finished(start, outcome, printed.getvalue())


@pytest.fixture
def there(finished: Finished, monkeypatch: pytest.MonkeyPatch) -> Finished:
    """The finished demo, in the directory from which it was run."""
    monkeypatch.chdir(finished.start)
    return finished


def commands(finished: Finished) -> list[str]:
    """The command lines under "What to try next"."""
    _, _, after = finished.printed.partition("What to try next\n")
    return [line.strip() for line in after.splitlines()]


def arguments_of(command: str) -> list[str]:
    """What a command line gives to lema, however lema is called in it."""
    words = shlex.split(command)
    place = next(place for place, word in enumerate(words) if Path(word).name == "lema")
    return words[place + 1 :]


def quickly(arguments: list[str]) -> list[str]:
    """The same, with a training of two steps; phases have the tokens that they say."""
    short = arguments[0] == "train" and "two_phase" not in arguments[1]
    return [*arguments, "--set", "max_steps=2"] if short else arguments


# What it shows


@pytest.mark.slow
def test_the_loss_falls(finished: Finished) -> None:
    # Random weights know nothing: what they expect of the next token is worse than expecting each
    # alike.
    assert finished.outcome.before.loss > 6
    assert finished.outcome.after.loss < finished.outcome.before.loss - 0.5
    rows = [
        row
        for row in read_metrics(finished.start / DIRECTORY / "adapter" / "metrics.jsonl")
        if "loss" in row
    ]
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.5


@pytest.mark.slow
def test_peft_makes_of_the_files_what_was_streamed(finished: Finished) -> None:
    assert finished.outcome.logit_difference <= 1e-6


@pytest.mark.slow
def test_it_prints_what_it_measured(finished: Finished) -> None:
    lines = finished.printed.splitlines()
    steps = [
        line for line in lines if line.startswith("step ") and "tok/s" in line and "read" in line
    ]
    assert 2 <= len(steps) <= STEPS // 5
    for words in (
        r"8 layers, .* in 5 files",
        r"3 layers at a time",
        r"\d+ steps in .* tokens/s, .* streamed",
    ):
        assert any(re.search(words, line) for line in lines), words
    before = finished.outcome.before
    after = finished.outcome.after
    assert f"before   held-out loss {before.loss:.3f}, perplexity {before.perplexity:.1f}" in lines
    assert f"after    held-out loss {after.loss:.3f}, perplexity {after.perplexity:.1f}" in lines
    assert f"PEFT: {finished.outcome.logit_difference:.2e}" in finished.printed


@pytest.mark.slow
def test_it_prints_nothing_a_terminal_would_obey(finished: Finished) -> None:
    assert finished.printed.isascii()
    assert all(character.isprintable() for character in finished.printed.replace("\n", ""))


@pytest.mark.slow
def test_every_file_it_names_is_there(there: Finished) -> None:
    _, _, after = there.printed.partition("Files\n")
    named = [line.split(maxsplit=1) for line in after.partition("What")[0].splitlines()]
    assert [name for name, _ in named] == [
        "model",
        "text",
        "chats",
        "pairs",
        "config",
        "adapter",
        "metrics",
        "curve",
    ]
    for _, place in named:
        assert Path(place).exists(), place


@pytest.mark.slow
def test_the_commands_it_suggests_work(
    there: Finished, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("When does the baker rise?\n"))  # for `lema chat`
    verbs = []
    for command in commands(there):
        arguments = arguments_of(command)
        assert run(app, quickly(arguments)) == 0, f"{command}\n{capsys.readouterr().err}"
        verbs.append(arguments[0])
    assert {"train", "generate", "eval", "merge"} <= set(verbs)
    assert all(
        (DIRECTORY / name / "adapter_model.safetensors").is_file() for name in ("rank8", "chat")
    )
    merged = AutoModelForCausalLM.from_pretrained(DIRECTORY / "merged")
    assert all(bool(parameter.isfinite().all()) for parameter in merged.parameters())


# What it leaves behind


@pytest.mark.slow
def test_the_model_is_a_sharded_hub_checkpoint(there: Finished) -> None:
    model = DIRECTORY / "model"
    index = json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
    found = {}
    for shard in set(index.values()):
        with safe_open(model / shard, framework="pt") as tensors:
            found.update(dict.fromkeys(tensors.keys(), shard))
    assert found == index
    assert len(set(index.values())) > 1
    config = AutoConfig.from_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert len(tokenizer) == config.vocab_size
    assert (model / "generation_config.json").is_file()
    text = "In January the harbour sleeps under snow; \u00e9\u4e2d\U0001f409."
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.slow
def test_the_text_names_its_source_and_the_rows_are_without_it(there: Finished) -> None:
    bundled = (files("lema_tools.demo") / "almanac.txt").read_text(encoding="utf-8").splitlines()
    head = [line for line in bundled if line.startswith("#")]
    assert any("Written for the LEMA project" in line for line in head)
    assert (DIRECTORY / "data" / "text.txt").read_text().splitlines() == bundled[len(head) :]


@pytest.mark.slow
def test_only_the_answers_of_the_chats_are_learnt(there: Finished) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DIRECTORY / "model")
    data = prepare_data(DIRECTORY / "data" / "chat.jsonl", tokenizer, max_length=128)
    for row, line in zip(
        data, (DIRECTORY / "data" / "chat.jsonl").read_text().splitlines(), strict=True
    ):
        question, answer = json.loads(line)["messages"]
        learnt = [token for token in row["labels"] if token != -100]
        assert tokenizer.decode(learnt) == f"{answer['content']}<|end|>"
        whole = f"<|user|>{question['content']}<|end|><|assistant|>{answer['content']}<|end|>"
        assert tokenizer.decode(row["input_ids"]) == whole


@pytest.mark.slow
def test_the_config_it_wrote_is_the_one_it_trained_with(there: Finished) -> None:
    used = LemaConfig.from_pretrained(DIRECTORY / "adapter").to_dict()
    assert LemaConfig.from_yaml(DIRECTORY / "train.yaml", max_steps=STEPS).to_dict() == used


@pytest.mark.slow
def test_the_config_trains_again_to_the_same_losses(
    there: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "train",
        str(DIRECTORY / "train.yaml"),
        "--set",
        f"max_steps={STEPS}",
        "--set",
        "logging_steps=1",
    ]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the demo does: sums of several threads round differently
    try:
        assert run(app, [*arguments, "--set", "output_dir=again"]) == 0, capsys.readouterr().err
    finally:
        torch.set_num_threads(threads)
    again = [
        row["eval_loss"]
        for row in read_metrics(Path("again") / "metrics.jsonl")
        if "eval_loss" in row
    ]
    assert again[-1] == there.outcome.after.loss


@pytest.mark.slow
def test_the_streamed_model_opened_from_the_files_agrees_with_peft_until_a_weight_changes(
    there: Finished,
) -> None:
    with contextlib.closing(LemaModel.from_pretrained(DIRECTORY / "adapter")) as model:
        row = prepare_data(
            [{"text": "The baker works with flour."}], model.tokenizer, max_length=64
        )
        assert logit_difference(model, there.outcome.files, row) <= 1e-6
        with torch.no_grad():
            model.get_trainable_parameters()[-1].add_(0.1)
        assert logit_difference(model, there.outcome.files, row) > MOST_DIFFERENCE


# When it has not shown what it says


@pytest.mark.slow
def test_a_loss_that_did_not_fall_is_an_error(finished: Finished) -> None:
    outcome = finished.outcome
    check(outcome)
    with pytest.raises(LemaError, match="did not fall"):
        check(replace(outcome, after=outcome.before))
    with pytest.raises(LemaError, match="did not fall"):
        check(replace(outcome, after=replace(outcome.after, loss=float("nan"))))


@pytest.mark.slow
@pytest.mark.parametrize("difference", [2 * MOST_DIFFERENCE, float("nan")])
def test_logits_that_differ_are_an_error(finished: Finished, difference: float) -> None:
    with pytest.raises(LemaError, match=r"PEFT's logits differ") as raised:
        check(replace(finished.outcome, logit_difference=difference))
    assert raised.value.exit_code != 0


# Whose directory it is


@pytest.mark.slow
def test_a_second_run_replaces_the_first_and_nothing_else(tmp_path: Path) -> None:
    directory = tmp_path / "my demo: #1 [b] 'x'"
    claim(directory)  # as a run that was killed leaves it, with files half written
    kept = [
        directory / "notes.txt",
        directory / "model" / "notes.json",
        directory / "adapter" / "mine.csv",
    ]
    stale = [
        directory / "model" / "model-00009-of-00009.safetensors",
        directory / "adapter" / "metrics.jsonl",
    ]
    for file in [*kept, *stale]:
        file.parent.mkdir(exist_ok=True)
        file.write_text("not JSON")
    printed = io.StringIO()
    outcome = run_demo(
        directory, max_steps=3, console=Console(file=printed, force_terminal=True, width=80)
    )
    assert [file.read_text() for file in kept] == ["not JSON"] * len(kept)
    assert not stale[0].exists()
    assert {row["step"] for row in read_metrics(stale[1])} <= set(range(4))
    assert "step 3/3" in printed.getvalue()  # the bar
    assert LemaConfig.from_yaml(outcome.files.config).model_name_or_path == str(directory / "model")
    train = next(
        arguments
        for arguments in map(arguments_of, next_commands(outcome.files))
        if arguments[0] == "train"
    )
    assert run(app, quickly(train)) == 0
    assert (directory / "rank8" / "adapter_config.json").is_file()


@contextlib.contextmanager
def untouched(directory: Path) -> Iterator[None]:
    """Fail unless everything below is afterwards what it was."""

    def everything() -> dict[Path, bytes]:
        return {file: file.read_bytes() for file in sorted(directory.rglob("*")) if file.is_file()}

    before = everything()
    yield
    assert everything() == before


def a_directory_of_somebody(directory: Path) -> Path:
    (directory / "model").mkdir(parents=True)
    (directory / "model" / "config.json").write_text("{}")
    return directory


def a_file(directory: Path) -> Path:
    directory.write_text("a file")
    return directory


def a_link(directory: Path) -> Path:
    target = directory.with_name("target")
    claim(target)
    (target / "train.yaml").write_text("mine")
    directory.symlink_to(target)
    return directory


def a_linked_model(directory: Path) -> Path:
    claim(directory)
    (directory / "model").symlink_to(a_directory_of_somebody(directory.with_name("other")))
    return directory


def checkpoints_of_another_run(directory: Path) -> Path:
    claim(directory)
    (directory / "adapter" / "checkpoint-5").mkdir(parents=True)
    (directory / "adapter" / "adapter_model.safetensors").write_text("mine")
    return directory


@pytest.mark.parametrize(
    "taken", [a_directory_of_somebody, a_file, a_link, a_linked_model, checkpoints_of_another_run]
)
def test_what_is_not_its_own_is_refused_and_untouched(
    taken: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(taken)
    directory = taken(tmp_path / "lema-demo")
    with untouched(tmp_path):
        assert run(app, ["demo", str(directory)]) == ConfigError.exit_code
    message = capsys.readouterr().err
    assert str(directory) in message
    assert "lema demo DIRECTORY" in message


def test_an_empty_directory_is_taken(tmp_path: Path) -> None:
    claim(tmp_path)
    claim(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lema-demo"]


def test_a_refusal_does_not_wait_for_torch(tmp_path: Path) -> None:
    directory = a_directory_of_somebody(tmp_path / "taken")
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from lema_tools.demo import run_demo\nfrom lema.errors import ConfigError\n"
        f"try:\n    run_demo(Path({str(directory)!r}))\nexcept ConfigError:\n    "
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# The configs that build on it


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.name)
def test_a_config_runs_by_the_commands_in_its_header(
    config: Path, there: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = [line.lstrip("# ") for line in config.read_text().splitlines() if line.startswith("#")]
    lines = [arguments_of(line) for line in head if line.startswith("lema ")]
    # A phase lasts as long as its tokens say: 4 steps here, as others have two by a setting.
    short = tmp_path / config.name
    short.write_text(re.sub(r"(?m)^( +tokens: )[\d_]+", r"\g<1>4096", config.read_text()))
    assert lines[0][:2] == ["train", f"configs/{config.name}"]
    assert set(lines[0][2::2]) <= {"--set"}  # nothing but settings may follow
    for arguments in lines:
        placed = [
            str(short) if argument == f"configs/{config.name}" else argument
            for argument in arguments
        ]
        settings = [
            "--set",
            f"output_dir={tmp_path / 'out'}",
            "--set",
            "device=cpu",
            "--set",
            "batch_size=8",
        ]
        assert run(app, [*quickly(placed), *settings]) == 0, capsys.readouterr().err
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_the_resident_config_reads_each_layer_once(there: Finished, tmp_path: Path) -> None:
    config = next(path for path in CONFIGS if path.name == "lora_resident.yaml")
    settings = ["max_steps=3", "logging_steps=1", f"output_dir={tmp_path}"]
    options = [word for setting in settings for word in ("--set", setting)]
    assert run(app, ["train", str(config), *options]) == 0
    rows = [row for row in read_metrics(tmp_path / "metrics.jsonl") if "loss" in row]
    assert [row["bytes_read"] for row in rows] == [0, 0, 0]


# As a user runs it


# a process that trains for a minute; the others run the same in this one, over fewer steps
@pytest.mark.exhaustive
def test_the_command_as_it_stands(tmp_path: Path) -> None:
    """It replaces what an earlier demo left, here a short one: a whole one takes most of a
    minute.
    """
    with contextlib.chdir(tmp_path):
        run_demo(DIRECTORY, max_steps=2, console=Console(file=io.StringIO()))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "lema", "demo"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    losses = [float(loss) for loss in re.findall(r"held-out loss ([\d.]+)", done.stdout)]
    assert losses[0] > 6
    assert losses[1] < 4
    assert re.search(r"logit difference .*: (0\.00e\+00|\d\.\d\de-(0[6-9]|\d\d))", done.stdout)
    assert "The miller brings" in done.stdout
