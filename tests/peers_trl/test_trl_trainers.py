"""TRL's trainers with the mixin in front: `activation_offloading` works without an accelerator,
to the last bit.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from trlruns import recomputing

from lema.activations import ActivationOffloadingMixin

# TRL calls what transformers renamed.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`gradient_checkpointing_(en|dis)able` is deprecated:FutureWarning"
)

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
WORDS = [f"w{number}" for number in range(60)]
STEPS = 3


class OffloadingSFT(ActivationOffloadingMixin, SFTTrainer):
    pass


class OffloadingDPO(ActivationOffloadingMixin, DPOTrainer):
    pass


def text(start: int, count: int) -> str:
    return " ".join(WORDS[(7 * start + 3 * number) % len(WORDS)] for number in range(count))


SFT_ROWS = [{"text": text(number, 20 + number % 5)} for number in range(12)]
DPO_ROWS = [
    {
        "prompt": text(number, 8),
        "chosen": " " + text(number + 1, 9),
        "rejected": " " + text(number + 2, 11),
    }
    for number in range(12)
]
KINDS: dict[str, tuple[Any, Any, list[dict[str, str]]]] = {
    "sft": (OffloadingSFT, SFTConfig, SFT_ROWS),
    "dpo": (OffloadingDPO, DPOConfig, DPO_ROWS),
}


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(SPECIAL + WORDS)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


def trainer_of(kind: str, directory: Path, mode: Any, checkpointing: bool = False) -> Any:
    """Return a trainer of a tiny model with adapters; `mode` stands in its arguments."""
    trainer, settings, rows = KINDS[kind]
    torch.manual_seed(1)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(SPECIAL + WORDS), num_key_value_heads=2, **sizes, **tokens)
    )
    arguments = settings(
        output_dir=str(directory),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        activation_offloading=mode,
        **recomputing(checkpointing),
    )
    return trainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
    )


def outcome(trainer: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == STEPS
    return losses, {
        name: one.detach() for name, one in trainer.model.named_parameters() if one.requires_grad
    }


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("mode", [True, "disk", "hidden_states"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_the_same_to_the_last_bit(
    kind: str, mode: Any, checkpointing: bool, tmp_path: Path
) -> None:
    losses, weights = outcome(trainer_of(kind, tmp_path, False, checkpointing))
    trainer = trainer_of(kind, tmp_path, mode, checkpointing)
    assert trainer.args.activation_offloading == mode
    assert isinstance(trainer.maybe_activation_offload_context, nullcontext)
    found_losses, found = outcome(trainer)
    assert found_losses == losses
    assert found.keys() == weights.keys()
    assert all(torch.equal(one, weights[name]) for name, one in found.items())
    assert trainer.activation_offload_context.counters.bytes_out > 0
    assert trainer.activation_offload_context.live_bytes == 0
