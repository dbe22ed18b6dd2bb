"""The models of `peers.py`: a Llama, or the text half of a Qwen3.5, which is what every peer can
train.
"""

from __future__ import annotations

from pathlib import Path

import torch
from common import Shape, write_model

__all__ = ["FAMILIES", "write_family"]

FAMILIES = "qwen3_5", "llama"


def write_family(directory: Path, shape: Shape, family: str) -> None:
    """Write random weights of a shape, of one of the `FAMILIES`, in the hub's format."""
    write_model(directory, shape) if family == "llama" else _write_qwen(directory, shape)


def _write_qwen(directory: Path, shape: Shape) -> None:
    """Write a Qwen3.5 as it is published, a tower for images with it, of which nothing is used and
    which is tiny here.

    All layers have full attention: linear attention has no kernel on the CPU.
    """
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

    config = AutoConfig.for_model("qwen3_5")
    config.text_config.update(
        {
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_hidden_layers": shape.layers,
            "layer_types": ["full_attention"] * shape.layers,
            "vocab_size": shape.vocabulary,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads or shape.heads,
            "head_dim": shape.hidden // shape.heads,
            "tie_word_embeddings": False,
            "dtype": shape.dtype,
        }
    )
    config.vision_config.update(
        {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": shape.hidden,
        }
    )
    config.update({"tie_word_embeddings": False, "dtype": shape.dtype})
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=getattr(torch, shape.dtype))
    model.save_pretrained(directory, max_shard_size=shape.layer_bytes)
    # AirLLM opens no model without a tokenizer; the benchmark's tokens are drawn.
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(directory)
