"""A run of phases tells what an ordinary run does: lines of metrics, callbacks, boundaries, a
picture.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from phaseruns import BLOCK, HELD, SOURCES, STEP, two
from recorder import Recorder
from transformers import TrainerCallback

from lema import LemaConfig
from lema.errors import Stopped
from lema.train import events as runevents
from lema.train.metrics import plot_loss, read_metrics
from lema.train.phases.run import run_phases

BEGIN = "on_train_begin"
END = "on_train_end"


@pytest.mark.slow
def test_callbacks_see_one_run_over_the_boundary(config_of: Callable[..., LemaConfig]) -> None:
    recorder = Recorder()
    config = config_of(save_steps=3, logging_steps=2)
    run_phases(config, two(3), SOURCES, held_out=HELD, callbacks=[recorder])
    events = [(event, step) for event, step, *_ in recorder.events]
    assert [step for event, step in events if event == "on_step_end"] == [1, 2, 3, 4, 5, 6]
    assert events[:2] == [("on_init_end", 0), (BEGIN, 0)] and events[-1] == (END, 6)
    assert [event for event, _ in events].count(BEGIN) == 1
    assert [step for event, step in events if event == "on_evaluate"] == [3, 6]
    assert [step for event, step in events if event == "on_save"] == [3, 6]
    kinds = [(step, kind) for event, step, _, kind in recorder.events if event == "on_log"]
    # A line never spans a boundary: at the third step one is written that was not due.
    assert kinds == [
        (2, "loss"),
        (3, "loss"),
        (3, "eval_loss"),
        (4, "loss"),
        (6, "loss"),
        (6, "eval_loss"),
    ]
    at = [events.index((event, 3)) for event in ("on_step_end", "on_evaluate", "on_save")]
    assert at == sorted(at)
    # of adapters
    assert [step for event, step in events if event == "on_pre_optimizer_step"] == [
        3,
        4,
        5,
    ]


@pytest.mark.slow
def test_lines_of_metrics_say_where_in_the_run_they_are(
    config_of: Callable[..., LemaConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(runevents, "plot_loss", lambda *given: drawn.append(plot_loss(*given)))
    config = config_of(save_steps=0, max_grad_norm=None)
    told = []
    shorter = {
        name: [{key: one[:9] for key, one in row.items()} for row in rows]
        for name, rows in SOURCES.items()
    }
    run_phases(config, two(), shorter, on_step=told.append)
    rows = read_metrics(Path(config.output_dir) / "metrics.jsonl")
    assert [row["type"] for row in rows] == ["event", "train", "train", "event"] * 2
    assert [row.get("event", "step") for row in rows] == [
        *("phase_begin", "step", "step", "phase_end"),
        *("phase_begin", "step", "step", "phase_end"),
    ]
    assert [(row["phase"], row["stage"]) for row in rows] == [("whole", 0)] * 4 + [
        ("adapters", 1)
    ] * 4
    steps = [row for row in rows if "loss" in row]
    assert [(row["step"], row["step_in_phase"]) for row in steps] == [
        (1, 1),
        (2, 2),
        (3, 1),
        (4, 2),
    ]
    assert [row["tokens"] for row in steps] == [STEP, 2 * STEP, 3 * STEP, 4 * STEP]
    # without padding
    assert [row["num_tokens"] for row in steps] == [row["tokens"] * 9 // BLOCK for row in steps]
    for row in steps:
        assert row["grad_norm"] > 0 and row["learning_rate"] > 0 and row["memory"] > 0
        assert row["tokens_per_second"] > 0 and "bytes_uploaded" in row
    assert told == rows
    assert drawn == [True] and (Path(config.output_dir) / "loss.png").is_file()


class StopAt(TrainerCallback):
    """Asks for the end after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        control.should_training_stop = state.global_step == self.step
        return control


@pytest.mark.slow
def test_a_callback_ends_the_run_with_a_checkpoint(config_of: Callable[..., LemaConfig]) -> None:
    config = config_of(save_steps=0)
    recorder = Recorder()
    with pytest.raises(
        Stopped, match="stopped by a callback after step 1 of phase adapters"
    ) as stopped:
        run_phases(config, two(), SOURCES, callbacks=[StopAt(3), recorder])
    assert stopped.value.exit_code == 75 and stopped.value.where.endswith("adapters/checkpoint-1")
    assert recorder.events[-1][:2] == (END, 3)
    again = Recorder()
    run_phases(config, two(), SOURCES, resume=True, callbacks=[again])
    assert [(event, step) for event, step, *_ in again.events][:2] == [
        ("on_init_end", 3),
        (BEGIN, 3),
    ]
    rows = read_metrics(Path(config.output_dir) / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4]
    assert [row["num_tokens"] for row in rows if "loss" in row] == [
        STEP,
        2 * STEP,
        3 * STEP,
        4 * STEP,
    ]
    assert [row["event"] for row in rows if "event" in row] == ["phase_begin", "phase_end"] * 2


@pytest.mark.slow
def test_a_stop_after_the_very_last_step_is_no_stop(config_of: Callable[..., LemaConfig]) -> None:
    config = config_of(save_steps=0)
    end = run_phases(config, two(1), SOURCES, callbacks=[StopAt(2)])
    assert end.is_dir()


class Reports(TrainerCallback):
    """A report that was asked for by name."""

    made: list["Reports"]

    def __init__(self) -> None:
        self.steps: list[int] = []
        Reports.made.append(self)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.steps.append(state.global_step)


@pytest.mark.slow
def test_reports_are_made(
    config_of: Callable[..., LemaConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    Reports.made = []
    monkeypatch.setattr(
        "lema.train.events.get_reporting_integration_callbacks",
        lambda names: [Reports] * len(names),
    )
    run_phases(config_of(save_steps=0, report_to=["tensorboard"]), two(1), SOURCES)
    assert [report.steps for report in Reports.made] == [[1, 2]]
