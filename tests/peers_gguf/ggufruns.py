"""Tiny models that llama.cpp's converter takes, adapters of them, and what llama.cpp makes of both.

The tokenizer is a SentencePiece model that is trained here: of other kinds the converter takes only those
that are in its list.
"""

import io
import json
from collections.abc import Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import torch
from llama_cpp import Llama
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from lema import LemaConfig, LemaModel
from lema.data.templates.named import named_template

VOCABULARY = 320
IDS = [1, 5, 40, 80, 160, 299, 31, 7, 7, 210, 33, 64]
SPECIALS = ("<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>")
TOKENS = ("<unk>", "<s>", "</s>", *SPECIALS)
TOKENIZERS = dict.fromkeys(("gemma2", "gemma3_text"), "GemmaTokenizer")
LINES = [
    f"the miller of mill {number} grinds corn by the river and says {words}"
    for number in range(200)
    for words in ("hello", "good day", "user and model", "assistant and system")
]
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEADS = {"head_dim": 32}
EXPERTS = {"num_experts_per_tok": 2}
CONFIGS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {"tie_word_embeddings": False}),
    "llama_tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {**HEADS, "tie_word_embeddings": True}),
    "mistral": (MistralConfig, {**HEADS, "sliding_window": None}),
    "gemma2": (Gemma2Config, {**HEADS, "query_pre_attn_scalar": 32, "sliding_window": 8}),
    "gemma3_text": (Gemma3TextConfig, {**HEADS, "query_pre_attn_scalar": 32, "sliding_window": 8}),
    "mixtral": (MixtralConfig, {**EXPERTS, "num_local_experts": 4, "sliding_window": None}),
}
TEMPLATES = {"gemma2": "gemma", "gemma3_text": "gemma3", "llama": "llama2", "mistral": "mistral_v1"}


@cache
def _sentencepiece() -> bytes:
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=trained,
        vocab_size=VOCABULARY,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=1.0,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        user_defined_symbols=list(SPECIALS),
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return trained.getvalue()


def write_base(kind: str, directory: Path, **changes: Any) -> Path:
    """Write a tiny model with its tokenizer, in fp32, and return its directory."""
    made, settings = CONFIGS[kind]
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(made(**COMMON | settings | changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.05 if kind in TOKENIZERS else 0.08)
            elif "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, do_sample=False)
    model.save_pretrained(directory)
    (directory / "tokenizer.model").write_bytes(_sentencepiece())
    about = {
        "tokenizer_class": TOKENIZERS.get(kind, "LlamaTokenizer"),
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "add_bos_token": True,
        "add_eos_token": False,
        "legacy": True,  # a blank also behind special tokens, as llama.cpp has it
        "added_tokens_decoder": {str(number): _added(text) for number, text in enumerate(TOKENS)},
        "chat_template": named_text(TEMPLATES.get(kind, "chatml")),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(about))
    return directory


def _added(text: str) -> dict[str, Any]:
    forms = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": text, "special": True, **forms}


def named_text(name: str) -> str:
    """Return the text of a template that LEMA has by name."""
    template = named_template(name)
    assert template is not None
    return template


def write_adapter(base: Path, directory: Path, **settings: Any) -> Path:
    """Write an adapter of a base whose factors are not small, and return its directory."""
    common: dict[str, Any] = {"device": "cpu", "lora_rank": 4, "lora_alpha": 8}
    with closing(LemaModel(LemaConfig(str(base), **common | settings))) as model:
        model.initialize_lora()
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in model.get_trainable_parameters():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
        model.save_pretrained(directory)
    return directory


def log_probabilities(logits: Tensor) -> Tensor:
    """Return those of every next token, [tokens, vocabulary]."""
    return torch.log_softmax(logits.double(), -1)


def of_transformers(model: torch.nn.Module, ids: Sequence[int] = IDS) -> Tensor:
    """Return the log-probabilities of a model of transformers, in fp32."""
    with torch.no_grad():
        return log_probabilities(model.eval()(torch.tensor([ids])).logits[0])


def loaded(directory: Path) -> torch.nn.Module:
    """Return the whole model of a directory, in fp32."""
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model


def opened(file: Path, lora: Path | None = None) -> Llama:
    """Return a GGUF file as llama.cpp opens it."""
    return Llama(
        str(file),
        lora_path=None if lora is None else str(lora),
        logits_all=True,
        n_ctx=128,
        n_threads=1,
        n_threads_batch=1,
        n_gpu_layers=0,
        flash_attn=False,
        type_k=0,  # fp32; the cache is of fp16 by default, which costs 1e-3
        type_v=0,
        verbose=False,
    )


def of_llamacpp(file: Path, lora: Path | None = None, ids: Sequence[int] = IDS) -> Tensor:
    """Return the log-probabilities of llama.cpp."""
    with closing(opened(file, lora)) as model:
        model.eval(list(ids))
        return log_probabilities(torch.from_numpy(np.array(model.scores[: len(ids)])))


def tokenizer_of(directory: Path) -> Any:
    """Return the tokenizer of a directory."""
    return AutoTokenizer.from_pretrained(directory)
