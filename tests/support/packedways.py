"""Rows with images or sounds in chunks of their sequence, and in packs: loss and gradients are, to
rounding, those of the same rows whole and alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mediasteps import opened, settings
from parity import Outcome, all_gradients, relative_difference

from lema import LemaModel
from lema.data.batches import Batches, split_batch
from lema.model.files import read_data
from lema.train.batch import packed

__all__ = ["compare_ways", "step_of"]

ROUNDING = 2e-6  # of all gradients together, as of text in chunks
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": {"sequence_chunk": 5},
    "packs": {"packing": True},
    "packs in chunks": {"packing": True, "sequence_chunk": 7},
}


def step_of(model: LemaModel, micro_batches: list[Any]) -> Outcome:
    """Return loss and gradients of a step, without those that are not there."""
    model.skeleton.zero_grad()
    loss = model.adapter.loss(micro_batches)
    loss.backward()
    step = Outcome.of(model.skeleton, loss)
    gradients = {name: one for name, one in step.gradients.items() if one is not None}
    return Outcome(step.loss, gradients, step.generator)


def compare_ways(directory: Path, folder: Path, rows: list[dict[str, Any]], **changes: Any) -> None:
    """Train a step on rows in each way, and compare it with that of whole rows."""
    steps: dict[str, Outcome] = {}
    for way, of_way in WAYS.items():
        config = settings(directory, folder, rows, gradient_checkpointing=True, **changes, **of_way)
        with opened(config) as model:
            data = read_data(model.config, model.files, config.train_data)
            data = packed(data, model.adapter, config)
            assert (len(data) < len(rows)) == ("packs" in way)
            parts = Batches(data, len(data), micro_batch_size=2).micro_batches([0])
            steps[way] = step_of(model, parts)
            if "packs" in way:
                alone = [one for part in parts for one in split_batch(part, 1)]
                assert len(alone) == len(data)
                evaluated, _ = model.adapter.evaluate(alone)
                assert relative_difference(evaluated, steps[way].loss) < 1e-6
    expected = steps["whole"]
    for way, step in steps.items():
        assert relative_difference(step.loss, expected.loss) < 1e-6, way
        assert step.gradients.keys() == expected.gradients.keys()
        assert relative_difference(all_gradients(step), all_gradients(expected)) < ROUNDING, way
