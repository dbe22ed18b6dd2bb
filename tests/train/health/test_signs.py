"""Which steps look dead: those in which nothing can be learnt, and none of a healthy run."""

import math
from collections.abc import Iterable
from typing import Any

import pytest

from lema import LemaConfig
from lema.train.health.signs import DEAD_STEPS, Signs
from lema.train.steps import StepResult

GUESS = math.log(32_000)


def seen(
    steps: Iterable[dict[str, Any]], vocabulary: int | None = 32_000, **settings: Any
) -> tuple[list[str], Signs]:
    """Return what is told of steps, with the number of each, and the signs after the last."""
    signs = Signs(LemaConfig("m", **settings), vocabulary)
    told = []
    for number, step in enumerate(steps, 1):
        about = {"loss": 2.0, "trained_tokens": 50, "tokens": 60, "grad_norm": 0.3} | step
        rate = about.pop("rate", 1e-4)
        told += [f"{sign.kind} at {number}" for sign in signs.observe(StepResult(**about), rate)]
    return told, signs


@pytest.mark.parametrize(
    ("step", "told", "settings"),
    [
        ({"grad_norm": 0.0}, "gradient at 5", {}),
        ({"loss": GUESS + 1e-6, "grad_norm": 0.1}, "vocabulary at 6", {"max_grad_norm": 1.0}),
        ({"loss": 10.5}, "rising at 7", {}),  # beyond that of a guess
        ({"rate": 0.0}, "rate at 6", {}),
        ({"loss": 12.0}, "rising at 7", {"objective": "dpo"}),
    ],
)
def test_a_dead_run_is_told_once_and_is_dead_after_twenty_steps(
    step: dict[str, Any], told: str, settings: dict[str, Any]
) -> None:
    healthy = [{"loss": 0.693 if settings.get("objective") else 2.0}] * 4
    found, signs = seen([*healthy, *[step] * DEAD_STEPS], **settings)
    assert told in found and len(found) == len({one.split()[0] for one in found})
    assert signs.steps == DEAD_STEPS == 20
    assert signs.sign is not None and signs.verdict == signs.sign.why
    found, signs = seen([*healthy, *[step] * (DEAD_STEPS - 1), healthy[0], step], **settings)
    assert signs.steps == 1  # it is counted anew


def test_a_loss_that_hard_rows_may_have_is_told_and_ends_nothing() -> None:
    # beyond halfway from 2.0 to that of a guess
    found, signs = seen([*[{"loss": 2.0}] * 4, *[{"loss": 7.5}] * 40])
    assert found == ["rising at 7"]
    assert signs.steps == 0
    assert signs.verdict is not None and "7.5" in signs.verdict


def test_a_norm_that_cuts_gradients_to_nothing_is_odd() -> None:
    _, signs = seen([], max_grad_norm=1e-30)
    assert signs.verdict == "max_grad_norm is 1e-30, so gradients are cut to nothing"
    _, signs = seen([], max_grad_norm=1e-3)
    assert signs.verdict is None


@pytest.mark.parametrize(
    ("steps", "vocabulary", "settings"),
    [
        # Preferences begin at ln 2, which is that of two tokens.
        ([{"loss": math.log(2)}] * 40, 2, {"objective": "dpo"}),
        # A model whose config does not name its vocabulary.
        ([{"loss": math.log(2)}] * 40, None, {}),
        ([{"loss": 0.5}] * 40, 32_000, {"objective": "kto"}),
        # A hinge is 0 where all pairs are in order.
        (
            [{"loss": 1.0}, *[{"loss": 0.0, "grad_norm": 0.0}] * 40],
            32_000,
            {"objective": "dpo", "loss_type": "hinge"},
        ),
        # A warm-up begins at 0, and a schedule may end there.
        ([{"rate": 0.0}, *[{"rate": 1e-5}] * 20, {"rate": 0.0}], 32_000, {"warmup_steps": 10}),
        # A batch in which nothing is to be learnt.
        ([{"loss": 0.0, "grad_norm": 0.0, "trained_tokens": 0}] * 40, 32_000, {}),
        # Passes that accumulate have no norm.
        ([{"grad_norm": None}] * 40, 32_000, {}),
        # A model with random weights begins a little above ln of its vocabulary, and comes down
        # slowly.
        ([{"loss": GUESS + 0.006 - step * 2e-3} for step in range(60)], 32_000, {}),
        ([{"loss": math.log(300) * (1 + 0.1 * (-1) ** step)} for step in range(60)], 300, {}),
        # Single batches of few tokens that are surprising, up to two in succession.
        ([{"loss": loss} for loss in (0.1, 14.0, 13.0, 0.2) * 20], 32_000, {}),
        # A loss near its end of which nothing but noise is left.
        ([{"loss": 2.0 + step % 3} for step in range(60)], 32_000, {}),
        # A loss that is no cross-entropy, and one that is negative.
        ([{"loss": GUESS}] * 40, 32_000, {"loss_type": "dft"}),
        ([{"loss": -step / 10} for step in range(60)], 32_000, {"objective": "simpo"}),
    ],
)
def test_a_healthy_run_is_left_alone(
    steps: list[dict[str, Any]], vocabulary: int | None, settings: dict[str, Any]
) -> None:
    found, signs = seen(steps, vocabulary, **settings)
    assert (found, signs.verdict) == ([], None) and signs.steps < 2


@pytest.mark.parametrize(
    ("settings", "odd"),
    [
        ({"learning_rate": 0.0}, "is 0, so nothing changes"),
        ({"learning_rate": 1e-30}, "is 1e-30, too small"),
        ({"learning_rate": 3.0}, "is 3, which changes each weight by more"),
        ({"learning_rate": 3.0, "optim": "sgd"}, ""),
        ({"learning_rate": 1e6, "optim": "sgd"}, "is 1e+06"),
        ({"learning_rate": 0.5}, ""),
        ({"learning_rate": 1e-7}, ""),
    ],
)
def test_a_learning_rate_beyond_sense_is_odd(settings: dict[str, Any], odd: str) -> None:
    told = Signs(LemaConfig("m", **settings), 32_000).odd
    assert (told is None) == (odd == "") and odd in (told or "")


def test_a_run_that_goes_on_counts_on() -> None:
    _, before = seen([{}, *[{"grad_norm": 0.0, "loss": 9.0}] * 12])
    found, after = seen([], learning_rate=1e-3)
    after.go_on(before.state)
    told = [sign.kind for sign in after.observe(StepResult(9.0, 50, 60, 0.0), 1e-4)]
    assert (found, told, after.steps) == ([], ["gradient", "rising"], 13)  # the first loss was 2
    after.go_on(None)  # of an earlier version
    assert after.steps == 0
