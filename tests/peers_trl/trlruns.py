"""Runs of TRL's trainers, and transformers' own, on a whole model with PEFT and on a streamed
one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Trainer,
    TrainingArguments,
)
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

import lema

NUM_LAYERS = 8
SEED = 42
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
WORDS = [f"w{number}" for number in range(60)]
SIZES: dict[str, Any] = {
    "vocab_size": len(SPECIAL + WORDS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES,
        head_dim=8,
        moe_intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
    ),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=8, query_pre_attn_scalar=8, sliding_window=6),
}


def text(start: int, count: int) -> str:
    return " ".join(WORDS[(7 * start + 3 * number) % len(WORDS)] for number in range(count))


SFT_ROWS = [{"text": text(number, 14 + number % 5)} for number in range(48)]
DPO_ROWS = [
    {
        "prompt": text(number, 6),
        "chosen": " " + text(number + 1, 7),
        "rejected": " " + text(number + 2, 9),
    }
    for number in range(48)
]
KTO_ROWS = [
    {
        "prompt": text(number, 6),
        "completion": " " + text(number + 1, 5 + number % 4),
        "label": number % 3 != 0,
    }
    for number in range(48)
]


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


class Recorded:
    """Keeps every loss that a training step returns, unrounded."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]
        self.__dict__.setdefault("losses", []).append(loss.item())
        return loss


class RecordedTrainer(Recorded, Trainer):
    """`transformers`' own, given rows of text as TRL's are."""

    def __init__(
        self, model: Any, args: Any, train_dataset: Dataset, processing_class: Any, **options: Any
    ) -> None:
        rows = train_dataset.map(lambda row: processing_class(row["text"]), remove_columns=["text"])
        collator = DataCollatorForLanguageModeling(processing_class, mlm=False)
        super().__init__(
            model=model, args=args, train_dataset=rows, data_collator=collator, **options
        )


class RecordedSFT(Recorded, SFTTrainer):
    pass


class RecordedDPO(Recorded, DPOTrainer):
    pass


class RecordedKTO(Recorded, KTOTrainer):
    pass


KINDS: dict[str, tuple[Any, Any, list[dict[str, Any]]]] = {
    "trainer": (RecordedTrainer, TrainingArguments, SFT_ROWS),
    "sft": (RecordedSFT, SFTConfig, SFT_ROWS),
    "dpo": (RecordedDPO, DPOConfig, DPO_ROWS),
    "kto": (RecordedKTO, KTOConfig, KTO_ROWS),
}


def save(shape: str, directory: Path, **options: Any) -> Path:
    """Write a random model as `transformers` writes it, and its tokenizer. `options` are further
    values of its config.
    """
    torch.manual_seed(1)
    config = SHAPES[shape]
    model = AutoModelForCausalLM.from_config(type(config)(**{**config.to_diff_dict(), **options}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory


def lora(**options: Any) -> LoraConfig:
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return LoraConfig(**{"r": 4, "target_modules": targets, "task_type": "CAUSAL_LM", **options})


def whole_model(directory: Path, **options: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(directory)
    torch.manual_seed(SEED)
    return get_peft_model(model, lora(**options))


def streamed_model(directory: Path, settings: dict[str, Any] | None = None, **options: Any) -> Any:
    return lema.streamed(directory, lora(**options), device="cpu", seed=SEED, **(settings or {}))


def recomputing(wanted: bool) -> dict[str, bool]:
    """Return the argument by which a backward computes layers again, or not, with the name that the
    installed release of transformers has for it."""
    name = "activation_checkpointing"
    return {
        name if name in TrainingArguments.__dataclass_fields__ else "gradient_checkpointing": wanted
    }


def trainer_of(
    kind: str,
    model: Any,
    directory: Path,
    *,
    trainer: Any = None,
    evaluated: int = 0,
    **arguments: Any,
) -> Any:
    """Return a trainer of a model that has its adapters, which it evaluates on so many rows."""
    known, settings, rows = KINDS[kind]
    chosen = {
        "output_dir": str(directory),
        "max_steps": 20,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        **recomputing(True),
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        **arguments,
    }
    if "router_aux_loss_coef" in settings.__dataclass_fields__:
        chosen.setdefault("router_aux_loss_coef", 0.0)
    data = {"train_dataset": Dataset.from_list(rows)}
    if evaluated:
        data["eval_dataset"] = Dataset.from_list(rows[:evaluated])
    return (trainer or known)(
        model=model, args=settings(**chosen), processing_class=tokenizer(), **data
    )


def adapters(model: Any, name: str = "default") -> dict[str, torch.Tensor]:
    return {
        key: one.detach().clone() for key, one in model.named_parameters() if f".{name}." in key
    }


def outcome(trainer: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train; return every loss and the adapter."""
    trainer.train()
    assert (
        len(trainer.losses) == trainer.state.global_step * trainer.args.gradient_accumulation_steps
    )
    return trainer.losses, adapters(trainer.model)
