"""What a demo has shown, and whether that is what it claims."""

from __future__ import annotations

from dataclasses import dataclass

from lema.demo.files import DemoFiles
from lema.errors import LemaError

__all__ = ["MOST_DIFFERENCE", "Measured", "Outcome", "check"]

MOST_DIFFERENCE = 1e-4
"""Logits of the streamed model and of PEFT's may differ by this; with one arithmetic they do not differ at all."""

_REPORT = "this is a fault of lema or of a library it rests on; please report it with the output of `pip list`"


@dataclass(frozen=True)
class Measured:
    """What the model is worth at one time: loss and perplexity on held-out rows, and how it continues the prompt."""

    loss: float
    perplexity: float
    text: str


@dataclass(frozen=True)
class Outcome:
    """The model before and after training, and the largest difference of a logit once PEFT has loaded the adapter."""

    files: DemoFiles
    before: Measured
    after: Measured
    logit_difference: float


def check(outcome: Outcome) -> None:
    """Hold the outcome against what the demo claims.

    Raises:
        LemaError: the loss did not fall, or PEFT's numbers are others.
    """
    if not outcome.after.loss < outcome.before.loss:
        raise LemaError(
            f"the held-out loss did not fall: {outcome.before.loss:.3f} before, {outcome.after.loss:.3f} after",
            where=str(outcome.files.metrics),
            how=_REPORT,
        )
    if not outcome.logit_difference <= MOST_DIFFERENCE:
        raise LemaError(
            f"PEFT's logits differ from the streamed model's by {outcome.logit_difference:.2e}",
            where=str(outcome.files.adapter),
            how=_REPORT,
        )
