"""A checkpoint with a config of its own, opened by LEMA and by `from_pretrained` with PEFT: how
far a step is apart.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from aligned import aligned
from everytype import SEED, Step, farthest, whole_loss, write_model
from parity import DRAWS, draw_b, trained
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, LlamaConfig, PreTrainedConfig

from lema import LemaConfig, LemaModel
from lema.model.skeleton import auto_class
from lema_cpu import CpuBackend

__all__ = [
    "ORIGINAL", "ROPES", "edit_config", "farthest_from_whole", "llama", "opened", "roped", "rows", "step", "store",
    "tensors", "whole", "whole_step", "write_model",
]  # fmt: skip

VOCABULARY = 96
ORIGINAL = 16  # tokens, up to which a model was trained before its rotary embedding was scaled
SCALED = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 10000.0},
    "linear": {"rope_theta": 10000.0, "factor": 4.0},
    "dynamic": SCALED,
    "yarn": SCALED,
    "longrope": SCALED
    | {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.3, 2.6, 2.9]},
    "llama3": SCALED | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "proportional": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}


def llama(**changes: Any) -> LlamaConfig:
    """Return a tiny config whose head is not tied."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
    }
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
    }
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
    return LlamaConfig(**{**sizes, **heads, **tokens, **changes})


def roped(kind: str, **changes: Any) -> PreTrainedConfig:
    """Return a config with this kind of rotary embedding. `dynamic` goes by
    `max_position_embeddings`.
    """
    longest = ORIGINAL if kind == "dynamic" else 4 * ORIGINAL
    return llama(
        max_position_embeddings=longest,
        rope_parameters={"rope_type": kind, **ROPES[kind]},
        **changes,
    )


def edit_config(directory: Path, *dropped: str, **changes: Any) -> None:
    """Change keys of a `config.json`, and take some away."""
    file = directory / "config.json"
    config = {
        name: value for name, value in json.loads(file.read_text()).items() if name not in dropped
    }
    file.write_text(json.dumps(config | changes))


def tensors(directory: Path) -> dict[str, Tensor]:
    """Return what the files of a checkpoint hold."""
    return {
        name: one
        for file in sorted(directory.glob("*.safetensors"))
        for name, one in load_file(file).items()
    }


def store(directory: Path, stored: Mapping[str, Tensor]) -> None:
    """Have a checkpoint hold these tensors, in one file."""
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    contiguous = {name: one.contiguous() for name, one in stored.items()}
    save_file(contiguous, directory / "model.safetensors", metadata={"format": "pt"})


def rows(*lengths: int, count: int = 1) -> list[dict[str, Tensor]]:
    """Return a micro-batch of `count` rows for each length, every token trained."""
    generator = torch.Generator().manual_seed(2)
    drawn = [
        torch.randint(3, VOCABULARY, (count, length), generator=generator) for length in lengths
    ]
    return [{"input_ids": ids, "labels": ids.clone()} for ids in drawn]


@contextmanager
def opened(directory: Path, *, trust: bool = False, **settings: Any) -> Iterator[LemaModel]:
    """Open a model for streaming on the CPU, with an adapter on every linear, in training mode."""
    drawn = {
        "lora_rank": 2,
        "lora_alpha": 4,
        "seed": SEED,
        "lora_target_parameters": [],
        "save_steps": 0,
    }
    config = LemaConfig(
        str(directory), **({"device": "cpu", "device_memory": None} | drawn | settings)
    )
    model = LemaModel(config, backend=CpuBackend(poison=True), trust_remote_code=trust)
    try:
        model.initialize_lora()
        model.lora_manager.train()
        draw_b(model.lora_manager)
        yield model
    finally:
        model.close()


def whole(
    directory: Path, streamed: LemaModel, *, trust: bool = False, **options: Any
) -> PeftModel:
    """Load the model by `from_pretrained` alone, with PEFT's adapter like that of the streamed
    one.
    """
    config = AutoConfig.from_pretrained(directory, trust_remote_code=trust)
    base = aligned(
        auto_class(config).from_pretrained(directory, trust_remote_code=trust, **options)
    )
    base.config.use_cache = False
    torch.manual_seed(SEED)
    model = get_peft_model(base, streamed.lora_manager.peft_config["default"]).train()
    draw_b(model)
    return model


def step(streamed: LemaModel, batches: Sequence[Mapping[str, Tensor]]) -> Step:
    """Take a streamed step over micro-batches."""
    torch.manual_seed(DRAWS)
    logits: list[Tensor] = []
    loss = streamed.adapter.loss(batches, logits=logits)
    loss.backward()
    return loss.detach(), logits, _gradients(streamed.lora_manager)


def whole_step(
    model: PeftModel, batches: Sequence[Mapping[str, Tensor]], *, shifted: bool = True
) -> Step:
    """Take the same step on the whole model, micro-batch by micro-batch."""
    torch.manual_seed(DRAWS)
    loss, logits = whole_loss(model, list(batches), shifted=shifted)
    return loss.detach(), logits, _gradients(model)


def farthest_from_whole(
    directory: Path, *steps: Sequence[Mapping[str, Tensor]], trust: bool = False, **settings: Any
) -> float:
    """Take steps with one model, streamed and whole; return the largest difference of losses,
    logits and gradients.
    """
    with opened(directory, trust=trust, **settings) as streamed:
        mine = [step(streamed, batches) for batches in steps]
        expected = whole(directory, streamed, trust=trust)
        shifted = streamed.adapter.shifts_labels
    theirs = [whole_step(expected, batches, shifted=shifted) for batches in steps]
    return max(farthest(one, other) for one, other in zip(mine, theirs, strict=True))


def _gradients(model: PeftModel) -> dict[str, Tensor | None]:
    gradients = {name: parameter.grad for name, parameter in trained(model).items()}
    model.zero_grad(set_to_none=True)
    return gradients
