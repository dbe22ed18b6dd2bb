"""A phase drops steps that are not finite, if the config says so, and names their rows."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from phaseruns import SOURCES, two, weights
from torch import Tensor

from lema import LemaConfig
from lema.engine import StreamedModel
from lema.errors import NonFiniteError
from lema.train.metrics import read_metrics
from lema.train.phases.run import run_phases


def spoil(monkeypatch: pytest.MonkeyPatch, *calls: int) -> None:
    """Make NaN of the losses of some calls, counted from 1 over all phases."""
    count = itertools.count(1)
    loss = StreamedModel.loss

    def called(model: StreamedModel, *arguments: Any, **options: Any) -> Tensor:
        found = loss(model, *arguments, **options)
        return found * torch.nan if next(count) in calls else found

    monkeypatch.setattr(StreamedModel, "loss", called)


@pytest.mark.slow
def test_a_step_of_each_kind_of_phase_is_dropped(
    config_of: Callable[..., LemaConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(max_skipped_steps=1)
    spoil(monkeypatch, 2, 4)
    with pytest.warns(UserWarning, match="was dropped, 1 of at most 1"):
        end = run_phases(config, two(3), SOURCES)
    rows = read_metrics(Path(config.output_dir) / "metrics.jsonl")
    told = [
        (row["phase"], row["step_in_phase"], row["skipped"])
        for row in rows
        if row.get("event") == "skipped"
    ]
    assert told == [("whole", 2, 1), ("adapters", 1, 1)]
    assert [row["step"] for row in rows if "loss" in row] == [1, 3, 5, 6]
    assert all(
        bool(tensor.isfinite().all())
        for tensor in weights(end).values()
        if tensor.is_floating_point()
    )


@pytest.mark.slow
@pytest.mark.parametrize(("call", "phase"), [(2, "whole"), (4, "adapters")])
def test_the_rows_and_their_data_sets_are_named(
    call: int, phase: str, config_of: Callable[..., LemaConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(save_steps=1)
    spoil(monkeypatch, call)
    with pytest.raises(NonFiniteError, match="the loss is nan") as caught:
        run_phases(config, two(2), SOURCES)
    place = caught.value.where.partition(";")[0]
    assert (
        place.startswith("step 2, rows ") and place.count(" of one") + place.count(" of two") == 4
    )
    saved = Path(config.output_dir) / phase
    assert [path.name for path in saved.glob("checkpoint-*")] == ["checkpoint-1"]
    found = weights(saved / "checkpoint-1")
    assert all(
        bool(tensor.isfinite().all()) for tensor in found.values() if tensor.is_floating_point()
    )
