"""Of several processes one is told to stop: all do, after the same step, wherever each of them
is, and none waits.
"""

from pathlib import Path

import pytest
from forked import run_forked
from smallrun import write_model
from stopped import stopped_in_turn


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "count", "rows"),
    [
        ("whole", 2, 11),
        ("sharded", 2, 11),
        ("divided", 2, 11),
        ("divided-by-tokens", 2, 11),
        ("divided", 4, 9),
    ],
    ids=[
        "whole",
        "sharded",
        "divided",
        "divided-by-tokens",
        "two-copies-one-without-rows-in-the-last-batch",
    ],
)
def test_what_stops_one_process_stops_all_after_the_same_step(
    way: str, count: int, rows: int, tmp_path: Path
) -> None:
    write_model(tmp_path / "model")
    run_forked(stopped_in_turn, [tmp_path, way, rows], count, tmp_path, 240)
