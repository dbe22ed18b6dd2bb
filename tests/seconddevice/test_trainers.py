"""`lema.streamed` on the second device in `transformers`' Trainer: the losses are those of the
CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from peft import LoraConfig
from tiny import VOCABULARY, Checkpoint
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Trainer, TrainingArguments

import lema
from lema import StreamingMixin

CheckpointOf = Callable[..., Checkpoint]
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*pin_memory.*:UserWarning", "ignore:gradients are accumulated"
)


class Recorded(Trainer):
    """Keeps the loss of every batch."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self.__dict__.setdefault("losses", []).append(float(loss))
        return loss


class Streaming(StreamingMixin, Recorded):
    pass


def rows() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randint(3, VOCABULARY, (10,), generator=generator) for _ in range(24)]
    return [
        {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
        for ids in drawn
    ]


@pytest.mark.parametrize("trainer", [Recorded, Streaming])
def test_a_trainer_trains_it_as_on_the_cpu(
    checkpoint_of: CheckpointOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainer: Any
) -> None:
    """With accumulation, clipping, evaluation and a checkpoint; the optimizer's update is smooth,
    so that it does not turn rounding into signs."""
    losses = []
    for device in ("second", "cpu"):
        # the trainer's device, where it would find others itself
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", device)
        AcceleratorState._reset_state(reset_partial_state=True)
        arguments = TrainingArguments(
            str(tmp_path / device),
            max_steps=4,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            optim="sgd",
            learning_rate=0.1,
            save_steps=2,
            eval_strategy="steps",
            eval_steps=2,
            report_to=[],
            disable_tqdm=True,
        )
        config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        with closing(
            lema.streamed(checkpoint_of("llama").streamed, config, device=device)
        ) as model:
            run = trainer(model, arguments, train_dataset=rows(), eval_dataset=rows()[:4])
            with sdpa_kernel(SDPBackend.MATH):
                run.train()
        evaluated = [row["eval_loss"] for row in run.state.log_history if "eval_loss" in row]
        losses.append([*run.losses, *evaluated])
        assert (
            len(evaluated) == 2
            and (tmp_path / device / "checkpoint-4" / "adapter_model.safetensors").exists()
        )
    AcceleratorState._reset_state(reset_partial_state=True)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
