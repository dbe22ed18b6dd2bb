"""The optimizer and the learning-rate schedule: torch's AdamW, transformers' schedules."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from lema.config import LemaConfig
from lema.errors import ConfigError

__all__ = ["make_optimizer", "make_schedule"]

BYTES_PER_PARAMETER = 16  # fp32 value, gradient and two moments


def make_optimizer(parameters: Iterable[nn.Parameter], config: LemaConfig) -> Optimizer:
    """Return AdamW (Loshchilov and Hutter, https://arxiv.org/abs/1711.05101) with the config's settings."""
    return AdamW(
        parameters,
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
    )


def make_schedule(optimizer: Optimizer, config: LemaConfig, num_steps: int) -> LRScheduler:
    """Return the schedule the config names, over `num_steps` optimizer steps.

    Raises:
        ConfigError: the schedule needs settings that the config does not have.
    """
    warmup = config.warmup_steps or int(config.warmup_ratio * num_steps)
    if config.lr_scheduler_type == "reduce_lr_on_plateau":
        raise ConfigError(
            "a schedule that follows the evaluation loss is not supported",
            where="lr_scheduler_type: reduce_lr_on_plateau",
            how="use one that is a function of the step, such as cosine",
        )
    try:
        schedule = get_scheduler(config.lr_scheduler_type, optimizer, warmup, num_steps)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"this schedule needs settings that cannot be given here: {error}",
            where=f"lr_scheduler_type: {config.lr_scheduler_type}",
            how="use linear, cosine, constant, constant_with_warmup, polynomial or inverse_sqrt",
        ) from error
    assert isinstance(schedule, LRScheduler)
    return schedule
