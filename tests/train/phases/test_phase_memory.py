"""Nothing of one phase is in memory when the next one makes what it trains."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from phaseruns import SOURCES, two

from lema import LemaConfig, LemaModel
from lema.train.full.training import FullTraining
from lema.train.phases import run as phases
from lema.train.phases.run import run_phases

Living = Callable[[], dict[str, int]]


@pytest.fixture
def living(monkeypatch: pytest.MonkeyPatch) -> Living:
    """Count what lives of the phase of weights, by kind; watching begins when its optimizer has
    stepped.
    """
    watched: dict[str, list[weakref.ref[Any]]] = {"masters": [], "moments": [], "streams": []}
    step = FullTraining.accumulate

    def watching(self: FullTraining, *given: Any, **options: Any) -> Any:
        result = step(self, *given, **options)
        groups = self.optimizer.param_groups
        state = self.optimizer.state
        masters = [parameter for group in groups for parameter in group["params"]]
        watched["masters"] = [weakref.ref(master) for master in masters]
        watched["moments"] = [
            weakref.ref(tensor)
            for master in masters
            for tensor in state[master].values()
            if isinstance(tensor, torch.Tensor) and tensor.numel() > 1
        ]
        watched["streams"] = [weakref.ref(self.model.stream)]
        return result

    monkeypatch.setattr(FullTraining, "accumulate", watching)
    return lambda: {
        kind: sum(one() is not None for one in found) for kind, found in watched.items()
    }


def counted(monkeypatch: pytest.MonkeyPatch, living: Living) -> list[dict[str, int]]:
    """Note what lives when adapters are about to be made, and right after the last step of
    weights.
    """
    found: list[dict[str, int]] = []
    attach = LemaModel.initialize_lora
    save = FullTraining.save_checkpoint

    def attaching(self: LemaModel) -> None:
        found.append(living())
        attach(self)

    def saving(self: FullTraining, *given: Any, **options: Any) -> None:
        found.append(living())
        save(self, *given, **options)

    monkeypatch.setattr(LemaModel, "initialize_lora", attaching)
    monkeypatch.setattr(FullTraining, "save_checkpoint", saving)
    return found


@pytest.mark.slow
def test_weights_and_their_optimizer_are_gone_before_adapters_are_made(
    config_of: Callable[..., LemaConfig], monkeypatch: pytest.MonkeyPatch, living: Living
) -> None:
    found = counted(monkeypatch, living)
    run_phases(config_of(save_steps=0), two(1), SOURCES)
    then, now = found
    assert then["masters"] > 0 and then["moments"] == 2 * then["masters"] and then["streams"] == 1
    assert now == {"masters": 0, "moments": 0, "streams": 0}


@pytest.mark.slow
def test_weights_are_gone_without_a_collection_because_nothing_holds_them_in_a_circle(
    config_of: Callable[..., LemaConfig], monkeypatch: pytest.MonkeyPatch, living: Living
) -> None:
    found = counted(monkeypatch, living)
    monkeypatch.setattr(phases, "gc", type("Idle", (), {"collect": staticmethod(lambda: 0)}))
    gc.disable()
    try:
        run_phases(config_of(save_steps=0), two(1), SOURCES)
    finally:
        gc.enable()
    assert found[0]["masters"] > 0
    assert (found[1]["masters"], found[1]["moments"]) == (0, 0), found[1]
