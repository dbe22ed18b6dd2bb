"""TRL's RewardTrainer trains a streamed model to the same bits as the whole one that it opens
itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification
from trl import RewardConfig, RewardTrainer
from trlruns import (
    DPO_ROWS,
    KINDS,
    SEED,
    SHAPES,
    Recorded,
    lora,
    outcome,
    save,
    streamed_model,
    trainer_of,
)

import lema
from lema import StreamingMixin

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:`gradient_checkpointing_(en|dis)able` is deprecated:FutureWarning"
    ),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*tensors on disk are not used.*lm_head"),
]


class RecordedReward(Recorded, RewardTrainer):
    pass


class StreamingReward(StreamingMixin, RecordedReward):
    pass


@pytest.fixture(autouse=True)
def rewarded(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{name: row[name] for name in ("chosen", "rejected")} for row in DPO_ROWS]
    monkeypatch.setitem(KINDS, "reward", (RecordedReward, RewardConfig, rows))


@pytest.fixture(scope="module", params=SHAPES)
def directory(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(request.param, tmp_path_factory.mktemp(request.param))


class Opening(RecordedReward):
    """Given the model by its name, so that TRL opens it, draws its head and attaches the
    adapter.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, peft_config=lora(task_type="SEQ_CLS"), **kwargs)


def test_twenty_steps_are_those_of_the_model_that_trl_opens(
    directory: Path, tmp_path: Path
) -> None:
    losses, weights = outcome(
        trainer_of("reward", str(directory), tmp_path, trainer=Opening, seed=SEED)
    )
    model = streamed_model(directory, task_type="SEQ_CLS")
    trainer = trainer_of("reward", model, tmp_path, seed=SEED)
    found_losses, found = outcome(trainer)
    assert found_losses == losses
    assert len(set(losses)) > 10
    assert found.keys() == weights.keys()
    assert any(".score." in name for name in found)
    assert all(torch.equal(one, weights[name]) for name, one in found.items())

    trainer.save_model(tmp_path / "saved")
    ids = {"input_ids": torch.arange(4, 24).view(2, 10)}
    base = AutoModelForSequenceClassification.from_pretrained(directory, num_labels=1)
    base.config.pad_token_id = 0
    whole = PeftModel.from_pretrained(base, tmp_path / "saved").eval()
    again = lema.streamed(directory, tmp_path / "saved", device="cpu")
    with torch.no_grad():
        scores = whole(**ids).logits
        assert torch.equal(model.eval()(**ids).logits, scores)
        assert torch.equal(again(**ids).logits, scores)
    again.close()
    model.close()


def test_accumulated_batches_of_rewards_are_one_pass(directory: Path, tmp_path: Path) -> None:
    accumulated = {"gradient_accumulation_steps": 4, "max_steps": 3, "seed": SEED}
    losses, weights = outcome(
        trainer_of("reward", str(directory), tmp_path, trainer=Opening, **accumulated)
    )
    model = streamed_model(directory, task_type="SEQ_CLS")
    found_losses, found = outcome(
        trainer_of("reward", model, tmp_path, trainer=StreamingReward, **accumulated)
    )
    assert found_losses == losses
    assert all(torch.equal(one, weights[name]) for name, one in found.items())
    assert model.opened.memory.counters.leases == 3 * 2 * 8 + 1
    model.close()
