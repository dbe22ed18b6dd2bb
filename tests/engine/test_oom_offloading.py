"""Where memory runs out while graphs wait elsewhere, what is tried again leaves the numbers that it leaves without."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_oom import assert_same as assert_same_run
from test_oom import at, device, in_rows, nothing, opened, two_steps
from tiny import Checkpoint

CheckpointOf = Callable[..., Checkpoint]


@pytest.mark.slow
@pytest.mark.parametrize("mode", [True, "disk"])
@pytest.mark.parametrize("point", ["forward", "backward", "turn, up", "head"])
@pytest.mark.parametrize("limit", [{"slots": 1}, {"rows": 2}], ids=["slots", "rows"])
def test_a_pass_begun_again_has_its_graphs_away_again(
    checkpoint_of: CheckpointOf, tmp_path: Path, mode: Any, point: str, limit: dict[str, int]
) -> None:
    given, cut = (3, 3) if "slots" in limit else (6, 2)
    checkpoint, options = checkpoint_of("llama"), {"gradient_checkpointing": False}
    with opened(checkpoint, tmp_path, **options) as model, device(model, nothing):
        expected = two_steps(model.get_trainer(), in_rows(cut))
    with opened(checkpoint, tmp_path, activation_offloading=mode, **options) as model:
        with device(model, at(point, model, **limit)) as failing, pytest.warns(UserWarning, match="ran out"):
            found = two_steps(model.get_trainer(), in_rows(given))
        assert failing.failures
        assert_same_run(found, expected)
        assert model.adapter.graphs.live_bytes == 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing is given up twice
            two_steps(model.get_trainer(), in_rows(given))
        assert model.adapter.graphs.live_bytes == 0
