"""PEFT and torch's plain loop: what every arm is compared with. Nothing of ours is imported.

Gradient checkpointing is on, non-reentrant; the weights stay as `from_pretrained` leaves them: maps
of the files.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["ALPHA", "RANK", "RATE", "SEED", "adamw", "peft_model", "plain_step"]

SEED = 42
RANK = 16
ALPHA = 32
RATE = 1e-4


def peft_model(
    directory: Path | str,
    *,
    device: str | None = None,
    rank: int = RANK,
    initial: bool = True,
    **options: Any,
) -> Any:
    """Return the model of a directory with LoRA on every linear of its layers, in training mode.

    Args:
        directory: of the model.
        device: where its weights go, tensor by tensor; None: they stay where `from_pretrained`
            leaves them.
        rank: of the adapters.
        initial: PEFT's `init_lora_weights`; False: both matrices are drawn.
        options: further ones of `from_pretrained`.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    placed = {} if device is None else {"device_map": device}
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", **placed, **options)
    torch.manual_seed(SEED)
    lora = LoraConfig(
        r=rank,
        lora_alpha=ALPHA,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
        init_lora_weights=initial,
    )
    adapted: Any = get_peft_model(model, lora)
    adapted.gradient_checkpointing_enable({"use_reentrant": False})
    adapted.enable_input_require_grads()
    return adapted.train()


def adamw(model: Any, **options: Any) -> torch.optim.Optimizer:
    """Return the optimizer of all that trains, with further options of torch's."""
    trained = [one for one in model.parameters() if one.requires_grad]
    return torch.optim.AdamW(trained, **{"lr": RATE, "weight_decay": 0.0, **options})


def plain_step(
    model: Any,
    ids: Tensor,
    dtype: torch.dtype,
    optimizer: Any,
    before: Callable[[bool], None] = lambda _: None,
) -> Callable[[], float]:
    """Return what takes one optimizer step and gives its loss.

    Args:
        model: what is called.
        ids: of tokens, all of them trained, `[micro-batches, tokens]`, on the device that computes.
        dtype: of the weights; halves compute under autocast.
        optimizer: steps once.
        before: is told of each micro-batch whether it is the last.
    """
    total = ids[:, 1:].numel()

    def step() -> float:
        losses = []
        for index, row in enumerate(ids.split(1)):
            before(index == len(ids) - 1)
            with torch.autocast(ids.device.type, dtype=dtype, enabled=dtype != torch.float32):
                loss = model(
                    input_ids=row, labels=row, use_cache=False, num_items_in_batch=total
                ).loss
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        # read when all is queued: a device is not waited for in between
        return sum(float(one) for one in losses)

    return step
