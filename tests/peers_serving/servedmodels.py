"""Tiny models of types that servers have, adapters of LEMA for them, and what PEFT makes of both.

Their attention has heads of 32 numbers, which vLLM's kernels for the CPU take.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from publishedclass import publish, published_class
from smallrun import VOCABULARY, token_rows, tokenizer
from tinyconfig import tiny_config
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from lema import LemaConfig, LemaModel

__all__ = [
    "BOUND",
    "DENSE",
    "ROWS",
    "difference",
    "log_probabilities",
    "measured",
    "model_of",
    "next_log_probability",
    "trained",
]

BOUND = 5e-5  # of a log-probability; sums of float32 in another order differ by 1e-5 at most
COMMON: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
EXPERTS: Mapping[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
VISION: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
# What vLLM serves with an adapter on a CPU. Of the types that see images this is idefics3, because
# for most others vLLM imports torchvision, which this environment has not.
DENSE = ("llama", "qwen3", "gemma3_text", "mistral", "phi3", "idefics3")
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "llama": COMMON | {"tie_word_embeddings": False},
    "qwen3": COMMON | {"tie_word_embeddings": True},
    "gemma3_text": COMMON
    | {
        "query_pre_attn_scalar": 32,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "mistral": COMMON | {"sliding_window": None, "tie_word_embeddings": False},
    "phi3": COMMON | {"hidden_size": 128, "tie_word_embeddings": False},
    "idefics3": {
        "text_config": COMMON | {"model_type": "llama"},
        "vision_config": VISION,
        "image_token_id": VOCABULARY - 1,
        "pad_token_id": 0,
        "scale_factor": 2,
        "tie_word_embeddings": False,
    },
    "mixtral": COMMON | EXPERTS,
    "qwen3_moe": COMMON | EXPERTS | {"decoder_sparse_step": 1, "mlp_only_layers": []},
    "gpt_oss": COMMON
    | EXPERTS
    | {"sliding_window": 16, "hidden_size": 128, "intermediate_size": 64},
}
ROWS = [row["input_ids"] for row in token_rows(3, length=20)]


def model_of(model_type: str, directory: Path) -> Path:
    """Write a random model as its publisher would, with a tokenizer; of a type that has no
    settings here, with the tiny config of all tests."""
    config: PreTrainedConfig = (
        CONFIG_MAPPING[model_type](**SETTINGS[model_type])
        if model_type in SETTINGS
        else tiny_config(model_type)
    )
    publish(model_type, directory, config)
    tokenizer().save_pretrained(directory)
    return directory


def trained(model: Path, directory: Path, *, seed: int = 3, **settings: Any) -> Path:
    """Write an adapter of LEMA whose B is not zero."""
    rank = settings.get("lora_rank", 8)
    base: dict[str, Any] = {"device": "cpu", "lora_rank": rank, "lora_alpha": 2 * rank}
    with closing(LemaModel(LemaConfig(str(model), **base | settings))) as streamed:
        streamed.initialize_lora()
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in sorted(streamed.skeleton.named_parameters()):
                if ".lora_B." in name:
                    parameter.copy_(0.2 * torch.randn(parameter.shape, generator=draw))
        streamed.save_pretrained(directory)
    return directory


def log_probabilities(
    model: Path, adapter: Path | None = None, rows: Sequence[Sequence[int]] = ROWS
) -> list[list[float]]:
    """Return what `transformers`, and PEFT where there is an adapter, make of each row's tokens but
    the first."""
    kind = published_class(AutoConfig.from_pretrained(model))
    opened = kind.from_pretrained(model, dtype=torch.float32)
    if adapter is not None:
        opened = PeftModel.from_pretrained(opened, str(adapter))
    opened.eval()
    values = list[list[float]]()
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([row])
            logits = opened(input_ids=ids, use_cache=False).logits[0, :-1]
            values.append(logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist())
    return values


def next_log_probability(model: Path, adapter: Path, row: Sequence[int]) -> float:
    """Return what PEFT makes of the most likely token after a row."""
    kind = published_class(AutoConfig.from_pretrained(model))
    opened = PeftModel.from_pretrained(kind.from_pretrained(model), str(adapter)).eval()
    with torch.no_grad():
        logits = opened(input_ids=torch.tensor([list(row)]), use_cache=False).logits[0, -1]
    return float(logits.log_softmax(-1).max())


def difference(left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> float:
    """Return the largest difference of two tables of log-probabilities."""
    return max(
        abs(a - b)
        for left_row, right_row in zip(left, right, strict=True)
        for a, b in zip(left_row, right_row, strict=True)
    )


def measured(what: str, worst: float, bound: float = BOUND) -> None:
    """Make sure that a difference is within the bound, and add it to the file that
    `SERVING_TABLE` names."""
    if file := os.environ.get("SERVING_TABLE"):
        with Path(file).open("a", encoding="utf-8") as table:
            table.write(json.dumps({"what": what, "worst": worst}) + "\n")
    assert worst < bound, f"{what}: {worst}"
