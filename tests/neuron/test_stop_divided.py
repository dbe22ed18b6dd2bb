"""Processes that compute every layer together are stopped before any layer: all of them, whichever is told to."""

from pathlib import Path

import pytest
from forked import run_forked
from smallrun import write_model
from stopped import stopped_in_turn


@pytest.mark.parametrize(
    ("way", "count", "rows"),
    [("divided", 2, 11), ("divided-by-tokens", 2, 11), ("divided", 4, 9)],
    ids=["2", "2-by-tokens", "two-copies-of-2-one-without-rows-in-the-last-batch"],
)
def test_what_stops_one_process_stops_all_after_the_same_step(way: str, count: int, rows: int, tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    run_forked(stopped_in_turn, [tmp_path, way, rows], count, tmp_path, 240)
