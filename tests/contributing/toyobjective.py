"""An objective of pairs: chosen tokens shall be likelier than rejected ones by a margin.

It knows nothing of the model: LEMA differentiates it by the log-probabilities of tokens alone. A
loop in Python needs `margin_loss`. For `lema train`, `MARGIN_KIND` and `margin_of` stand in two
tables.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch
from preferences import sums
from torch import Tensor

from lema.config import LemaConfig
from lema.config.objective import ObjectiveKind
from lema.config.settings import Refused
from lema.engine.head.objectives import Measured, Objective, Scored


def margin_loss(rows: Scored, *, margin: float) -> tuple[Tensor, Measured]:
    """Return a process's share of the batch's mean loss, and what is measured: sums and counts."""
    chosen, rejected = rows.completions(rows.logps)
    chosen_lengths, rejected_lengths = rows.lengths()
    ahead = chosen / chosen_lengths - rejected / rejected_lengths
    losses = torch.relu(margin - ahead)
    return losses.sum() / rows.num_examples, {"ahead": (ahead.detach().sum(), float(len(ahead)))}


def margin_by_hand(model: Any, batch: Mapping[str, Tensor], margin: float) -> Tensor:
    """The same loss on the whole model, written down from its logits; pairs lie side by side."""
    means = sums(model, batch) / (batch["labels"][:, 1:] != -100).sum(1)
    return torch.relu(margin - (means[::2] - means[1::2])).mean()


MARGIN_KIND = ObjectiveKind("pairs", settings=("beta",))


def margin_of(config: LemaConfig) -> Objective:
    """Return the objective of a run's settings, of which `beta` is the margin."""
    return Objective(partial(margin_loss, margin=0.1 if config.beta is None else config.beta))


class LemaConfigWithMargin(LemaConfig):
    """All settings, with one more objective: a contributor adds its name to `ObjectiveName`."""

    objective: Refused[Literal["sft", "margin"]] = "sft"
    """What the run trains on."""
