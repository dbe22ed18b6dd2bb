"""Steps of the whole model with `transformers` and `peft` alone, over micro-batches that it is
given as they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from aligned import aligned
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

__all__ = ["Whole", "gradients_of", "whole_of"]


@dataclass(frozen=True)
class Whole:
    """The loss of a step, and the gradients of the adapter by name."""

    loss: float
    gradients: dict[str, Tensor]


def gradients_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return copies of the adapter's gradients, by name from the decoder layers on."""
    found = {
        name: one.grad
        for name, one in model.named_parameters()
        if ".lora_" in name and one.grad is not None
    }
    return {
        name.removeprefix("base_model.model."): gradient.clone() for name, gradient in found.items()
    }


def whole_of(
    model: Path, adapter: Path, parts: Sequence[Mapping[str, Tensor]], **options: Any
) -> Whole:
    """Accumulate the gradients of the whole model over micro-batches, divided by the trained
    tokens of all.
    """
    base = aligned(AutoModelForCausalLM.from_pretrained(model, **options))
    base.config.use_cache = False  # packed rows are seen only where there is no cache
    whole = PeftModel.from_pretrained(base, str(adapter), is_trainable=True).train()
    tokens = sum(int((part["labels"][:, 1:] != -100).sum()) for part in parts)
    total = torch.zeros(())
    for part in parts:
        loss = whole(**part, num_items_in_batch=tokens).loss
        loss.backward()
        total = total + loss.detach()
    return Whole(float(total), gradients_of(whole))
