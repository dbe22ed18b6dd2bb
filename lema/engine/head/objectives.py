"""Objectives that are functions of rows: preference losses and GRPO's, each from the
log-probabilities of tokens.

An objective says which log-probabilities it needs, and makes of those of one batch the loss and
what is measured. It is differentiated by them, and knows nothing of the model. Names and formulas
are those of TRL 1.16, whose trainers average over the examples of a batch, and over the batches of
a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from lema.errors import ConfigError

if TYPE_CHECKING:
    from lema.config import LemaConfig

__all__ = [
    "LossSettings",
    "Measured",
    "Objective",
    "Scored",
    "grpo",
    "loss_settings_of",
    "merged",
    "objective_of",
    "without_dropout",
]

Measured: TypeAlias = dict[str, tuple[Tensor, float]]
"""What is measured, by TRL's name: a sum, and the number of things that it is the sum of."""


@dataclass(frozen=True)
class Scored:
    """The rows of one batch that this process has, and what the model says of their tokens."""

    logps: Tensor  # `[rows, tokens]` fp32, the log-probability of each requested token, 0 elsewhere
    trained: Tensor  # `[rows, tokens]` bool, which of them are of the completion
    chosen: Tensor  # places of the rows that are chosen, or desirable: of pairs, in their order
    rejected: Tensor  # of the others, in the same way
    num_examples: int  # of the whole batch, in all processes: pairs, or rows
    num_tokens: int = 0  # requested tokens of the batch's chosen rows, in all processes
    reference: Tensor | None = None  # like `logps`, of the reference; None: it was not requested
    # `[rows]`, of each prompt with another row's completion: the model's, and the reference's.
    mismatched: tuple[Tensor, Tensor] | None = None
    advantages: Tensor | None = None  # `[rows]` or `[rows, tokens]`, of GRPO
    # `[rows, tokens]`, those of the model that made the completions; None: of this one
    old_logps: Tensor | None = None
    # `[rows, tokens]`, over the vocabulary; None: they are not known
    mean_logits: Tensor | None = None

    def completions(self, logps: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums over completions: those of the chosen rows, and those of the rejected."""
        sums = (logps * self.trained).sum(dim=1)
        return sums[self.chosen], sums[self.rejected]

    def lengths(self) -> tuple[Tensor, Tensor]:
        """Return the numbers of tokens of the completions: for chosen rows, and for rejected
        ones.
        """
        counts = self.trained.sum(dim=1).clamp(min=1)
        return counts[self.chosen], counts[self.rejected]

    def ratios(self) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of completions less those of the reference: chosen, and
        rejected.
        """
        assert self.reference is not None, "the reference was not asked for"
        chosen, rejected = self.completions(self.logps)
        of_chosen, of_rejected = self.completions(self.reference)
        return chosen - of_chosen, rejected - of_rejected


DISCOPOP_TAU = 0.05  # TRL's default, and the paper's
Score: TypeAlias = Callable[[Scored], tuple[Tensor, Measured]]


@dataclass(frozen=True)
class Objective:
    """A loss of rows."""

    # makes this process's share of a batch's mean loss, and what is measured, of the rows it has
    score: Score
    reference: bool = False  # whether it compares with a reference
    # whether it needs prompts with other rows' completions, as KTO's KL term does
    mismatched: bool = False
    of_batch: bool = False  # whether it compares rows of a whole batch with each other
    prompts: bool = False  # whether the prompts of chosen rows are trained on too
    # whether rows have advantages; otherwise they are examples of a preference
    advantages: bool = False


def objective_of(config: LemaConfig) -> Objective | None:
    """Return the objective that the settings ask for; None: the cross-entropy of tokens."""
    make = FROM_SETTINGS.get(config.objective)
    return None if make is None else make(config)


@dataclass(frozen=True)
class LossSettings:
    """What a step is trained by."""

    # what the loss of rows is; None: the cross-entropy of tokens
    objective: Objective | None = None
    dft: bool = False  # weigh the cross-entropy of each token with its probability
    smoothing: float = 0.0  # of labels; see `LossChunks`


def loss_settings_of(config: LemaConfig, num_replicas: int) -> LossSettings:
    """Return what the settings train by. `ConfigError`: the objective needs more of a batch than
    one of several processes has.
    """
    objective = objective_of(config)
    if objective is not None and objective.of_batch and num_replicas > 1:
        what = "kto's KL term and aot need a whole batch, but each process has only a share of it"
        how = "start one process, or set loss_type: apo_zero_unpaired for kto, or another for dpo"
        raise ConfigError(what, where="objective", how=how)
    return LossSettings(objective, config.loss_type == "dft", config.label_smoothing_factor)


def without_dropout(model: nn.Module) -> None:
    """Take the dropout out of a model, as TRL's trainers do for objectives of examples."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def merged(measured: Mapping[str, tuple[Tensor, float]], into: Measured) -> None:
    """Add the measurements of one batch to those of others."""
    for name, (total, count) in measured.items():
        before = into.get(name)
        into[name] = (total, count) if before is None else (before[0] + total, before[1] + count)


def dpo(rows: Scored, *, loss_type: str, beta: float, smoothing: float) -> tuple[Tensor, Measured]:
    """DPO (arXiv:2305.18290) and the other losses of TRL's `DPOTrainer`, by its `loss_type`."""
    losses = dpo_losses(rows, loss_type, beta, smoothing)
    chosen, rejected = (beta * ratio.detach() for ratio in rows.ratios())
    measured = _of_pairs(chosen, rejected, rows.completions(rows.logps)) | _of_logits(rows)
    return losses.sum() / rows.num_examples, measured


def dpo_losses(rows: Scored, loss_type: str, beta: float, smoothing: float) -> Tensor:
    """Return the loss of each pair."""
    chosen, rejected = rows.ratios()
    delta = chosen - rejected
    match loss_type:
        case "sigmoid":
            return -logsigmoid(beta * delta)
        case "hinge":
            return torch.relu(1 - beta * delta)
        case "ipo" | "sigmoid_norm":
            of_chosen, of_rejected = rows.lengths()
            delta = chosen / of_chosen - rejected / of_rejected
            return (
                (delta - 1 / (2 * beta)) ** 2 if loss_type == "ipo" else -logsigmoid(beta * delta)
            )
        case "exo_pair":
            epsilon = torch.tensor(smoothing, device=delta.device)
            right = torch.sigmoid(beta * delta)
            wrong = torch.sigmoid(-beta * delta)
            first = right * (logsigmoid(beta * delta) - torch.log1p(-epsilon))
            return first + wrong * (logsigmoid(-beta * delta) - torch.log(epsilon))
        case "nca_pair":
            return (
                -logsigmoid(beta * chosen)
                - 0.5 * logsigmoid(-(beta * chosen))
                - 0.5 * logsigmoid(-(beta * rejected))
            )
        case "robust":
            clean = -(1 - smoothing) * logsigmoid(beta * delta)
            flipped = -smoothing * logsigmoid(-beta * delta)
            return (clean - flipped) / (1 - 2 * smoothing)
        case "bco_pair":
            return -logsigmoid(beta * chosen) - logsigmoid(-(beta * rejected))
        case "aot" | "aot_unpaired":
            preferred = chosen
            baseline = rejected
            if loss_type == "aot":
                assert rows.reference is not None, "the reference was not asked for"
                preferred, baseline = (
                    torch.sub(*rows.completions(logps)) for logps in (rows.logps, rows.reference)
                )
            delta = preferred.sort().values - baseline.sort().values
            return (
                -logsigmoid(beta * delta) * (1 - smoothing) - logsigmoid(-beta * delta) * smoothing
            )
        case "discopop":
            share = torch.sigmoid(beta * delta / DISCOPOP_TAU)
            return -logsigmoid(beta * delta) * (1 - share) + torch.exp(-beta * delta) * share
        case "sft":
            return -(rows.logps * rows.trained)[rows.chosen].sum(dim=1) * (
                rows.num_examples / rows.num_tokens
            )
        case "sppo_hard":
            return (chosen - 0.5 / beta) ** 2 + (rejected + 0.5 / beta) ** 2
        case "apo_zero":
            return (1 - torch.sigmoid(beta * chosen)) + torch.sigmoid(beta * rejected)
        case "apo_down":
            return torch.sigmoid(beta * chosen) + (1 - torch.sigmoid(beta * delta))
    raise AssertionError(f"{loss_type!r} is not a loss of pairs")


def kto(
    rows: Scored, *, loss_type: str, beta: float, desirable: float, undesirable: float
) -> tuple[Tensor, Measured]:
    """KTO (arXiv:2402.01306), whose KL term is estimated from prompts with other rows'
    completions; or `apo_zero`.
    """
    chosen, rejected = rows.ratios()
    kl = torch.zeros((), device=chosen.device)
    if rows.mismatched is not None:
        policy, reference = rows.mismatched
        kl = (policy - reference).mean().detach().clamp(min=0)
    if loss_type == "kto":
        of_chosen = 1 - torch.sigmoid(beta * (chosen - kl))
        of_rejected = 1 - torch.sigmoid(beta * (kl - rejected))
    else:
        of_chosen = 1 - torch.sigmoid(beta * chosen)
        of_rejected = torch.sigmoid(beta * rejected)
    loss = torch.cat([desirable * of_chosen, undesirable * of_rejected]).sum() / rows.num_examples
    logps = rows.completions(rows.logps.detach())
    measured: Measured = {"kl": (kl, 1.0)} | _of_logits(rows)
    for name, rewards, sums in (("chosen", chosen, logps[0]), ("rejected", rejected, logps[1])):
        if count := len(rewards):
            measured[f"rewards/{name}"] = (beta * rewards.detach()).sum(), float(count)
            measured[f"logps/{name}"] = sums.sum(), float(count)
    if len(chosen) and len(rejected):
        margin = (beta * chosen.detach()).sum() / len(chosen) - (
            beta * rejected.detach()
        ).sum() / len(rejected)
        measured["rewards/margins"] = margin, 1.0
    return loss, measured


def orpo(rows: Scored, *, beta: float) -> tuple[Tensor, Measured]:
    """ORPO (arXiv:2403.07691): the odds of completions, plus the cross-entropy of chosen rows
    with their prompts.
    """
    chosen, rejected = (
        logp / length
        for logp, length in zip(rows.completions(rows.logps), rows.lengths(), strict=True)
    )
    odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
    ratio = logsigmoid(odds)
    nll = -rows.logps[rows.chosen].sum() / rows.num_tokens
    measured = _of_pairs(beta * chosen.detach(), beta * rejected.detach(), (chosen, rejected))
    count = float(len(chosen))
    measured["nll_loss"] = nll.detach() * rows.num_examples, count
    measured["log_odds_ratio"] = ratio.detach().sum(), count
    measured["log_odds_chosen"] = odds.detach().sum(), count
    return nll - (beta * ratio).sum() / rows.num_examples, measured


def simpo(
    rows: Scored, *, beta: float, gamma: float, cpo_alpha: float, smoothing: float
) -> tuple[Tensor, Measured]:
    """SimPO (arXiv:2405.14734), plus `cpo_alpha` times the cross-entropy of chosen completions."""
    chosen, rejected = (
        logp / length
        for logp, length in zip(rows.completions(rows.logps), rows.lengths(), strict=True)
    )
    delta = (chosen - rejected) - gamma / beta
    losses = -logsigmoid(beta * delta) * (1 - smoothing) - logsigmoid(-beta * delta) * smoothing
    loss = losses.sum() / rows.num_examples
    measured = _of_pairs(beta * chosen.detach(), beta * rejected.detach(), (chosen, rejected))
    if cpo_alpha:
        nll = -rows.logps[rows.chosen].sum() / rows.num_tokens
        measured["nll_loss"] = nll.detach() * rows.num_examples, float(len(chosen))
        loss = loss + cpo_alpha * nll
    return loss, measured


def _beta(config: LemaConfig) -> float:
    return 0.1 if config.beta is None else config.beta


def _dpo_of(config: LemaConfig) -> Objective:
    kind = "ipo" if config.objective == "ipo" else config.loss_type or "sigmoid"
    score = partial(
        dpo, loss_type=kind, beta=_beta(config), smoothing=config.label_smoothing or 0.0
    )
    return Objective(score, reference=True, of_batch=kind.startswith("aot"))


def _kto_of(config: LemaConfig) -> Objective:
    kind = config.loss_type or "kto"
    desirable = 1.0 if config.desirable_weight is None else config.desirable_weight
    undesirable = 1.0 if config.undesirable_weight is None else config.undesirable_weight
    score = partial(
        kto, loss_type=kind, beta=_beta(config), desirable=desirable, undesirable=undesirable
    )
    return Objective(score, reference=True, mismatched=kind == "kto", of_batch=kind == "kto")


def _orpo_of(config: LemaConfig) -> Objective:
    return Objective(partial(orpo, beta=_beta(config)), prompts=True)


def _simpo_of(config: LemaConfig) -> Objective:
    gamma = 0.5 if config.simpo_gamma is None else config.simpo_gamma
    smoothing = config.label_smoothing or 0.0
    alpha = config.cpo_alpha or 0.0
    return Objective(
        partial(simpo, beta=_beta(config), gamma=gamma, cpo_alpha=alpha, smoothing=smoothing)
    )


FROM_SETTINGS: Mapping[str, Callable[[LemaConfig], Objective]] = {
    "dpo": _dpo_of,
    "ipo": _dpo_of,
    "kto": _kto_of,
    "orpo": _orpo_of,
    "simpo": _simpo_of,
}
"""What makes each objective of `lema.config.objective` that is no cross-entropy of tokens."""


def grpo(
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    loss_type: str = "dapo",
    importance_sampling_level: str = "token",
    max_completion_length: int | None = None,
) -> Objective:
    """Return GRPO's objective (arXiv:2402.03300) by the settings of TRL's `GRPOConfig`, for rows
    with `advantages`. The ratio to the probabilities at which completions were made is clipped
    where rows have `old_logps`; without them it is
    1. With `beta` the model is kept at its reference, which is itself without adapters. `loss_type`
      says what the loss
    of tokens is divided by: "grpo", each row's tokens and then the rows; "bnpo" and "dapo", all
    tokens of the batch; "dr_grpo", rows times `max_completion_length`. `ConfigError`: there is no
    such loss."""
    high = epsilon if epsilon_high is None else epsilon_high
    if loss_type not in ("grpo", "bnpo", "dapo", "dr_grpo") or importance_sampling_level not in (
        "token",
        "sequence",
    ):
        raise ConfigError(
            f"{loss_type!r} over {importance_sampling_level!r} is no loss of GRPO that "
            "there is here"
        )
    if loss_type == "dr_grpo" and max_completion_length is None:
        raise ConfigError("dr_grpo divides by max_completion_length, which is not given")

    def score(rows: Scored) -> tuple[Tensor, Measured]:
        assert rows.advantages is not None, "rows without advantages"
        mask = rows.trained
        advantages = rows.advantages
        advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
        old = rows.logps.detach() if rows.old_logps is None else rows.old_logps
        weights = rows.logps - old
        if importance_sampling_level == "sequence":
            weights = ((weights * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
        ratio = torch.exp(weights)
        clipped = torch.clamp(ratio, 1 - epsilon, 1 + high)
        bounded = ratio if delta is None else torch.clamp(ratio, max=delta)
        losses = -torch.min(bounded * advantages, clipped * advantages).expand_as(rows.logps)
        measured: Measured = {}
        beyond = ((ratio < 1 - epsilon) & (advantages < 0)) | (
            (ratio > 1 + high) & (advantages > 0)
        )
        tokens = mask.sum().detach()
        measured["clip_ratio/region_mean"] = (
            (beyond.expand_as(mask) & mask).sum() / tokens.clamp(min=1),
            1.0,
        )
        if beta:
            assert rows.reference is not None, "the reference was not asked for"
            log_ratio = rows.reference - rows.logps
            kl = torch.exp(log_ratio) - log_ratio - 1
            losses = losses + beta * kl
            measured["kl"] = (kl.detach() * mask).sum() / tokens.clamp(min=1), 1.0
        if loss_type == "grpo":
            loss = ((losses * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).sum() / rows.num_examples
        elif loss_type == "dr_grpo":
            loss = (losses * mask).sum() / (rows.num_examples * (max_completion_length or 1))
        else:
            loss = (losses * mask).sum() / max(rows.num_tokens, 1)
        return loss, measured

    return Objective(score, reference=beta != 0.0, advantages=True)


def _of_pairs(chosen: Tensor, rejected: Tensor, logps: tuple[Tensor, Tensor]) -> Measured:
    """Return what is measured of pairs, given their rewards."""
    count = float(len(chosen))
    return {
        "rewards/chosen": (chosen.sum(), count),
        "rewards/rejected": (rejected.sum(), count),
        "rewards/accuracies": ((chosen > rejected).float().sum(), count),
        "rewards/margins": ((chosen - rejected).sum(), count),
        "logps/chosen": (logps[0].detach().sum(), count),
        "logps/rejected": (logps[1].detach().sum(), count),
    }


def _of_logits(rows: Scored) -> Measured:
    """Return the mean logit of the tokens of a batch's completions, which counts as often as it
    has rows.
    """
    if rows.mean_logits is None:
        return {}
    measured: Measured = {}
    for name, at in (("chosen", rows.chosen), ("rejected", rows.rejected)):
        if count := len(at):
            trained = rows.trained[at]
            mean = (rows.mean_logits[at] * trained).sum() / trained.sum().clamp(min=1)
            measured[f"logits/{name}"] = mean * count, float(count)
    return measured


def _log1mexp(value: Tensor) -> Tensor:
    """Return log(1 - exp(value)), in two forms: one loses its digits above -ln 2, the other
    below.
    """
    return torch.where(
        value < -0.6931471805599453, torch.log1p(-torch.exp(value)), torch.log(-torch.expm1(value))
    )
