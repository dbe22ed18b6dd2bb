"""Quantised models of every kind, and the whole model that has the weights the library itself
makes of them.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tiny import Architecture, Checkpoint
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from lema.convert.prepare import Prepared, prepare

KINDS = ("int8", "fp8", "nf4")
ARCHITECTURE = Architecture(LlamaConfig)
NUM_LAYERS = 8
LINEARS = 7  # per layer
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def published(directory: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Write a random model whose rows are as long as blocks of four bits are, with biases that
    differ by layer.
    """
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(**SIZES | {"attention_bias": True} | changes)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.to(dtype).save_pretrained(directory, max_shard_size="300KB")
    return directory


def prepared(source: Path, kind: str, **options: Any) -> Prepared:
    """Quantise a published model beside itself."""
    return prepare(source, source.with_name(kind), quantize=kind, **options)


def dequantized(directory: Path, **options: Any) -> PreTrainedModel:
    """Load a quantised directory with `transformers`, and put what the library dequantises where
    it was quantised.
    """
    model = AutoModelForCausalLM.from_pretrained(directory, **options)
    for name, weight in list(expanded_by_the_library(model)):
        owner = model.get_submodule(name)
        plain = nn.Linear(
            owner.in_features, owner.out_features, bias=owner.bias is not None, dtype=weight.dtype
        )
        plain.weight = nn.Parameter(weight.clone())
        plain.bias = owner.bias
        model.set_submodule(name, plain)
    del model.config.quantization_config
    return model


def expanded_by_the_library(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of every quantised module, and what its library says its weight is."""
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if hasattr(weight, "quant_state"):
            from bitsandbytes.functional import dequantize_4bit

            yield name, dequantize_4bit(weight.data, weight.quant_state)
        elif type(weight).__name__ in ("Int8Tensor", "Float8Tensor"):
            yield name, weight.dequantize()


def checkpoint(source: Path, kind: str) -> Checkpoint:
    """Return a model to compare: `published` is whole, with the library's weights; `streamed` is
    quantised.
    """
    streamed = prepared(source, kind).path
    whole = source.with_name(f"{kind}-whole")
    model = dequantized(streamed)
    plain = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(source), dtype=model.dtype)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(whole)
    return Checkpoint(ARCHITECTURE, whole, streamed)


def but_for_origin(file: Path) -> tuple[Any, bytes]:
    """The header of a file that `prepare` wrote, without what it was made of, and all bytes of
    its tensors.
    """
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for mark in ("lema.origin", "lema.sources"):
        header["__metadata__"].pop(mark, None)
    return header, content[8 + length :]


def tensors_of(file: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """The type, shape and bytes of every tensor of a file, in whatever order they are stored."""
    header, content = but_for_origin(file)
    return {
        name: (one["dtype"], one["shape"], content[slice(*one["data_offsets"])])
        for name, one in header.items()
        if name != "__metadata__"
    }
