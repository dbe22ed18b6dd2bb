"""How long one pass over the training data takes, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from lema.companions import load_tokenizer
from lema.config import LemaConfig
from lema.data import needs_tokenizer, prepare_data
from lema.plan.blueprint import Blueprint
from lema.plan.step import StepShape

__all__ = ["Epoch", "epoch_of"]


@dataclass(frozen=True)
class Epoch:
    """One pass over the training data.

    Attributes:
        rows: of the data.
        tokens: of them.
        steps: optimizer steps.
        hours: they take.
        cost: at the price given; None: none was.
    """

    rows: int
    tokens: int
    steps: int
    hours: float
    cost: float | None


def epoch_of(
    config: LemaConfig,
    blueprint: Blueprint,
    shape: StepShape,
    price: float | None,
    step_seconds: Callable[[float], float],
    *,
    trust_remote_code: bool = False,
) -> Epoch | None:
    """Read the training data as training would, and say how long an epoch takes; None: the settings name no data.

    Args:
        config: of the run.
        blueprint: its model.
        shape: of a full step.
        price: of an hour.
        step_seconds: given the part of a full step's tokens that a step has, returns its seconds.
        trust_remote_code: as in `LemaModel`.

    Raises:
        DataError: the data is missing or malformed.
    """
    if not config.train_data:
        return None
    data = prepare_data(
        config.train_data,
        _tokenizer(blueprint, trust_remote_code) if needs_tokenizer(config.train_data) else None,
        max_length=shape.micro_batch.length,
        overlong=config.overlong,
        vocab_size=blueprint.vocabulary or None,
    )
    rows, tokens = data.counts.rows, data.counts.tokens
    steps = math.ceil(rows / shape.num_rows)
    part = tokens / (rows * shape.micro_batch.length)
    hours = steps * step_seconds(part) / 3600
    return Epoch(rows, tokens, steps, hours, None if price is None else price * hours)


def _tokenizer(blueprint: Blueprint, trusted: bool) -> PreTrainedTokenizerBase:
    how = "put the tokenizer's files beside the weights, or leave train_data out of the plan"
    return load_tokenizer(blueprint.directory, trusted=trusted, how=how)
