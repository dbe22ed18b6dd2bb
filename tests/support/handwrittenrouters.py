"""Routers of whole models that choose the experts which they are told to, written by hand."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn


def softmax_of_all(router: Any, logits: Tensor, told: Tensor) -> Tensor:
    """Mixtral's and Qwen's factors: of the probabilities of all, those chosen, made to add to 1."""
    chosen = torch.softmax(logits.float(), dim=-1).gather(-1, told)
    return chosen / chosen.sum(dim=-1, keepdim=True)


def softmax_of_chosen(router: Any, logits: Tensor, told: Tensor) -> Tensor:
    return torch.softmax(logits.gather(-1, told), dim=1)


def sigmoids(router: Any, logits: Tensor, told: Tensor) -> Tensor:
    chosen = logits.sigmoid().gather(1, told)
    return chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20) * router.routed_scaling_factor


FACTORS = {
    "mixtral": softmax_of_all,
    "qwen3_moe": softmax_of_all,
    "deepseek_v3": sigmoids,
    "gpt_oss": softmax_of_chosen,
}


def choose(model: nn.Module, factors: Callable[..., Tensor], choices: Tensor) -> None:
    """Have the routers of a whole model choose what they are told to for the next forward.

    `factors` makes the factors of the chosen experts of a router and its logits; `choices` are
    `[rows, sequence, layers, experts of each token]`.
    """
    for layer in range(choices.shape[2]):
        told = choices[:, :, layer].flatten(0, 1)
        for name, module in model.named_modules():
            if f".layers.{layer}." not in name or not type(module).__name__.endswith("Router"):
                continue

            def forward(router: Any, hidden: Tensor, told: Tensor = told) -> tuple[Tensor, ...]:
                flat = hidden.reshape(-1, hidden.shape[-1])
                bias = getattr(router, "bias", None)
                logits = nn.functional.linear(flat, router.weight, bias)
                return logits, factors(router, logits, told), told

            module.forward = MethodType(forward, module)
