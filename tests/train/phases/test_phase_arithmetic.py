"""`arithmetic: fast` holds in every phase whose adapters train, also in a run that goes on in
the midst of it.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from phaseruns import LORA, SOURCES, STEP, assert_same, logged, plan_of, weights

from lema import LemaConfig
from lema.train.phases.run import run_phases


@pytest.mark.slow
def test_adapters_of_phases_are_fast_and_go_on_bitwise(
    config_of: Callable[..., LemaConfig],
) -> None:
    plan = plan_of({**LORA, "tokens": 3 * STEP})
    ends = {}
    for arithmetic in ("exact", "fast"):
        config = config_of(arithmetic, arithmetic=arithmetic)
        ends[arithmetic] = (
            run_phases(config, plan, SOURCES),
            logged(Path(config.output_dir), "loss"),
        )
    (end, losses), (fast, near) = ends.values()
    assert len(losses) == 3 and near == pytest.approx(losses, rel=1e-4)
    mine = weights(fast)
    theirs = weights(end)
    assert mine.keys() == theirs.keys() and any((mine[name] != theirs[name]).any() for name in mine)

    begun = Path(config.output_dir) / "adapters" / "checkpoint-1"
    again = run_phases(config_of("again", arithmetic="fast"), plan, SOURCES, start=begun)
    assert_same(again, fast)
