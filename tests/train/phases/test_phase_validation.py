"""Validation looks on: it changes no number, is kept with the checkpoint it belongs to, and
finds each phase's best.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from phaseruns import (
    BLOCK,
    HELD,
    LORA,
    SOURCES,
    STEP,
    Killed,
    assert_same,
    count_writes,
    logged,
    plan_of,
    two,
)
from transformers import AutoModelForCausalLM

from lema import LemaConfig
from lema.data.mixture import Mixture
from lema.storage.atomic import discard
from lema.train.checkpoint.format import read_state
from lema.train.metrics import read_metrics
from lema.train.phases import paths
from lema.train.phases import rows as phaserows
from lema.train.phases.run import run_phases


@pytest.mark.slow
def test_it_changes_no_number_and_is_what_the_whole_model_says(
    config_of: Callable[..., LemaConfig],
) -> None:
    plan = two()
    without = config_of("without", dropout=0.1)
    with_it = config_of("with", dropout=0.1, eval_steps=1)
    ends = [
        run_phases(without, plan, SOURCES),
        run_phases(with_it, plan, SOURCES, held_out=HELD, eval_rows=6),
    ]
    assert_same(*ends)
    place = Path(with_it.output_dir)
    assert logged(place, "loss") == logged(Path(without.output_dir), "loss")
    found = logged(place, "eval_loss")
    assert len(found) == len(set(found)) == 4  # after every step, of what it has trained
    # The first phase has left its model: transformers' own loss of the same rows is what was
    # measured last.
    mixture = Mixture(plan.phases[0].mixture, SOURCES, plan.seed, BLOCK, eval_sources=HELD)
    batch = mixture.validation(6)
    assert batch is not None
    model = AutoModelForCausalLM.from_pretrained(place / "whole" / "model").eval()
    with torch.no_grad():
        expected = float(model(input_ids=batch["input_ids"], labels=batch["labels"]).loss)
    assert found[1] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_at_a_boundary_it_comes_before_the_checkpoint_and_is_neither_lost_nor_repeated(
    config_of: Callable[..., LemaConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(save_steps=0)
    plan = plan_of(
        {**LORA, "tokens": STEP, "name": "first"}, {**LORA, "tokens": STEP, "merge": True}
    )
    with monkeypatch.context() as patch:
        count_writes(patch, after=3)  # the phase begins, ends, and its checkpoint is written
        with pytest.raises(Killed):
            run_phases(config, plan, SOURCES, held_out=HELD)
    place = Path(config.output_dir)
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("event", "") for row in lines] == ["phase_begin", "", "", "phase_end"]
    measured = lines[2]["eval_loss"]
    about = read_state(place / "first" / "checkpoint-1")["extra"]
    assert (about["eval_loss"], about["kind"], about["ended"]) == (measured, "lora", True)
    assert lines[3]["final_eval_loss"] == measured
    assert not (place / "latest.json").exists() and not (place / "first" / "best.json").exists()
    run_phases(config, plan, SOURCES, held_out=HELD, resume=True)
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    assert [row["phase"] for row in lines if "eval_loss" in row] == ["first", "adapters"]
    assert json.loads((place / "first" / "best.json").read_text())["eval_loss"] == measured
    assert json.loads((place / "latest.json").read_text())["checkpoint"] == "adapters/checkpoint-1"


def losses_of(monkeypatch: pytest.MonkeyPatch, *values: float) -> None:
    """Have validation find these."""
    given: Iterator[float] = iter(values)

    def found(*_: Any, **__: Any) -> dict[str, float]:
        return {"eval_loss": next(given), "eval_perplexity": 1.0, "eval_tokens": 1}

    monkeypatch.setattr(phaserows, "evaluate", found)


def kept(place: Path) -> list[str]:
    return sorted(path.name for path in place.glob("checkpoint-*"))


@pytest.mark.slow
def test_the_best_of_each_phase_is_kept_and_the_next_phase_looks_for_its_own(
    config_of: Callable[..., LemaConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(save_steps=0, eval_steps=1, save_total_limit=2)
    losses_of(monkeypatch, 3.0, 2.0, 2.5, 4.0, 9.0, 8.0, 7.0, 8.0)
    run_phases(config, two(4), SOURCES, held_out=HELD)
    place = Path(config.output_dir)
    best = [
        json.loads((place / phase / "best.json").read_text()) for phase in ("whole", "adapters")
    ]
    assert [(one["checkpoint"], one["eval_loss"]) for one in best] == [
        ("checkpoint-2", 2.0),
        ("checkpoint-3", 7.0),
    ]
    # Beside it the end alone; what was best for a while only went with the next best.
    assert [kept(place / phase) for phase in ("whole", "adapters")] == [
        ["checkpoint-2", "checkpoint-4"],
        ["checkpoint-3", "checkpoint-4"],
    ]
    ends = [row for row in read_metrics(place / "metrics.jsonl") if row.get("event") == "phase_end"]
    assert [(row["final_eval_loss"], row["best"]["step"]) for row in ends] == [(4.0, 2), (8.0, 3)]
    latest = json.loads((place / "latest.json").read_text())
    assert latest == {
        "phase": "adapters",
        "checkpoint": "adapters/checkpoint-4",
        "step": 8,
        "step_in_phase": 4,
    }


@pytest.mark.slow
def test_the_best_is_remembered_by_a_run_that_goes_on(
    config_of: Callable[..., LemaConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(save_steps=1, eval_steps=1, save_total_limit=2)
    plan = plan_of({**LORA, "tokens": 4 * STEP})
    losses_of(monkeypatch, 2.0, 3.0, 3.0, 3.0)
    with monkeypatch.context() as patch:
        # in the third step, whose checkpoint was written and not noted yet
        count_writes(patch, after=1 + 2 * 4 + 1)
        with pytest.raises(Killed):
            run_phases(config, plan, SOURCES, held_out=HELD)
    place = Path(config.output_dir) / "adapters"
    assert kept(place) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    run_phases(config, plan, SOURCES, held_out=HELD, resume=True)
    assert kept(place) == ["checkpoint-1", "checkpoint-3", "checkpoint-4"]
    assert json.loads((place / "best.json").read_text())["checkpoint"] == "checkpoint-1"


@pytest.mark.slow
@pytest.mark.parametrize("deleted", [False, True])
def test_a_kill_as_the_best_changes_leaves_no_checkpoint_that_nothing_knows_of(
    deleted: bool, config_of: Callable[..., LemaConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of a phase: the one before was kept as the best alone, and goes."""
    config = config_of(save_steps=0, eval_steps=1, save_total_limit=2)
    plan = plan_of({**LORA, "tokens": 2 * STEP})
    losses_of(monkeypatch, 3.0, 2.0)

    def killed(directory: Path, what: str) -> None:
        if deleted:
            discard(directory)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(paths, "delete_checkpoint", killed)
        with pytest.raises(Killed):
            run_phases(config, plan, SOURCES, held_out=HELD)
    run_phases(config, plan, SOURCES, held_out=HELD, resume=True)
    place = Path(config.output_dir) / "adapters"
    assert kept(place) == ["checkpoint-2"]
    assert json.loads((place / "best.json").read_text())["checkpoint"] == "checkpoint-2"
