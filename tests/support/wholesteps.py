"""Steps of a published class that sees or hears: the whole model with PEFT, and every number of a
step, for the tests that compare a streamed one with it.
"""

from pathlib import Path
from typing import Any

import torch
from aligned import aligned
from everytype import difference
from parity import draw_b
from peft import get_peft_model
from publishedclass import published_class
from torch import Tensor
from transformers import AutoConfig

__all__ = ["farthest", "numbers_of_step", "whole_as"]


def whole_as(streamed: Any, directory: Path, seed: int) -> Any:
    """Return the whole model of a directory with an adapter as a streamed one has, ready to train;
    its factors are those that PEFT draws for the seed, and B is drawn as `parity` draws it."""
    kind = published_class(AutoConfig.from_pretrained(directory))
    base = aligned(kind.from_pretrained(directory, dtype=torch.float32))
    torch.manual_seed(seed)
    reference = get_peft_model(base, streamed.peft_config["default"])
    draw_b(reference)
    return reference.train()


def numbers_of_step(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the loss, the logits and every gradient that is there, by name."""
    model.zero_grad(set_to_none=True)
    output = model(**batch)
    output.loss.backward()
    numbers = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.grad is not None
    }
    return numbers | {"loss": output.loss.detach(), "logits": output.logits.detach()}


def farthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference of two steps; what one of them lacks differs from zero."""
    return max(difference(one.get(name), other.get(name)) for name in one.keys() | other.keys())
