"""TRL's trainers, and transformers' own, train a streamed model to the same bits as the whole one with PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trlruns import KINDS, SHAPES, outcome, save, streamed_model, trainer_of, whole_model

# TRL calls what transformers renamed.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`gradient_checkpointing_(en|dis)able` is deprecated:FutureWarning",
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
)


@pytest.fixture(scope="module", params=SHAPES)
def directory(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("kind", KINDS)
def test_twenty_steps_are_those_of_the_whole_model_to_the_last_bit(kind: str, directory: Path, tmp_path: Path) -> None:
    losses, weights = outcome(trainer_of(kind, whole_model(directory), tmp_path))
    model = streamed_model(directory)
    found_losses, found = outcome(trainer_of(kind, model, tmp_path))
    assert found_losses == losses
    assert len(set(losses)) > 10
    assert found.keys() == weights.keys()
    assert all(torch.equal(one, weights[name]) for name, one in found.items())
    assert all(one.is_meta for name, one in model.named_parameters() if ".layers." in name and "lora_" not in name)
    model.close()
