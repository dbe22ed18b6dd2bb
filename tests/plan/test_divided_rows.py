"""A run in which processes divide rows is planned with their parts as chunks."""

from pathlib import Path
from typing import Any

import pytest
from smallrun import settings, write_model

from lema.plan.divided_rows import in_parts
from lema.plan.machine import profile
from lema.plan.plan import Plan, make_plan


def test_a_plan_says_what_processes_send(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    config = settings(model, tmp_path / "out", context_parallel_size=4, max_length=64)
    assert in_parts(config, None).sequence_chunk == 8
    notes = "\n".join(make_plan(config)[0].notes)
    assert "context_parallel_size: 4 processes divide each row" in notes
    assert "in 8 chunks of 8" in notes


def test_a_process_keeps_its_part_of_rows_and_computes_it(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    options = {"max_length": 64, "gradient_checkpointing": True, "boundary_activations": "device"}

    def planned(**changes: Any) -> Plan:
        config = settings(model, tmp_path / "out", **options, **changes)
        return make_plan(config, profile("4090"))[0]

    whole_rows, part = planned(sequence_chunk=8), planned(context_parallel_size=4)
    once, divided = (plan.needs.planner.workload for plan in (whole_rows, part))
    assert once is not None
    assert divided is not None
    assert 4 * part.memory.device["boundaries"] == whole_rows.memory.device["boundaries"]
    assert 4 * divided.hidden_bytes == once.hidden_bytes
    of_layer, of_part = once.works[0], divided.works[0]
    # those of whole rows are there in each process
    assert of_part.keys_values_bytes == of_layer.keys_values_bytes
    assert of_part.backward == pytest.approx(of_layer.backward / 4, rel=1e-6)
    assert (of_layer.launches, of_part.launches) == (8, 2)


def test_longer_chunks_than_parts_are_parts(tmp_path: Path) -> None:
    options = {"context_parallel_size": 2, "max_length": 100}
    config = settings(tmp_path, tmp_path / "out", **options)
    assert in_parts(config, None).sequence_chunk == 25
    assert in_parts(config.model_copy(update={"sequence_chunk": 7}), None).sequence_chunk == 7
