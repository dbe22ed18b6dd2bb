"""Models without weights: a config, and a file with a true header and nothing behind it, as
large as the real one.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedConfig

from lema.model import meta_model

STORED = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
}
SIZES = {  # hidden, intermediate, layers, heads, key and value heads
    "8B": (4096, 14336, 32, 32, 8),
    "70B": (8192, 28672, 80, 64, 8),
    "405B": (16384, 53248, 126, 128, 8),
}


def write_hollow(
    directory: Path, config: PreTrainedConfig, dtype: torch.dtype = torch.bfloat16
) -> Path:
    """Write `config.json`, and `model.safetensors` of which only the header is on the disk."""
    directory.mkdir(parents=True, exist_ok=True)
    config.dtype = dtype
    config.save_pretrained(directory)
    model = meta_model(config, dtype)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    seen = set[int]()
    stored = model.state_dict().keys()
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in stored]
    for name, tensor in [*model.named_parameters(), *buffers]:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            span = [end, end + tensor.nbytes]
            header[name] = {
                "dtype": STORED[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": span,
            }
            end = span[1]
    raw = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as out:
        out.write(len(raw).to_bytes(8, "little") + raw)
        out.truncate(8 + len(raw) + end)
    return directory


def large_config(size: str) -> PreTrainedConfig:
    """Return the config of a large model of a common form."""
    hidden, intermediate, layers, heads, kv_heads = SIZES[size]
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=128256,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
