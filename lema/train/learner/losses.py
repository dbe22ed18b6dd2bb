"""The losses that a caller of a learner names: sums over tokens of log-probabilities.

Each is a function of the log-probabilities of a row's targets, and of what the caller sends with
the row. A loss of the caller's own is `cross_entropy` with its gradients as weights, because that
loss is linear in the log-probabilities.

Sources: PPO https://arxiv.org/abs/1707.06347, CISPO https://arxiv.org/abs/2506.13585, DRO
https://arxiv.org/abs/2405.19107; as https://tinker-docs.thinkingmachines.ai/losses writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from lema.errors import DataError

__all__ = ["LOSSES", "Loss", "LossOptions", "loss_named"]

LossOptions: TypeAlias = Mapping[str, float]
Formula: TypeAlias = Callable[[Tensor, Mapping[str, Tensor], LossOptions], Tensor]
"""Makes of log-probabilities, of tensors of the same shape, and of options, the loss of each
token.
"""


@dataclass(frozen=True)
class Loss:
    """One loss.

    Args:
        name: as callers write it.
        formula: the loss of each token.
        needed: the tensors that a row must bring besides its targets.
        taken: further tensors that it may bring.
        options: the options, and what each is unless a caller sets it.
    """

    name: str
    formula: Formula
    needed: tuple[str, ...]
    taken: tuple[str, ...]
    options: LossOptions

    def settled(self, options: LossOptions) -> dict[str, float]:
        """Return all options, with what a caller has set. `DataError`: there is no such option."""
        unknown = sorted(options.keys() - self.options.keys())
        if unknown:
            options_text = ", ".join(self.options) or "it has none"
            raise DataError(
                f"the loss {self.name} has no option {', '.join(unknown)}",
                where="loss_fn_config",
                how=f"options are: {options_text}",
            )
        return {**self.options, **options}

    def of_tokens(
        self, logprobs: Tensor, tensors: Mapping[str, Tensor], options: LossOptions
    ) -> Tensor:
        """Return the loss of each token, of the shape of the log-probabilities."""
        return self.formula(logprobs, tensors, options)


def _cross_entropy(logprobs: Tensor, tensors: Mapping[str, Tensor], _: LossOptions) -> Tensor:
    weights = tensors.get("weights")
    return -logprobs if weights is None else -logprobs * weights


def _ratio(logprobs: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.exp(logprobs - tensors["logprobs"])


def _importance_sampling(logprobs: Tensor, tensors: Mapping[str, Tensor], _: LossOptions) -> Tensor:
    return -(_ratio(logprobs, tensors) * tensors["advantages"])


def _clipped(ratio: Tensor, tensors: Mapping[str, Tensor], options: LossOptions) -> Tensor:
    low = tensors.get("clip_low_threshold", torch.full_like(ratio, options["clip_low_threshold"]))
    high = tensors.get(
        "clip_high_threshold", torch.full_like(ratio, options["clip_high_threshold"])
    )
    return torch.clamp(ratio, low, high)


def _ppo(logprobs: Tensor, tensors: Mapping[str, Tensor], options: LossOptions) -> Tensor:
    ratio = _ratio(logprobs, tensors)
    advantages = tensors["advantages"]
    return -torch.minimum(ratio * advantages, _clipped(ratio, tensors, options) * advantages)


def _cispo(logprobs: Tensor, tensors: Mapping[str, Tensor], options: LossOptions) -> Tensor:
    coefficient = _clipped(_ratio(logprobs, tensors), tensors, options).detach()
    return -(coefficient * logprobs * tensors["advantages"])


def _dro(logprobs: Tensor, tensors: Mapping[str, Tensor], options: LossOptions) -> Tensor:
    quadratic = (logprobs - tensors["logprobs"]) ** 2
    return -(logprobs * tensors["advantages"] - 0.5 * options["beta"] * quadratic)


SAMPLED = ("logprobs", "advantages")
THRESHOLDS = ("clip_low_threshold", "clip_high_threshold")
CLIPPED = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES: Mapping[str, Loss] = {
    loss.name: loss
    for loss in (
        Loss("cross_entropy", _cross_entropy, (), ("weights",), {}),
        Loss("importance_sampling", _importance_sampling, SAMPLED, (), {}),
        Loss("ppo", _ppo, SAMPLED, THRESHOLDS, CLIPPED),
        Loss("cispo", _cispo, SAMPLED, THRESHOLDS, CLIPPED),
        Loss("dro", _dro, SAMPLED, (), {"beta": 0.05}),
    )
}
"""The losses by name."""


def loss_named(name: str) -> Loss:
    """Return a loss by its name. `DataError`: there is none."""
    if name not in LOSSES:
        raise DataError(
            f"there is no loss {name!r:.80}",
            where="loss_fn",
            how=f"take one of {', '.join(LOSSES)}, or cross_entropy with your gradients as weights",
        )
    return LOSSES[name]
