"""Rows with images in chunks of their sequence, and in packs: loss and gradients are, to rounding,
those of the same rows whole and alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from imageprocessors import PROCESSORS, image_rows, publish_with_processor
from mediasteps import opened, settings
from parity import Outcome, all_gradients, relative_difference
from torch import Tensor

from lema import LemaModel
from lema.data.batches import Batches, split_batch
from lema.model.files import read_data
from lema.train.batch import packed

ROUNDING = 2e-6  # of all gradients together, as of text in chunks
Directories = Callable[[str], Path]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    """Return the directory of a model of a type, with its processor, which is written once."""
    root = tmp_path_factory.mktemp("published")

    def directory(model_type: str) -> Path:
        path = root / model_type
        return path if path.exists() else publish_with_processor(model_type, path)

    return directory


def outcome(model: LemaModel, micro_batches: list[dict[str, Tensor]]) -> Outcome:
    """Return loss and gradients of a step, without those that are not there."""
    loss = model.adapter.loss(micro_batches)
    loss.backward()
    step = Outcome.of(model.skeleton, loss)
    gradients = {name: one for name, one in step.gradients.items() if one is not None}
    return Outcome(step.loss, gradients, step.generator)


def assert_close(one: Outcome, other: Outcome) -> None:
    assert relative_difference(one.loss, other.loss) < 1e-6
    assert one.gradients.keys() == other.gradients.keys()
    assert relative_difference(all_gradients(one), all_gradients(other)) < ROUNDING


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", PROCESSORS)
def test_chunks_and_packs_have_the_gradients_of_whole_rows(
    model_type: str, attention: str, published: Directories, tmp_path: Path
) -> None:
    rows = image_rows(tmp_path)
    ways: dict[str, dict[str, Any]] = {
        "whole": {},
        "chunks": {"sequence_chunk": 5},
        "packs": {"packing": True},
        "packs in chunks": {"packing": True, "sequence_chunk": 7},
    }
    outcomes = {}
    for way, changes in ways.items():
        config = settings(
            published(model_type),
            tmp_path,
            rows,
            attn_implementation=attention,
            gradient_checkpointing=True,
            **changes,
        )
        with opened(config) as model:
            data = packed(
                read_data(model.config, model.files, config.train_data), model.adapter, config
            )
            assert (len(data) < len(rows)) == ("packs" in way)
            parts = Batches(data, len(data), micro_batch_size=2).micro_batches([0])
            outcomes[way] = outcome(model, parts)
            if "packs" in way:
                alone = [one for part in parts for one in split_batch(part, 1)]
                assert len(alone) == len(data)
                evaluated, _ = model.adapter.evaluate(alone)
                assert relative_difference(evaluated, outcomes[way].loss) < 1e-6
    for way in ways:
        assert_close(outcomes[way], outcomes["whole"])
