"""TRL's trainers, and transformers' own, train a streamed model to the same bits as the whole
one with PEFT.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trlruns import (
    KINDS,
    NUM_LAYERS,
    SHAPES,
    RecordedDPO,
    RecordedKTO,
    RecordedSFT,
    RecordedTrainer,
    outcome,
    save,
    streamed_model,
    trainer_of,
    whole_model,
)

from lema import StreamingMixin

# TRL calls what transformers renamed.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`gradient_checkpointing_(en|dis)able` is deprecated:FutureWarning",
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
)


@pytest.fixture(scope="module", params=SHAPES)
def directory(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("kind", KINDS)
def test_twenty_steps_are_those_of_the_whole_model_to_the_last_bit(
    kind: str, directory: Path, tmp_path: Path
) -> None:
    losses, weights = outcome(trainer_of(kind, whole_model(directory), tmp_path))
    model = streamed_model(directory)
    found_losses, found = outcome(trainer_of(kind, model, tmp_path))
    assert found_losses == losses
    assert len(set(losses)) > 10
    assert found.keys() == weights.keys()
    assert all(torch.equal(one, weights[name]) for name, one in found.items())
    assert all(
        one.is_meta
        for name, one in model.named_parameters()
        if ".layers." in name and "lora_" not in name
    )
    model.close()


class StreamingTrainer(StreamingMixin, RecordedTrainer):
    pass


class StreamingSFT(StreamingMixin, RecordedSFT):
    pass


class StreamingDPO(StreamingMixin, RecordedDPO):
    pass


class StreamingKTO(StreamingMixin, RecordedKTO):
    pass


STREAMING = {
    "trainer": StreamingTrainer,
    "sft": StreamingSFT,
    "dpo": StreamingDPO,
    "kto": StreamingKTO,
}
# forwards without a backward: references, and KL's completions
ONCE_UP = {
    "trainer": 0,
    "sft": 0,
    "dpo": 1,
    "kto": 3,
}


@pytest.mark.parametrize("kind", STREAMING)
def test_accumulation_is_one_pass_of_the_same_bits(kind: str, llama: Path, tmp_path: Path) -> None:
    accumulated = {"gradient_accumulation_steps": 4, "max_steps": 5, "max_grad_norm": 0.1}
    losses, weights = outcome(trainer_of(kind, whole_model(llama), tmp_path, **accumulated))
    model = streamed_model(llama)
    found_losses, found = outcome(
        trainer_of(kind, model, tmp_path, trainer=STREAMING[kind], **accumulated)
    )
    assert found_losses == losses
    assert all(torch.equal(one, weights[name]) for name, one in found.items())
    counters = model.opened.memory.counters
    slots = model.opened.memory.num_slots
    # and one to learn what a layer returns
    assert counters.leases == 5 * NUM_LAYERS * (2 + ONCE_UP[kind]) + 1
    # Around a turn the slots keep their layers: at the top before the backward, at the bottom after
    # it.
    steady = 2 * (NUM_LAYERS - slots) + ONCE_UP[kind] * NUM_LAYERS
    assert counters.layers_read == 5 * steady + slots
    model.close()
