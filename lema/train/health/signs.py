"""Signs that a run learns nothing, told by numbers of its steps that are on the host anyway.

A run goes to its end with weights that were ruined in its first minutes, unless somebody looks.
What is looked for cannot be in a healthy run, or not for so many steps in succession: a gradient
whose norm is exactly 0; a loss that is the logarithm of the vocabulary's size, as of a model that
says nothing of the next token; a loss that has risen far beyond that of the first step; a learning
rate of 0. A loss of preferences begins at ln 2 and is no such sign, nor is a rate that begins at 0
for a warm-up.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lema.config import LemaConfig
from lema.train.steps import StepResult

__all__ = ["DEAD_STEPS", "GO_ON", "TO_DO", "Sign", "Signs", "is_sound"]

DEAD_STEPS = 20  # steps with a sign, one after the other, after which a run is taken for dead

# Steps in succession after which a sign is told. A batch of few tokens may have any loss, a
# schedule a rate of 0 once.
REPORT_AFTER = {"gradient": 1, "vocabulary": 2, "rate": 2, "rising": 3}

# What a user can do about it.
TO_DO = {
    "gradient": (
        "lower learning_rate if the loss rose before, or check that what trains takes part in "
        "the loss"
    ),
    "vocabulary": (
        "lower learning_rate if the loss was lower before, or check the model's weights with "
        "`lema eval`"
    ),
    "rate": "raise learning_rate",
    "rising": "lower learning_rate, or set max_grad_norm",
}
GO_ON = "; stop_when_dead: false goes on"

TOO_LARGE = "which changes each weight by more than the weights of a model are"
ROUNDING = 1e-5  # of a loss of equal logits, relative
# within which a learning rate has a sense where each weight moves by about as much
ADAPTIVE_RATES = (1e-12, 1.0)
SHORTEST = 1e-9  # a norm below which no optimizer sees a gradient
OTHER_RATES = (1e-12, 1e4)  # of optimizers whose steps are as long as their gradients


@dataclass(frozen=True)
class Sign:
    """One reason to think that a run learns nothing."""

    kind: str  # a name of `TOLD_AFTER`
    why: str
    ruins: bool = True  # whether many such steps end a run


def _odd_rate(config: LemaConfig) -> str | None:
    """Say what is odd about the lengths of steps in the settings; None: they have a sense."""
    rate = config.learning_rate
    least, most = OTHER_RATES if config.optim == "sgd" else ADAPTIVE_RATES
    if rate == 0:
        return "the learning rate is 0, so nothing changes"
    if config.max_grad_norm and config.max_grad_norm < SHORTEST:
        return f"max_grad_norm is {config.max_grad_norm:g}, so gradients are cut to nothing"
    if least <= rate < most:
        return None
    return f"the learning rate is {rate:g}, " + (
        "too small to change a weight" if rate < least else TOO_LARGE
    )


def is_sound(carried: Mapping[str, Any]) -> bool:
    """Whether there was no sign in the last step of a checkpoint that carried this."""
    return not (carried.get("signs") or (None, 0))[1]


class Signs:
    """The signs in the steps that train one thing: in how many in succession there was one, up to
    the last.

    `vocabulary` is the number of tokens that the model tells apart; None: its config does not say.
    """

    def __init__(self, config: LemaConfig, vocabulary: int | None) -> None:
        self._tokens = (
            config.objective == "sft"
            and config.loss_type in (None, "nll")
            and vocabulary is not None
        )
        self._may_end_at_0 = config.objective != "sft"  # a hinge, where all pairs are in order
        self._guess = math.log(max(vocabulary or 2, 2))
        self._first: float | None = None
        self._lasted: dict[str, int] = {}
        self.odd = _odd_rate(config)
        # which is told before the first step
        self._reported: set[str] = set() if self.odd is None else {"rate"}
        self._recorded = set[str]()
        self.steps = 0
        self.sign: Sign | None = None

    @property
    def verdict(self) -> str | None:
        """Say why the run, as it is now, may have learnt nothing; None: there is no reason to
        think so.
        """
        return self.odd if self.sign is None else self.sign.why

    @property
    def state(self) -> list[Any]:
        """What a checkpoint keeps, so that a run that goes on counts on: JSON types."""
        return [self._first, self.steps, dict(self._lasted), sorted(self._recorded)]

    def go_on(self, state: Sequence[Any] | None) -> None:
        """Count on from the `state` in a checkpoint; None: it has none, because an earlier version
        wrote it. What was told is told again by another process, but is not recorded twice."""
        self._first, self.steps, lasted, recorded = state or (None, 0, {}, ())
        self._lasted = dict(lasted)
        self._recorded = set(recorded)

    def observe(self, result: StepResult, rate: float) -> Iterator[Sign]:
        """Look at a step that was taken, at a learning rate; yield the signs that are to be told
        now, each once.
        """
        if not result.trained_tokens:
            return  # nothing was to be learnt
        signs = {sign.kind: sign for sign in self._signs_of(result, rate)}
        self._lasted = {kind: self._lasted.get(kind, 0) + 1 for kind in signs}
        self.steps = self.steps + 1 if any(sign.ruins for sign in signs.values()) else 0
        lasting = [
            signs[kind] for kind, count in self._lasted.items() if count >= REPORT_AFTER[kind]
        ]
        self.sign = lasting[0] if lasting else None
        for sign in lasting:
            if sign.kind not in self._reported:
                self._reported.add(sign.kind)
                yield sign

    def records(self, sign: Sign) -> bool:
        """Note that a sign is told; return whether it is one of a kind that no process of the
        run has told.
        """
        new = sign.kind not in self._recorded
        self._recorded.add(sign.kind)
        return new

    def _signs_of(self, result: StepResult, rate: float) -> Iterator[Sign]:
        loss = result.loss
        if self._first is None:
            self._first = loss
        if result.grad_norm == 0 and not (self._may_end_at_0 and loss == 0):
            yield Sign("gradient", "the norm of the gradients is exactly 0, so nothing is learnt")
        if self._tokens and abs(loss - self._guess) <= ROUNDING * self._guess:
            yield Sign(
                "vocabulary",
                f"the loss is {loss:.4f}, that of a model to which all tokens are equally likely",
            )
        if loss > (most := self._most(self._first)):
            why = (
                f"the loss is {loss:.4g}, which was {self._first:.4g} at first; the bound is "
                f"{most:.4g}"
            )
            # Rows that are hard may have such a loss, too, but hardly one beyond that of knowing
            # nothing.
            yield Sign("rising", why, ruins=not self._tokens or loss > self._guess)
        if rate == 0:
            yield Sign("rate", "the learning rate is 0, so nothing changes")

    def _most(self, first: float) -> float:
        """Return the loss beyond which a run has gone wrong that began with the `first`."""
        if not self._tokens:
            return first + 10 * max(1.0, abs(first))
        if first < 0.75 * self._guess:
            return (first + self._guess) / 2  # a model that knew more has lost half of it
        return 2 * max(first, self._guess)
