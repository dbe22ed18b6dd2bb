"""Callbacks made for `transformers.Trainer` see the same events, in the same order, and steer
the same way.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from recorder import Recorder
from smallrun import (
    logged,
    run_fit,
    settings,
    token_rows,
)
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from lema.data import collate
from lema.errors import ConfigError


def hf_events(
    model: Path, output_dir: Path, rows: Any, eval_rows: Any, **arguments: Any
) -> list[Any]:
    """The events of `transformers.Trainer` itself, over the whole model."""
    recorder = Recorder()
    options = {
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        trainer = Trainer(
            AutoModelForCausalLM.from_pretrained(model),
            TrainingArguments(
                output_dir=str(output_dir), remove_unused_columns=False, **options, **arguments
            ),
            data_collator=lambda batch: dict(collate(batch)),
            train_dataset=rows,
            eval_dataset=eval_rows,
            callbacks=[recorder],
        )
        trainer.train()
    return recorder.events


@pytest.mark.slow
@pytest.mark.parametrize(
    ("evaluation", "logging"),
    [({"eval_strategy": "epoch"}, 2), ({"eval_strategy": "steps", "eval_steps": 3}, 1)],
)
def test_events_come_as_transformers_trainer_fires_them(
    llama: Path, evaluation: dict[str, Any], logging: int, tmp_path: Path
) -> None:
    rows = token_rows(16)
    eval_rows = token_rows(3)
    recorder = Recorder()
    shared = {
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2.0,
        "save_steps": 3,
        "logging_steps": logging,
    }
    config = settings(llama, tmp_path / "ours", eval_steps=evaluation.get("eval_steps"), **shared)
    run_fit(config, rows, eval_rows, [recorder])
    expected = hf_events(
        llama,
        tmp_path / "theirs",
        rows,
        eval_rows,
        per_device_train_batch_size=4,
        **shared,
        **evaluation,
    )
    assert recorder.events == expected
    assert [path.name for path in sorted((tmp_path / "ours").glob("checkpoint-*"))] == [
        "checkpoint-3",
        "checkpoint-4",
    ]


class Ask(TrainerCallback):
    """Sets flags of the control at the end of given steps."""

    def __init__(self, **flags: int) -> None:
        self.flags = flags

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        for flag, step in self.flags.items():
            if state.global_step == step:
                setattr(control, flag, True)
        return control


def test_a_callback_steers_through_the_control(llama: Path, tmp_path: Path) -> None:
    config = settings(llama, tmp_path / "out", logging_steps=100, eval_steps=100)
    asked = Ask(should_save=1, should_log=2, should_evaluate=2, should_training_stop=3)
    recorder = Recorder()
    run_fit(config, token_rows(40), token_rows(2), [asked, recorder])
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-1"]
    assert list(logged(config)) == [2]
    assert list(logged(config, "eval_loss")) == [2]
    assert list(logged(config, "train_loss")) == [3]
    assert [event for event, *_ in recorder.events][-3:] == [
        "on_epoch_end",
        "on_log",
        "on_train_end",
    ]


def test_ending_an_epoch_early_is_refused_rather_than_ignored(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="should_epoch_stop"):
        run_fit(settings(llama, tmp_path), token_rows(16), callbacks=[Ask(should_epoch_stop=2)])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:this run may learn nothing")
def test_early_stopping_stops(llama: Path, tmp_path: Path) -> None:
    # Nothing is learnt at rate 0, so no evaluation is better than the first.
    config = settings(llama, tmp_path / "out", learning_rate=0.0, eval_steps=1, save_steps=1)
    run_fit(
        config, token_rows(24), token_rows(2), [EarlyStoppingCallback(early_stopping_patience=2)]
    )
    assert list(logged(config, "eval_loss")) == [1, 2, 3]
    state = json.loads((tmp_path / "out" / "checkpoint-3" / "trainer_state.json").read_text())
    assert (state["best_global_step"], state["best_metric"]) == (1, logged(config, "eval_loss")[1])


class Gradients(TrainerCallback):
    """Looks at what a callback is given around the optimizer's step."""

    def __init__(self) -> None:
        self.norms: list[tuple[str, float]] = []
        self.before: list[Tensor] = []
        self.moved: list[bool] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._note("pre", given)
        self.before = [parameter.detach().clone() for parameter in self.parameters(given)]

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._note("after", given)
        pairs = zip(self.before, self.parameters(given), strict=True)
        self.moved.append(not any(torch.equal(old, new) for old, new in pairs))

    def parameters(self, given: Any) -> list[Tensor]:
        assert isinstance(given["model"], PeftModel)
        assert given["lr_scheduler"].optimizer is given["optimizer"]
        return [
            parameter for group in given["optimizer"].param_groups for parameter in group["params"]
        ]

    def _note(self, when: str, given: Any) -> None:
        gradients = [parameter.grad for parameter in self.parameters(given)]
        assert all(gradient is not None for gradient in gradients)
        self.norms.append((when, float(torch.nn.utils.get_total_norm(gradients))))


def test_callbacks_see_the_clipped_gradients_around_the_step(llama: Path, tmp_path: Path) -> None:
    seen = Gradients()
    config = settings(llama, tmp_path / "out", max_grad_norm=0.01)
    run_fit(config, token_rows(8), callbacks=[seen])
    assert [when for when, _ in seen.norms] == ["pre", "after"] * 2
    assert [norm for _, norm in seen.norms] == pytest.approx([0.01] * 4, rel=1e-3)
    # what is logged is the norm before clipping
    assert min(logged(config, "grad_norm").values()) > 0.02
    assert seen.moved == [True, True]
