"""Tiny random checkpoints of several architectures, deep enough that a layer mistaken for
another shows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3Config,
)

from lema.convert.prepare import prepare

# half of them fit beside the five slots of prefetch depth 4 without all of them fitting
NUM_LAYERS = 12
VOCABULARY = 96
WINDOW = 5  # of sliding attention: shorter than every sequence below
LENGTHS = (12, 9, 14, 7)  # of the micro-batches: each has masks and rotary tables of its own


@dataclass(frozen=True)
class Architecture:
    """What differs between the models under test.

    Attributes:
        config: makes the config; takes what varies (`tie_word_embeddings`) by name.
        dropouts: the config's own dropouts.
        layers: where the decoder layers are.
        targets: the linear modules of a layer, adapted by default.
        transposed: the linear modules keep their weights transposed.
        prepared: the checkpoint must be converted before it streams.
        attentions: the implementations of attention that `transformers` has for it.
    """

    config: Callable[..., PreTrainedConfig]
    dropouts: tuple[str, ...] = ("attention_dropout",)
    layers: str = "model.layers"
    targets: frozenset[str] = frozenset(
        {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    )
    transposed: bool = False
    prepared: bool = False
    attentions: tuple[str, ...] = ("eager", "sdpa")


def _config(make: Callable[..., PreTrainedConfig], **fixed: Any) -> Callable[..., PreTrainedConfig]:
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 96,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return lambda **varying: make(**sizes, **fixed, **varying)


def _gpt2(**varying: Any) -> PreTrainedConfig:
    return GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=NUM_LAYERS,
        n_head=4,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
        **varying,
    )


ARCHITECTURES = {
    "llama": Architecture(_config(LlamaConfig)),
    "qwen3": Architecture(_config(Qwen3Config, head_dim=8)),
    "mistral": Architecture(_config(MistralConfig, sliding_window=WINDOW)),
    "gemma2": Architecture(
        _config(Gemma2Config, head_dim=8, query_pre_attn_scalar=8, sliding_window=WINDOW),
        attentions=("eager",),
    ),
    "phi3": Architecture(
        _config(Phi3Config, sliding_window=WINDOW),
        dropouts=("attention_dropout", "resid_pdrop", "embd_pdrop"),
        targets=frozenset({"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}),
    ),
    "gpt2": Architecture(
        _gpt2,
        dropouts=("attn_pdrop", "resid_pdrop", "embd_pdrop"),
        layers="transformer.h",
        targets=frozenset({"c_attn", "c_proj", "c_fc"}),
        transposed=True,
    ),
    "mixtral": Architecture(
        _config(MixtralConfig, num_local_experts=4, num_experts_per_tok=2),
        targets=frozenset({"q_proj", "k_proj", "v_proj", "o_proj"}),
        prepared=True,
    ),
}


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk: `published` as `transformers` writes it, `streamed` what is opened for
    streaming.
    """

    architecture: Architecture
    published: Path
    streamed: Path


def write_checkpoint(
    name: str,
    directory: Path,
    *,
    tied: bool = False,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> Checkpoint:
    """Write a random model of the architecture `name` in shards, converted where it must be."""
    architecture = ARCHITECTURES[name]
    dropouts = dict.fromkeys(architecture.dropouts, dropout)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(
        architecture.config(tie_word_embeddings=tied, **dropouts)
    )
    with torch.no_grad():
        # norms and biases too: what is 1 or 0 everywhere tells no layers apart
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    published = directory / "published"
    model.to(dtype).save_pretrained(published, max_shard_size="150KB")
    assert len(list(published.glob("*.safetensors"))) > 1
    streamed = (
        prepare(published, directory / "prepared").path if architecture.prepared else published
    )
    return Checkpoint(architecture, published, streamed)


def micro_batches(
    count: int, *, padding: bool = False, lengths: tuple[int, ...] = LENGTHS
) -> list[dict[str, Tensor]]:
    """Draw `count` micro-batches of two rows, with different numbers of trained tokens.

    With `padding`, one row ends early; in every other micro-batch the second row begins late.
    """
    generator = torch.Generator().manual_seed(2)
    batches = []
    for index in range(count):
        ids = torch.randint(3, VOCABULARY, (2, lengths[index]), generator=generator)
        labels = ids.clone()
        labels[1, : 2 + index] = -100  # a prompt
        batch = {"input_ids": ids, "labels": labels}
        if padding:
            mask = torch.ones_like(ids)
            mask[0, -3:] = 0
            mask[1, : 2 * (index % 2)] = 0
            batch |= {"attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)}
        batches.append(batch)
    return batches


def wide_batch() -> dict[str, Tensor]:
    """Six rows in one micro-batch."""
    parts = micro_batches(3, padding=True, lengths=(12, 12, 12))
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
