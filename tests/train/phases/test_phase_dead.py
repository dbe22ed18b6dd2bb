"""A phase in which nothing is learnt ends the run, and keeps the checkpoint of before."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from phaseruns import SOURCES, two

from lema import LemaConfig
from lema.errors import DeadRun
from lema.train.health.signs import Sign, Signs
from lema.train.metrics import read_metrics
from lema.train.phases.run import run_phases
from lema.train.steps import StepResult


def dead_from(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Have every phase look dead from a step on, and stop after the second such step."""

    def found(signs: Signs, result: StepResult, rate: float) -> Iterator[Sign]:
        assert rate > 0 and result.loss > 0
        counts[signs] = counts.get(signs, 0) + 1
        if counts[signs] >= step:
            yield Sign("gradient", "it is dead")

    counts: dict[Signs, int] = {}
    monkeypatch.setattr(Signs, "_signs_of", found)
    monkeypatch.setattr("lema.train.loop.DEAD_STEPS", 2)


def test_a_phase_that_learns_nothing_ends_the_run(
    config_of: Callable[..., LemaConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    dead_from(monkeypatch, 3)
    config = config_of(save_steps=1, save_total_limit=2)
    with (
        pytest.warns(UserWarning, match="step 3 of phase whole: it is dead"),
        pytest.raises(DeadRun) as caught,
    ):
        run_phases(config, two(6), SOURCES)
    place = Path(config.output_dir) / "whole"
    assert (
        caught.value.where
        == f"step 4 of phase whole; the checkpoint of before is {place / 'checkpoint-2'}"
    )
    assert {one.name for one in place.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-3"}


def test_the_end_of_a_phase_tells_it(
    config_of: Callable[..., LemaConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    dead_from(monkeypatch, 3)
    config = config_of(stop_when_dead=False)
    with pytest.warns(UserWarning, match="may learn nothing") as told:
        run_phases(config, two(3), SOURCES)
    assert len(told) == 2  # one of each phase
    rows = read_metrics(Path(config.output_dir) / "metrics.jsonl")
    assert [row["dead"] for row in rows if row.get("event") == "phase_end"] == ["it is dead"] * 2
