"""How to add an objective: a loss of log-probabilities, and what the settings say of it.

`toyobjective.py` is one. Its loss and gradients are those of autograd on the whole model, a loop in
Python trains on it, and so does a run whose settings name it.
"""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import smallrun
from parity import Outcome, all_gradients, draw_b, relative_difference, streamed_model, whole_model
from preferences import batch_of, examples, parts_of
from tiny import Checkpoint
from toyobjective import (
    MARGIN_KIND,
    LemaConfigWithMargin,
    margin_by_hand,
    margin_of,
)

from lema import LemaConfig
from lema.config import objective as kinds
from lema.config.problems import SettingsError
from lema.engine.head import objectives
from lema.train.metrics import read_metrics
from lema.train.run import load_data

TIGHT = 2e-6  # products round otherwise than where the loss is differentiated through them
MARGIN = 0.5
OBJECTIVE = margin_of(LemaConfig("model", beta=MARGIN, objective="orpo"))


@pytest.fixture
def checkpoint(checkpoint_of: Any) -> Checkpoint:
    llama: Checkpoint = checkpoint_of("llama")
    return llama


@pytest.fixture
def in_both_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kinds.OBJECTIVES, "margin", MARGIN_KIND)
    monkeypatch.setitem(objectives.FROM_SETTINGS, "margin", margin_of)


@pytest.mark.parametrize("cuts", [(8,), (3, 5)], ids=str)
def test_loss_and_gradients_are_those_of_autograd_on_the_whole_model(
    checkpoint: Checkpoint, cuts: tuple[int, ...]
) -> None:
    """However the rows of the batch are cut into micro-batches, even between those of a pair."""
    batch = batch_of(examples())
    whole = whole_model(checkpoint)
    draw_b(whole)
    loss = margin_by_hand(whole, batch, MARGIN)
    loss.backward()
    expected = Outcome.of(whole, loss)
    with streamed_model(checkpoint, gradient_checkpointing=True) as model:
        draw_b(model.lora_manager)
        model.adapter.objective = OBJECTIVE
        loss = model.adapter.loss(parts_of(batch, *cuts))
        loss.backward()
        outcome = Outcome.of(model.lora_manager, loss)
    assert float(outcome.loss) == pytest.approx(float(expected.loss), rel=TIGHT)
    assert relative_difference(all_gradients(outcome), all_gradients(expected)) < TIGHT


def test_a_loop_in_python_trains_on_it(checkpoint: Checkpoint) -> None:
    batch = batch_of(examples())
    with streamed_model(checkpoint, learning_rate=1e-2) as model:
        model.adapter.objective = OBJECTIVE
        trainer = model.get_trainer()
        losses = [trainer.train_step(batch)[1] for _ in range(5)]
    assert losses[-1] < losses[0] / 2


@pytest.mark.usefixtures("in_both_tables")
def test_a_run_trains_on_it_by_its_name(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data are read as pairs, the plan counts two rows for each, and the metrics are in the log."""
    monkeypatch.setattr(smallrun, "LemaConfig", LemaConfigWithMargin)
    pairs = [
        {"prompt": f"{text}.", "chosen": " the miller grinds corn", "rejected": " by the river"}
        for text in smallrun.SENTENCES
    ]
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    options = {"objective": "margin", "beta": MARGIN, "train_data": str(data), "max_steps": 6}
    with smallrun.opened(smallrun.settings(llama, tmp_path / "out", **options)) as model:
        model.get_trainer().fit(*load_data(model))
    lines = [line for line in read_metrics(tmp_path / "out/metrics.jsonl") if "loss" in line]
    assert lines[-1]["ahead"] > lines[0]["ahead"]
    assert lines[-1]["loss"] < lines[0]["loss"]


@pytest.mark.usefixtures("in_both_tables")
def test_settings_without_a_meaning_for_it_are_refused() -> None:
    LemaConfigWithMargin("model", objective="margin", beta=MARGIN)
    with pytest.raises(SettingsError, match="simpo_gamma has no effect with objective: margin"):
        LemaConfigWithMargin("model", objective="margin", simpo_gamma=1.0)


def test_both_tables_have_every_name_and_agree_on_references() -> None:
    assert set(kinds.OBJECTIVES) == set(get_args(kinds.ObjectiveName))
    assert set(objectives.FROM_SETTINGS) == set(kinds.OBJECTIVES) - {"sft"}
    for name in objectives.FROM_SETTINGS:
        objective = objectives.objective_of(LemaConfig("model", objective=name))
        assert objective is not None
        assert objective.reference == kinds.has_reference(name)
        assert objective.mismatched == (kinds.OBJECTIVES[name].examples == "labelled rows")
