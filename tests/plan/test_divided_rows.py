"""A run in which processes divide rows is planned with their parts as chunks."""

from pathlib import Path

from smallrun import settings, write_model

from lema.plan.divided_rows import in_parts
from lema.plan.plan import make_plan


def test_a_plan_says_what_processes_send(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    config = settings(model, tmp_path / "out", context_parallel_size=4, max_length=64)
    assert in_parts(config, None).sequence_chunk == 8
    notes = "\n".join(make_plan(config)[0].notes)
    assert "context_parallel_size: 4 processes divide each row" in notes
    assert "in 8 chunks of 8" in notes


def test_longer_chunks_than_parts_are_parts(tmp_path: Path) -> None:
    options = {"context_parallel_size": 2, "max_length": 100}
    config = settings(tmp_path, tmp_path / "out", **options)
    assert in_parts(config, None).sequence_chunk == 25
    assert in_parts(config.model_copy(update={"sequence_chunk": 7}), None).sequence_chunk == 7
