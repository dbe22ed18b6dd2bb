"""The record of a run that was killed, anywhere and any number of times, is that of the run that
nothing disturbed.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from faults.shortrun import of_record, record_of
from killed import killed
from smallrun import run_fit, settings, token_rows

from lema import LemaConfig

ROWS = token_rows(8)
EVAL_ROWS = token_rows(3, seed=2)
RUNS: dict[str, dict[str, Any]] = {
    # Lines cover two steps, checkpoints fall between them, and evaluations come at the ends of
    # epochs, after these.
    "epochs": {
        "num_train_epochs": 2.0,
        "save_steps": 1,
        "logging_steps": 2,
        "load_best_model_at_end": True,
    },
    # Evaluations end the run, in the midst of an epoch, before the checkpoint of their step.
    "intervals": {
        "max_steps": 7,
        "save_steps": 1,
        "eval_steps": 1,
        "eval_on_start": True,
        "save_total_limit": 2,
        "early_stopping_patience": 2,
        "early_stopping_threshold": 0.05,
    },
}
pytestmark = pytest.mark.usefixtures("fast_disk")

FEWEST = 20  # changes; fewer would mean that they are not seen


def config_of(llama: Path, out: Path, way: str) -> LemaConfig:
    return settings(llama, out, lora_dropout=0.1, **RUNS[way])


def go_on(config: LemaConfig) -> dict[str, Any]:
    """Train, from the newest checkpoint if there is one; return what the run has come to, but
    for times.
    """
    resume = any(Path(config.output_dir).glob("checkpoint-*"))
    return of_record(run_fit(config, ROWS, EVAL_ROWS, resume=resume)[0])


def told_of(out: Path) -> dict[str, Any]:
    """Return all that a run has left which tells of it."""
    left = {path.name: path for path in out.glob("checkpoint-*")}
    logs = {
        name: json.loads((path / "trainer_state.json").read_text()) for name, path in left.items()
    }
    for log in logs.values():
        log["log_history"] = [of_record(row) for row in log["log_history"]]
    card = [
        line
        for line in (out / "README.md").read_text().splitlines()
        if not line.startswith("| train_")
    ]
    card = [line for line in card if out.name not in line]
    adapter = (out / "adapter_model.safetensors").read_bytes()
    return {"metrics": record_of(out), "log": logs, "card": card, "adapter": adapter}


def straight(
    llama: Path, way: str, tmp_path: Path, patch: pytest.MonkeyPatch
) -> tuple[list[str], Any, Any]:
    """Return the changes that a run makes which nothing disturbs, what it comes to, and what it
    tells.
    """
    out = tmp_path / "straight"
    results = list[Any]()
    every = killed(out, patch, lambda: results.append(go_on(config_of(llama, out, way))), -1)
    whole = told_of(out)
    assert any("loss" in row for row in whole["metrics"]) and "train_loss" in whole["metrics"][-1]
    return every, results[0], whole


@pytest.mark.parametrize(
    "stride",
    [pytest.param(19, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.exhaustive)],
)
@pytest.mark.parametrize("way", RUNS)
def test_killed_at_any_change_of_the_disk_it_leaves_the_record_of_the_run(
    llama: Path, way: str, stride: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every, expected, whole = straight(llama, way, tmp_path, monkeypatch)
    assert len(every) >= FEWEST
    wrong = []
    for at in range(0, len(every), stride):
        out = tmp_path / f"cut-{at}"
        config = config_of(llama, out, way)
        killed(out, monkeypatch, lambda config=config: go_on(config), at)
        found = go_on(config)
        if found != expected or told_of(out) != whole:
            wrong.append(
                f"{at} of {len(every)}, {every[at]}: "
                f"{difference(found, expected, told_of(out), whole)}"
            )
    assert not wrong, "\n".join(wrong)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", RUNS)
def test_killed_again_and_again_it_leaves_the_record_of_the_run(
    llama: Path, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected, whole = straight(llama, way, tmp_path, monkeypatch)
    config = config_of(llama, tmp_path / "cut", way)
    kills = 0
    lives = 11  # changes that a process lives to make: more and more, so that one comes to the end
    while (
        len(killed(tmp_path / "cut", monkeypatch, lambda: go_on(config), lives, last=True)) > lives
    ):
        kills = kills + 1
        lives = lives + 5
    assert kills >= 2
    found = go_on(config)
    told = told_of(tmp_path / "cut")  # once more, when the run has ended
    assert (found, told) == (expected, whole), difference(found, expected, told, whole)


def difference(found: Any, expected: Any, told: Any, whole: Any) -> str:
    """Say what differs, for the message."""
    names = [name for name in whole if told[name] != whole[name]]
    lines = [row for row in whole["metrics"] if row not in told["metrics"]]
    more = [row for row in told["metrics"] if row not in whole["metrics"]]
    same = f"{len(told['metrics'])} lines for {len(whole['metrics'])}"
    return (
        f"result {found if found != expected else 'the same'}; {names}; {same}; missing "
        f"{lines}, more {more}"
    )
