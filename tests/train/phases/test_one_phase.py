"""A file with `trains: full` is a file of one phase, in epochs or steps of its rows."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from phaseruns import assert_same, logged, rows
from transformers import AutoModelForCausalLM

from lema.errors import ConfigError, LemaError
from lema.train.phases.file import all_settings, has_phases, read_phase_file
from lema.train.phases.report import phase_report
from lema.train.phases.run import plan_of, train_phases
from lema_tools.loading import outcome_of

if TYPE_CHECKING:
    from tiny import Checkpoint


@pytest.fixture
def file_of(
    tmp_path: Path, checkpoint_of: Callable[..., Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Path]:
    """Return a file with `trains: full`, and what else is given, over two data sets."""
    from lema.storage import atomic

    monkeypatch.setattr(atomic, "flush", lambda _: None)
    names = {}
    for seed, count in ((1, 7), (2, 4)):
        names[f"set{seed}"] = str(tmp_path / f"{seed}.jsonl")
        text = "".join(json.dumps(row) + "\n" for row in rows(seed, count))
        Path(names[f"set{seed}"]).write_text(text, encoding="utf-8")

    def make(name: str = "run", **settings: Any) -> Path:
        fixed = {
            "model_name_or_path": str(checkpoint_of("llama").streamed),
            "train_data": names,
            "trains": "full",
            "batch_size": 2,
            "max_length": 12,
            "learning_rate": 1e-3,
            "device": "cpu",
            "save_steps": 2,
            "output_dir": str(tmp_path / name),
        }
        values = {key: value for key, value in {**fixed, **settings}.items() if value is not None}
        file = tmp_path / f"{name}.yaml"
        file.write_text(json.dumps(values), encoding="utf-8")
        return file

    return make


def test_a_file_trains_every_weight_for_its_epochs_and_leaves_a_model(
    file_of: Callable[..., Path], checkpoint_of: Callable[..., Checkpoint], tmp_path: Path
) -> None:
    path = file_of(num_train_epochs=2, eval_split=2)
    assert has_phases(path)
    train_phases(read_phase_file(path))
    assert len(logged(tmp_path / "run", "loss")) == 10
    assert logged(tmp_path / "run", "epoch")[-1] == 2.0
    assert logged(tmp_path / "run", "eval_loss")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "full" / "model")
    stored = model.state_dict()
    before = AutoModelForCausalLM.from_pretrained(checkpoint_of("llama").published).state_dict()
    assert not [name for name, weight in stored.items() if weight.equal(before[name])]


def test_its_model_is_opened_with_the_length_of_the_file(file_of: Callable[..., Path]) -> None:
    """A plan of phases has a length of its own, which a short model has no positions for."""
    path = file_of(num_train_epochs=1, max_length=None)
    train_phases(read_phase_file(path))
    outcome = outcome_of(path, None, None)
    assert outcome is not None
    with contextlib.closing(outcome.open(report=print, trust_remote_code=False)) as model:
        assert model.config.max_length is None


def test_a_run_that_stopped_goes_on_bitwise(file_of: Callable[..., Path], tmp_path: Path) -> None:
    train_phases(read_phase_file(file_of("whole", max_steps=4)))
    stopped = read_phase_file(file_of("stopped", max_steps=4))
    train_phases(stopped)

    def forget_the_end() -> None:
        for name in ("checkpoint-4", "model"):
            shutil.rmtree(tmp_path / "stopped" / "full" / name)

    forget_the_end()
    train_phases(stopped, resume=True)
    assert_same(tmp_path / "stopped" / "full" / "model", tmp_path / "whole" / "full" / "model")
    forget_the_end()
    file = read_phase_file(file_of("stopped", max_steps=4, shuffle=False))
    with pytest.raises(ConfigError, match="shuffle"):
        train_phases(file, resume=True)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, 6),  # eleven rows, two in a batch
        ({"num_train_epochs": 3}, 18),
        ({"num_train_epochs": 1, "gradient_accumulation_steps": 4}, 2),
        ({"max_steps": 5}, 5),
        ({"max_train_samples": 4}, 2),
        ({"tokens": 96, "mixture": {"set1": 0.5, "set2": 0.5}}, 4),
        ({"max_steps": 3, "mixture": {"set1": 0.5, "set2": 0.5}}, 3),
    ],
)
def test_the_steps_are_those_of_a_run_without_phases(
    file_of: Callable[..., Path], settings: dict[str, Any], steps: int
) -> None:
    file = read_phase_file(file_of(**settings))
    plan = plan_of(file)
    assert plan.num_steps == steps
    report = phase_report(file.config, plan)
    assert report.steps == steps
    assert report.phases[0].name == "full"


def test_settings_are_shown_as_a_file_has_them(
    file_of: Callable[..., Path], tmp_path: Path
) -> None:
    settings = all_settings(read_phase_file(file_of(warmup_steps=0.25, lr_scheduler_type="cosine")))
    (phase,) = settings["phases"]
    assert (phase["trains"], phase["epochs"], phase["warmup_ratio"]) == ("full", 1.0, 0.25)
    assert settings["gradient_accumulation_steps"] == 1
    again = tmp_path / "again.yaml"
    again.write_text(json.dumps(settings, default=str), "utf-8")
    assert plan_of(read_phase_file(again)).num_steps == 6


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"trains": "lora"}, "trains adapters anyway"),
        ({"trains": "all"}, "trains"),
        ({"objective": "dpo"}, "objective has no effect"),
        ({"lora_rank": 8}, "lora_rank"),
        ({"tokens_per_step": 100}, "tokens_per_step has no effect"),
        ({"eval_rows": 4}, "eval_rows has no effect"),
        ({"mixture": {"set1": 1.0}}, "data sets end at different times"),
        ({"trains": None, "phases": [{"trains": "full"}]}, "nor is the length as epochs or steps"),
        ({"trains": None, "phases": [{"trains": "full", "steps": 2, "epochs": 1}]}, "keep one"),
        ({"trains": None, "phases": [{"trains": "full", "epochs": 0}]}, "epochs"),
        ({"phases": [{"trains": "full", "epochs": 1}]}, "trains belongs to a phase"),
        ({"max_steps": 2, "warmup_steps": 3}, "warm"),
        ({"optim": "adafactor", "max_steps": 2}, "only with AdamW"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "max_steps": 2}, "follows the loss"),
    ],
)
def test_what_does_not_fit_is_refused(
    file_of: Callable[..., Path], settings: dict[str, Any], what: str
) -> None:
    with pytest.raises(LemaError, match=what):
        train_phases(read_phase_file(file_of(**settings)))
