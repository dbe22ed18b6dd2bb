"""What every arm of the benchmark of activation offloading runs: one PEFT model, and its step
inside a context.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from common import Shape
from plainloop import ALPHA, RANK, SEED, adamw

__all__ = ["MODES", "Arm", "Task", "arms_of", "make_model", "set_checkpointing", "step_of"]

MODES: dict[str, Any] = {
    "none": False,
    "hidden_states": "hidden_states",
    "true": True,
    "disk": "disk",
}


@dataclass(frozen=True)
class Task:
    """The model, and the tokens of a step.

    Attributes:
        shape: of the model, as `Shape` takes it.
        device: that computes.
        rows: of a micro-batch, which is all of a step.
        tokens: of a row.
        directory: for what waits on disk.
    """

    shape: dict[str, Any]
    device: str
    rows: int
    tokens: int
    directory: str

    @classmethod
    def of(cls, shape: Shape, **rest: Any) -> Task:
        return cls(asdict(shape), **rest)


@dataclass(frozen=True)
class Arm:
    """One way to train: what is offloaded, and whether layers are checkpointed."""

    mode: str
    checkpointing: bool

    @property
    def name(self) -> str:
        return f"{self.mode}{', checkpointed' if self.checkpointing else ''}"


def arms_of(modes: list[str]) -> list[Arm]:
    """Return every arm, those that are compared with each other together."""
    return [Arm(mode, checkpointing) for checkpointing in (False, True) for mode in modes]


def make_model(task: Task) -> tuple[Any, torch.Tensor]:
    """Return a random model with LoRA on every linear, in training mode, and the tokens of its
    step.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, LlamaConfig

    shape = Shape(**task.shape)
    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads or shape.heads,
        vocab_size=shape.vocabulary,
        max_position_embeddings=task.tokens,
        use_cache=False,
    )
    torch.manual_seed(SEED)
    base = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, shape.dtype)).to(
        task.device
    )
    lora = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    ids = torch.randint(0, shape.vocabulary, (task.rows, task.tokens), device=task.device)
    return get_peft_model(base, lora).train(), ids


def set_checkpointing(model: Any, on: bool) -> None:
    """Checkpoint every layer of the model, the kind that is not reentrant, or none."""
    base = model.get_base_model()
    # its name in later versions of transformers
    new = hasattr(base, "activation_checkpointing_enable")
    prefix = "activation" if new else "gradient"
    if on:
        getattr(base, f"{prefix}_checkpointing_enable")({"use_reentrant": False})
    else:
        getattr(base, f"{prefix}_checkpointing_disable")()


def context_of(model: Any, mode: str, directory: str) -> Any:
    """Return what a step of this mode is run in; None: nothing."""
    from lema.activations import get_lora_act_offloading_ctx_manager

    if not MODES[mode]:
        return None
    return get_lora_act_offloading_ctx_manager(model, mode=MODES[mode], offload_dir=directory)


def step_of(model: Any, ids: torch.Tensor, context: Any) -> Callable[[], float]:
    """Return what takes one optimizer step, its forward, loss and backward inside `context`, and
    gives the loss.
    """
    optimizer = adamw(model)
    dtype = next(model.parameters()).dtype

    def step() -> float:
        with (
            nullcontext() if context is None else context,
            torch.autocast(ids.device.type, dtype=dtype, enabled=dtype != torch.float32),
        ):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step
