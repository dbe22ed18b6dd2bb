"""The optimizer is carried from weights to other weights of the same model, by their names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from phaseruns import FULL, HALF, SOURCES, STEP, Killed, assert_same, count_writes, plan_of

from lema import LemaConfig
from lema.train.full.training import FullTraining
from lema.train.phases.run import run_phases

PART = {
    "trainable": ["q_proj", "k_proj"],
    "tokens": STEP,
    "mixture": HALF,
    "learning_rate": 3e-3,
    "name": "part",
}


def moments(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """Note the size of the first moments that each phase of weights begins with, by name."""
    found: list[dict[str, float]] = []
    step = FullTraining.accumulate

    def noting(self: FullTraining, *given: Any, **options: Any) -> Any:
        if self.global_step == 0:
            state = self.optimizer.state
            found.append(
                {
                    name: float(state[master]["exp_avg"].abs().sum())
                    if "exp_avg" in state.get(master, {})
                    else 0.0
                    for name, master in self.masters.items()
                }
            )
        return step(self, *given, **options)

    monkeypatch.setattr(FullTraining, "accumulate", noting)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["carry", "reset"])
def test_what_trained_before_keeps_its_moments(
    policy: str, config_of: Callable[..., LemaConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = moments(monkeypatch)
    then = {**PART, "trainable": ["k_proj", "v_proj"], "name": "other", "optimizer": policy}
    run_phases(config_of(save_steps=0), plan_of(PART, then), SOURCES)
    first, second = found
    assert set(first.values()) == {0.0}
    known = {name for name in second if ".k_proj." in name}
    assert known and known != set(second)
    assert {name for name, size in second.items() if size > 0} == (
        known if policy == "carry" else set()
    )


@pytest.mark.slow
def test_stopped_at_the_boundary_it_carries_all_the_same(
    config_of: Callable[..., LemaConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of({**FULL, "tokens": STEP}, {**PART, "optimizer": "carry"})
    expected = run_phases(config_of("straight", save_steps=0), plan, SOURCES)
    for after in (5, 6, 7):  # the first phase's checkpoint, its notes, its model are written
        config = config_of(f"stopped-{after}", save_steps=0)
        with monkeypatch.context() as patch:
            count_writes(patch, after)
            with pytest.raises(Killed):
                run_phases(config, plan, SOURCES)
        assert_same(run_phases(config, plan, SOURCES, resume=True), expected)
    # From elsewhere, too: there the checkpoint is needed besides the model.
    there = Path(config_of("straight").output_dir) / "whole" / "checkpoint-1"
    assert_same(
        run_phases(config_of("elsewhere", save_steps=0), plan, SOURCES, start=there), expected
    )
