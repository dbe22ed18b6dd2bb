"""Weights that train: a step that is stopped leaves nothing of it, and one that has begun to
step is taken whole.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fulltraining import config_of, everything
from phaseruns import HELD, SOURCES, assert_same, logged, two
from tiny import Checkpoint, micro_batches

from lema import LemaConfig, LemaModel
from lema.backend.interrupt import StopRequested
from lema.errors import Stopped
from lema.train.full.training import FullTraining
from lema.train.phases.run import run_phases
from lema_cpu import CpuBackend

MEASURED = ("loss", "eval_loss", "grad_norm", "learning_rate")


class Asked:
    """Who is asked whether to stop, and says so the `count`-th time, and only then."""

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self.times = 0

    def __call__(self) -> str | None:
        self.times += 1
        return "a test" if self.times == self.count else None


@pytest.mark.slow
@pytest.mark.parametrize("clipped", [1.0, None], ids=["clipped", "layer by layer"])
def test_a_step_that_is_stopped_leaves_nothing(
    clipped: float | None, checkpoint_of: Callable[..., Checkpoint]
) -> None:
    """Wherever it is, at every third place: the step that is then taken is bit for bit the
    first.
    """
    config = config_of(checkpoint_of("llama"), max_grad_norm=clipped, gradient_checkpointing=True)
    ends = []
    for stopped in (False, True):
        model = LemaModel(config, backend=CpuBackend(poison=True))
        model.skeleton.train()
        training = FullTraining(model.adapter, config, everything)
        asked = Asked()
        batches = micro_batches(2)
        before = {name: master.detach().clone() for name, master in training.masters.items()}
        while True:
            asked.count = asked.count + 3 * stopped
            asked.times = 0  # every third place
            try:
                with model.adapter.interruptible(asked):
                    training.accumulate(batches)
                break
            except StopRequested:
                assert all(
                    torch.equal(master, before[name]) for name, master in training.masters.items()
                )
                assert training.global_step == 0
        ends.append((training.global_step, asked.times, training.masters))
        training.accumulate(batches)
        model.close()
    layers = model.split.num_layers
    # Before each lease and each of two micro-batches: the whole way, or up to where the top layer
    # is stepped.
    assert ends[0][1] == ends[1][1] == 3 * (2 * layers - 1 if clipped else layers)
    assert (ends[0][0], ends[1][0]) == (1, 1)
    assert all(torch.equal(one, ends[1][2][name]) for name, one in ends[0][2].items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", ["first layer", "midway", "last validation", "next phase", "very last"]
)
def test_phases_go_on_from_wherever_they_were_stopped(
    place: str, config_of_phases: Callable[..., LemaConfig]
) -> None:
    whole = config_of_phases("whole")
    cut = config_of_phases("cut")
    asked = Asked()
    plan = two(2, seed=3)
    end = run_phases(whole, plan, SOURCES, held_out=HELD, at_layer=asked)
    in_phase = asked.times // 2
    counts = {
        "first layer": 1,
        "midway": 40,
        "last validation": in_phase - 5,
        "next phase": in_phase + 1,
    }
    with pytest.raises(Stopped) as stopped:
        stop = Asked(counts.get(place, asked.times))
        run_phases(cut, plan, SOURCES, held_out=HELD, at_layer=stop)
    assert Path(stopped.value.where).is_dir()
    assert_same(run_phases(cut, plan, SOURCES, held_out=HELD, resume=True), end)
    for key in MEASURED:
        assert logged(Path(cut.output_dir), key) == logged(Path(whole.output_dir), key)


@pytest.fixture
def config_of_phases(
    tmp_path: Path, checkpoint_of: Callable[..., Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., LemaConfig]:
    """Return the settings of a run in a directory of that name, on a disk that is not waited
    for.
    """
    monkeypatch.setattr("os.fsync", lambda _: None)
    steps = {
        "save_steps": 0,
        "eval_steps": 2,
        "logging_steps": 2,
        "max_grad_norm": 1.0,
        "gradient_checkpointing": True,
    }
    model = str(checkpoint_of("llama", dropout=0.1).streamed)
    return lambda name: LemaConfig(model, device="cpu", output_dir=str(tmp_path / name), **steps)
