"""Where memory runs out while graphs wait elsewhere, what is tried again leaves the numbers that
it leaves without.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_oom import Seen, at, device, in_rows, opened, two_steps, undisturbed
from test_oom import assert_same as assert_same_run
from tiny import Checkpoint

__all__ = ["undisturbed"]  # a fixture

CheckpointOf = Callable[..., Checkpoint]


@pytest.mark.covered(2)
@pytest.mark.slow
@pytest.mark.parametrize("mode", [True, "disk"])
@pytest.mark.parametrize("point", ["forward", "backward", "turn, up", "head"])
@pytest.mark.parametrize("limit", [{"slots": 1}, {"rows": 2}], ids=["slots", "rows"])
def test_a_pass_begun_again_has_its_graphs_away_again(
    checkpoint_of: CheckpointOf,
    undisturbed: Callable[[bool, int], Seen],
    tmp_path: Path,
    mode: Any,
    point: str,
    limit: dict[str, int],
) -> None:
    given, cut = (3, 3) if "slots" in limit else (6, 2)
    expected = undisturbed(False, cut)
    options = {"gradient_checkpointing": False}
    with opened(checkpoint_of("llama"), tmp_path, activation_offloading=mode, **options) as model:
        with (
            device(model, at(point, model, **limit)) as failing,
            pytest.warns(UserWarning, match="ran out"),
        ):
            found = two_steps(model.get_trainer(), in_rows(given))
        assert failing.failures
        assert_same_run(found, expected)
        assert model.adapter.activations.graphs.live_bytes == 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing is given up twice
            two_steps(model.get_trainer(), in_rows(given))
        assert model.adapter.activations.graphs.live_bytes == 0
