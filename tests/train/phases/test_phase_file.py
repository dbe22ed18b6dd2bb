"""A file of phases is read whole or refused by its line, and `lema train` goes through it."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tiny import VOCABULARY, Checkpoint

import lema.model.files
import lema.plan.blueprint
import lema.plan.machine
import lema.train.opened.model
import lema.train.phases.run
from lema.cli.app import app
from lema.cli.exitcodes import run
from lema.data.packed import write_packed
from lema.errors import ConfigError, Stopped
from lema.train.metrics import read_metrics
from lema.train.phases.file import PhaseFile, has_phases, read_phase_file
from lema.train.phases.run import train_phases

PHASES = """
model_name_or_path: {model}
device: cpu
output_dir: {place}/out
save_steps: 0
train_data:
  rows: {place}/rows.jsonl
  packed: {place}/packed
eval_data: {{rows: {place}/rows.jsonl, packed: {place}/packed}}
batch_size: 4
max_length: 12
phases:
  - {{name: whole, trains: full, tokens: 144, learning_rate: 1e-3, mixture: [
      {{name: rows, rate: 0.5}}, {{name: packed, rate: 0.5, style: PMD}}]}}
  - {{name: adapters, trains: lora, tokens: 144, learning_rate: 1e-2, mixture: [{{name: rows, rate: 1.0}}]}}
"""
STAGES = """
model_name_or_path: {model}
device: cpu
output_dir: {place}/out
train_data: {{rows: {place}/rows.jsonl}}
batch_size: 4
block_size: 12
lr: 1e-3
pre_lora_tokens: [144]
pre_lora_dataset: [[{{name: rows, rate: 1.0}}]]
post_lora_tokens: [96]
post_lora_dataset: [[{{name: rows, rate: 1.0}}]]
"""


@pytest.fixture
def written(tmp_path: Path, checkpoint_of: Callable[..., Checkpoint]) -> Callable[..., Path]:
    tokens = [[3 + (row + n) % (VOCABULARY - 3) for n in range(12)] for row in range(8)]
    rows = [json.dumps({"input_ids": row, "labels": row}) for row in tokens]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    for split in ("train", "val"):
        write_packed(tokens, tmp_path / "packed", split=split, vocab_size=VOCABULARY)

    def write(text: str, *changes: tuple[str, str]) -> Path:
        whole = text.format(model=checkpoint_of("llama").streamed, place=tmp_path)
        for old, new in changes:
            assert old in whole
            whole = whole.replace(old, new)
        (tmp_path / "run.yaml").write_text(whole)
        return tmp_path / "run.yaml"

    return write


def test_both_forms_are_read(written: Callable[..., Path]) -> None:
    file = read_phase_file(written(PHASES))
    assert [phase.trains for phase in file.plan.phases] == ["full", "lora"]
    assert file.config.save_steps == 0 and set(file.train_data) == set(file.eval_data) == {
        "rows",
        "packed",
    }
    stages = read_phase_file(written(STAGES), block_size=6)
    assert [(phase.trains, phase.tokens) for phase in stages.plan.phases] == [
        ("full", 144),
        ("lora", 96),
    ]
    assert stages.plan.max_length == 6 and stages.plan.phases[0].learning_rate == 1e-3


@pytest.mark.parametrize(
    ("line", "norm"), [("", 1.0), ("max_grad_norm: 0.3\n", 0.3), ("max_grad_norm: null\n", None)]
)
def test_gradients_are_clipped_unless_the_file_says_otherwise(
    written: Callable[..., Path], line: str, norm: float | None
) -> None:
    file = read_phase_file(written(PHASES, ("save_steps: 0\n", f"save_steps: 0\n{line}")))
    assert (file.config.max_grad_norm, file.config.save_steps) == (norm, 0)


def test_other_files_are_not_taken_for_one(tmp_path: Path) -> None:
    (tmp_path / "plain.yaml").write_text("model_name_or_path: x\n")
    (tmp_path / "broken.yaml").write_text("phases: [")
    assert not has_phases(tmp_path / "plain.yaml")
    assert not has_phases(tmp_path / "broken.yaml") and not has_phases(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([("rate: 0.5}, ", "rate: 0.6}, ")], "phases.0..mixture"),
        ([("trains: lora, tokens: 144", "trains: lora, tokens: 0")], "phases.1..tokens"),
        ([("save_steps: 0", "save_step: 0")], "save_step"),
        ([("rows.jsonl\n", "nowhere.jsonl\n")], "there is no .*nowhere"),
        (
            [("save_steps: 0\n", "save_steps: 0\nmax_steps: 3\n")],
            "max_steps has no effect in a file of phases",
        ),
        (
            [("rows.jsonl, packed: ", "rows.jsonl, other: ")],
            "eval_data has no data set 'packed', which a phase trains on",
        ),
        (
            [("max_length: 12\n", "max_length: 12\npost_lora_tokens: [1]\n")],
            "both define the phases",
        ),
    ],
)
def test_bad_input_names_the_key(
    changes: list[tuple[str, str]], message: str, written: Callable[..., Path]
) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        read_phase_file(written(PHASES, *changes))
    assert "run.yaml" in str(raised.value)


def test_a_file_without_data_sets_is_refused(written: Callable[..., Path]) -> None:
    path = written(STAGES)
    path.write_text(
        "".join(line for line in path.read_text().splitlines(True) if "train_data" not in line)
    )
    with pytest.raises(ConfigError, match="no data sets"):
        read_phase_file(path)


def test_the_settings_of_a_run_hold_in_every_phase_that_does_not_override_them(
    written: Callable[..., Path],
) -> None:
    above = (
        "learning_rate: 3e-4\nlr_scheduler_type: wsd\nwarmup_ratio: 0.5\nlora_rank: "
        "4\nweight_decay: 0.1\n"
    )
    entries = """\
  - {trains: full, tokens: 144, mixture: {rows: 0.5, packed: 0.5}, weight_decay: 0.2}
  - {trains: lora, tokens: 144, mixture: {rows: 1.0}, lr_scheduler_type: cosine, warmup_steps: 1, lora_dropout: 0.1}
  - {trains: lora, tokens: 144, mixture: {rows: 1.0}, merge: true, learning_rate: 1e-2, lora_rank: 8}
"""
    path = written(PHASES, ("save_steps: 0\n", f"save_steps: 0\n{above}"))
    path.write_text(path.read_text().partition("phases:\n")[0] + "phases:\n" + entries)
    file = read_phase_file(path)
    phases = file.plan.phases
    assert [phase.learning_rate for phase in phases] == [3e-4, 3e-4, 1e-2]
    assert [phase.lr_scheduler_type for phase in phases] == ["wsd", "cosine", "wsd"]
    assert [(phase.warmup_steps, phase.warmup_ratio) for phase in phases] == [
        (None, 0.5),
        (1, None),
        (None, 0.5),
    ]
    assert [phase.adapters and phase.adapters.lora_rank for phase in phases] == [None, 4, 8]
    assert phases[1].lora_dropout == 0.1 and phases[0].overrides == {"weight_decay": 0.2}
    assert (file.config.weight_decay, file.config.learning_rate, file.plan.max_length) == (
        0.1,
        3e-4,
        12,
    )


def test_one_source_needs_no_name_and_no_mixture(
    written: Callable[..., Path], tmp_path: Path
) -> None:
    path = written(STAGES)
    path.write_text(
        f"model_name_or_path: {tmp_path}\ntrain_data: {tmp_path}/rows.jsonl\neval_data: "
        f"[{tmp_path}/rows.jsonl]\n"
        "batch_size: 4\nmax_length: 12\nphases: [{trains: full, tokens: 144}, {trains: "
        "lora, tokens: 144}]\n"
    )
    file = read_phase_file(path)
    assert [[(one.name, one.rate) for one in phase.mixture] for phase in file.plan.phases] == [
        [("train", 1.0)]
    ] * 2
    assert (list(file.train_data), list(file.eval_data)) == (["train"], ["train"])
    assert [phase.learning_rate for phase in file.plan.phases] == [1e-4, 1e-4]


@pytest.mark.parametrize(
    ("line", "near"),
    [
        ("datasets: {a: b}", "train_data"),
        ("held_out: {a: b}", "eval_data"),
        ("block_size: 12", "max_length"),
        ("schedule: wsd", "lr_scheduler_type"),
        ("warmup: 0.1", "warmup_ratio"),
        ("lora: {rank: 3}", "lora_rank"),
    ],
)
def test_another_name_for_a_setting_leads_to_its_own(
    written: Callable[..., Path], line: str, near: str
) -> None:
    with pytest.raises(ConfigError, match="unknown setting") as raised:
        read_phase_file(written(PHASES, ("save_steps: 0\n", f"save_steps: 0\n{line}\n")))
    assert f"did you mean {near}?" in str(raised.value) and "run.yaml:6" in str(raised.value)


def test_all_that_is_wrong_is_told_at_once_with_its_line(written: Callable[..., Path]) -> None:
    changes = (
        ("save_steps: 0\n", "save_step: 0\nlearning_rate: -1\nmax_steps: 3\n"),
        ("learning_rate: 1e-2", "leaning_rate: 1e-2, lora_rank: 0"),
    )
    with pytest.raises(ConfigError) as raised:
        read_phase_file(written(PHASES, *changes))
    said = str(raised.value)
    for place, key in (
        (5, "save_step"),
        (6, "learning_rate"),
        (7, "max_steps"),
        (17, "lora_rank"),
        (17, "leaning_rate"),
    ):
        assert any(f"run.yaml:{place}: " in line and key in line for line in said.splitlines()), (
            key,
            said,
        )


def test_stages_say_how_often_under_their_own_names(written: Callable[..., Path]) -> None:
    more = (
        "report_interval: 2\ncheckpoint_interval: 3\nvalidation_interval: 4\nvalidation_steps: 5\n"
    )
    changes = (
        "batch_size: 4\n",
        "batch_size: 4\neval_data: {rows: {place}/rows.jsonl}\nevaluations: [rows]\n" + more,
    )
    changes = (changes[0], changes[1].replace("{place}", "."))
    path = written(STAGES, changes)
    path.write_text(path.read_text().replace("./rows.jsonl", str(path.with_name("rows.jsonl"))))
    file = read_phase_file(path)
    config = file.config
    assert (config.logging_steps, config.save_steps, config.eval_steps, file.eval_rows) == (
        2,
        3,
        4,
        5,
    )
    assert list(file.eval_data) == list(file.evaluations) == ["rows"]
    assert read_phase_file(path, validate=False).eval_data == {}
    with pytest.raises(ConfigError, match="save_steps, which is the same, is 9"):
        read_phase_file(path, save_steps=9)
    with pytest.raises(ConfigError, match="learning_rate has no effect together with") as raised:
        read_phase_file(path, learning_rate=9.0)
    assert "--set learning_rate" in str(raised.value) and "use lr" in str(raised.value)


@pytest.mark.slow
def test_the_command_traces_a_run_and_begins_one_elsewhere(
    written: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(written(PHASES, ("save_steps: 0", "save_steps: 1")))
    trace = tmp_path / "trace.json"
    assert run(app, ["train", file, "--trace", str(trace)]) == 0
    assert "optimizer" in trace.read_text()
    said = capsys.readouterr().out
    assert (
        "phase whole begins: full" in said
        and "phase adapters has ended after step 6, loss on held-out" in said
    )
    assert "step 4/6" in said
    there = tmp_path / "out" / "whole" / "checkpoint-2"
    arguments = ["--set", f"output_dir={tmp_path}/other", "--from", str(there)]
    assert run(app, ["train", file, *arguments]) == 0
    assert f"phase whole begins at {there}" in capsys.readouterr().out
    ends = [
        tmp_path / name / "adapters" / "checkpoint-3" / "adapter_model.safetensors"
        for name in ("out", "other")
    ]
    assert ends[0].read_bytes() == ends[1].read_bytes()


def test_only_phases_begin_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plain.yaml").write_text("model_name_or_path: x\n")
    assert run(app, ["train", str(tmp_path / "plain.yaml"), "--from", "here"]) == 2
    assert "--from here" in capsys.readouterr().err


def test_validation_every_so_many_steps_needs_something_to_validate_on(
    written: Callable[..., Path],
) -> None:
    more = ("save_steps: 0\n", "save_steps: 0\neval_steps: 2\neval_rows: 6\n")
    file = read_phase_file(written(PHASES, more))
    assert (file.config.eval_steps, file.eval_rows) == (2, 6)
    for key, line in (("eval_steps", "eval_steps: 2"), ("eval_rows", "eval_rows: 6")):
        with pytest.raises(
            ConfigError, match=f"{key} is for validation, but there is nothing to validate on"
        ) as raised:
            read_phase_file(written(STAGES, ("batch_size: 4\n", f"batch_size: 4\n{line}\n")))
        assert "run.yaml:" in str(raised.value)
    with pytest.raises(ConfigError, match="eval_rows is a number of rows, 1 or more, not 0"):
        read_phase_file(written(PHASES, ("save_steps: 0\n", "save_steps: 0\neval_rows: 0\n")))


def quiet() -> Console:
    return Console(quiet=True)


@pytest.mark.slow
def test_train_goes_through_it_with_packed_tokens_and_validation(
    written: Callable[..., Path],
) -> None:
    file = read_phase_file(written(PHASES))
    end = train_phases(file, console=quiet())
    assert (end / "adapter_model.safetensors").is_file()
    recorded = read_metrics(Path(file.config.output_dir) / "metrics.jsonl")
    assert [row["phase"] for row in recorded if "eval_loss" in row] == ["whole", "adapters"]


class StopAtOnce:
    """A signal that came before anything began."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def why(self) -> str:
        return "SIGTERM"

    def __enter__(self) -> "StopAtOnce":
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing was changed."""


@pytest.mark.slow
def test_a_signal_ends_it_with_a_checkpoint_from_which_it_goes_on(
    written: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    file: PhaseFile = read_phase_file(written(STAGES))
    with monkeypatch.context() as patch:
        patch.setattr(lema.train.phases.run, "StopOnSignal", StopAtOnce)
        with pytest.raises(Stopped, match="SIGTERM after step 0 of phase pre-lora-1") as stopped:
            train_phases(file, console=quiet())
    assert stopped.value.exit_code == 75
    assert (Path(file.config.output_dir) / "pre-lora-1" / "checkpoint-0").is_dir()
    end = train_phases(file, resume=True, console=quiet())
    assert end.name == "checkpoint-2" and end.parent.name == "post-lora-1"


def test_a_run_opens_its_device_and_its_model_once(
    written: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Skeletons are two for each phase: one that is planned with, and one that is trained."""
    counts: Counter[str] = Counter()

    def count(module: Any, name: str) -> None:
        original = getattr(module, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            counts[name] += 1
            return original(*arguments, **options)

        monkeypatch.setattr(module, name, counted)

    for module in (lema.train.phases.run, lema.train.opened.model, lema.plan.machine):
        count(module, "open_backend")
    for module in (lema.train.opened.model, lema.plan.blueprint):
        count(module, "meta_model")
    # of the model given, and of the one that the first phase leaves
    count(lema.model.files, "read_config")
    train_phases(read_phase_file(written(PHASES)), console=Console(quiet=True))
    assert counts == {"open_backend": 1, "meta_model": 4, "read_config": 2}
