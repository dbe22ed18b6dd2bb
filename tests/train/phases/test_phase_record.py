"""The record of phases that were killed, anywhere and any number of times, is that of phases
that nothing disturbed.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults.shortrun import of_record, record_of
from killed import killed
from phaseruns import FULL, HELD, LORA, SOURCES, STEP, plan_of

from lema import LemaConfig
from lema.train.phases.run import run_phases

PLAN = plan_of({**FULL, "tokens": 2 * STEP}, {**LORA, "tokens": 3 * STEP})
# Checkpoints, evaluations and lines of metrics come at steps of their own.
WAYS = {"save_steps": 2, "eval_steps": 1, "logging_steps": 2, "save_total_limit": 2}


def go_on(config: LemaConfig) -> None:
    place = Path(config.output_dir)
    run_phases(config, PLAN, SOURCES, held_out=HELD, resume=place.exists(), say=lambda _: None)


def told_of(out: Path) -> dict[str, Any]:
    """Return all that a run has left which tells of it."""
    found: dict[str, Any] = {"metrics": record_of(out)}
    for file in sorted(out.rglob("*.json")):
        if file.name in ("latest.json", "best.json"):
            found[str(file.relative_to(out))] = json.loads(file.read_text())
        if file.name == "trainer_state.json":
            log = json.loads(file.read_text())["log_history"]
            found[str(file.relative_to(out))] = [of_record(row) for row in log]
    adapter = out / "adapter_model.safetensors"
    return found | {"adapter": adapter.read_bytes()}


@pytest.fixture
def straight(
    config_of: Callable[..., LemaConfig], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], dict[str, Any]]:
    """The changes of the disk that a run makes which nothing disturbs, and what it tells."""
    config = config_of("straight", dropout=0.1, **WAYS)
    every = killed(Path(config.output_dir), monkeypatch, lambda: go_on(config), -1)
    return every, told_of(Path(config.output_dir))


def difference(told: dict[str, Any], whole: dict[str, Any]) -> str:
    """Say what differs, for the message."""
    names = [name for name in whole.keys() | told.keys() if told.get(name) != whole.get(name)]
    lines = [row for row in whole["metrics"] if row not in told["metrics"]]
    more = [row for row in told["metrics"] if row not in whole["metrics"]]
    return (
        f"{names}; {len(told['metrics'])} lines for {len(whole['metrics'])}; missing {lines}, "
        f"more {more}"
    )


@pytest.mark.parametrize(
    "stride",
    [pytest.param(19, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.exhaustive)],
)
def test_killed_at_any_change_of_the_disk_they_leave_the_record_of_the_run(
    stride: int,
    straight: tuple[list[str], dict[str, Any]],
    config_of: Callable[..., LemaConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    every, whole = straight
    assert len(every) >= 40
    wrong = []
    for at in range(0, len(every), stride):
        config = config_of(f"cut-{at}", dropout=0.1, **WAYS)
        killed(Path(config.output_dir), monkeypatch, lambda config=config: go_on(config), at)
        go_on(config)
        if (told := told_of(Path(config.output_dir))) != whole:
            wrong.append(f"{at} of {len(every)}, {every[at]}: {difference(told, whole)}")
    assert not wrong, "\n".join(wrong)


def test_killed_again_and_again_they_leave_the_record_of_the_run(
    straight: tuple[list[str], dict[str, Any]],
    config_of: Callable[..., LemaConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, whole = straight
    config = config_of("cut", dropout=0.1, **WAYS)
    place = Path(config.output_dir)
    kills = 0
    lives = 11  # changes that a process lives to make: more and more
    while len(killed(place, monkeypatch, lambda: go_on(config), lives, last=True)) > lives:
        kills = kills + 1
        lives = lives + 7
    assert kills >= 2
    assert (told := told_of(place)) == whole, difference(told, whole)
