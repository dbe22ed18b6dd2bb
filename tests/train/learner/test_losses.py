"""Losses and gradients are those of the published formulas, written out here once more."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import VOCABULARY, Checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM

from lema.errors import DataError
from lema.train.learner.adapter import AdapterSpec
from lema.train.learner.learner import Learner
from lema.train.learner.losses import LOSSES, loss_named
from lema.train.learner.rows import AdapterRows, Datum

CheckpointOf = Callable[..., Checkpoint]
SPEC = AdapterSpec(4, seed=5)
Formula = Callable[[Tensor, dict[str, Tensor]], Tensor]


def weighted(logps: Tensor, row: dict[str, Tensor]) -> Tensor:
    return (-logps * row["weights"]).sum()


def importance(logps: Tensor, row: dict[str, Tensor]) -> Tensor:
    return -((logps - row["logprobs"]).exp() * row["advantages"]).sum()


def clipped(low: float, high: float) -> Formula:
    def ppo(logps: Tensor, row: dict[str, Tensor]) -> Tensor:
        ratio = (logps - row["logprobs"]).exp()
        surrogates = [ratio * row["advantages"], ratio.clamp(low, high) * row["advantages"]]
        return -torch.stack(surrogates).amin(0).sum()

    return ppo


def cispo(logps: Tensor, row: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        factor = (logps - row["logprobs"]).exp().clamp(0.8, 1.2)
    return -(factor * logps * row["advantages"]).sum()


def truncated(most: float) -> Formula:
    def loss(logps: Tensor, row: dict[str, Tensor]) -> Tensor:
        ratio = (logps - row["logprobs"]).exp().detach()
        return -(ratio.minimum(torch.tensor(most)) * logps * row["advantages"]).sum()

    return loss


def dro(beta: float) -> Formula:
    def loss(logps: Tensor, row: dict[str, Tensor]) -> Tensor:
        pull = beta / 2 * (logps - row["logprobs"]).square()
        return -(logps * row["advantages"] - pull).sum()

    return loss


CASES: dict[str, tuple[str, dict[str, float], Formula]] = {
    "cross_entropy": ("cross_entropy", {}, weighted),
    "importance_sampling": ("importance_sampling", {}, importance),
    "ppo": ("ppo", {}, clipped(0.8, 1.2)),
    "ppo, narrow": ("ppo", {"clip_low_threshold": 0.95, "clip_high_threshold": 1.01}, clipped(0.95, 1.01)),
    "cispo": ("cispo", {}, cispo),
    "truncated": ("cispo", {"clip_low_threshold": 0.0, "clip_high_threshold": 1.1}, truncated(1.1)),
    "dro": ("dro", {}, dro(0.05)),
    "dro, strong": ("dro", {"beta": 0.7}, dro(0.7)),
}  # fmt: skip


@pytest.fixture(scope="module")
def learner(checkpoint_of: CheckpointOf) -> Iterator[Learner]:
    opened = Learner.open(checkpoint_of("llama").streamed, device="cpu", micro_batch_tokens=30)
    opened.add("one", SPEC)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def whole(checkpoint_of: CheckpointOf, learner: Learner) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(checkpoint_of("llama").published)
    torch.manual_seed(SPEC.seed)
    config = LoraConfig(
        r=SPEC.rank,
        lora_alpha=32,
        target_modules=learner._targets.chosen(SPEC),
        task_type="CAUSAL_LM",
    )
    wrapped: torch.nn.Module = get_peft_model(model, config)
    return wrapped


def rows(model: torch.nn.Module, names: set[str]) -> list[Datum]:
    """Rows whose sampling log-probabilities are near enough to those of the model that some ratios
    are clipped and some are not.
    """
    generator = torch.Generator().manual_seed(11)
    data = []
    for length in (11, 6, 14):
        ids = torch.randint(3, VOCABULARY, (length + 1,), generator=generator)
        logps = logps_of(model, ids[:-1], ids[1:]).detach()
        own = {
            "weights": torch.rand(length, generator=generator),
            "logprobs": logps + 0.4 * torch.randn(length, generator=generator),
            "advantages": torch.randn(length, generator=generator),
        }
        data.append(Datum(ids[:-1], ids[1:], {name: own[name] for name in names}))
    return data


def logps_of(model: torch.nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = model(input_ids=tokens[None]).logits[0].float()
    picked: Tensor = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    return picked


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_the_formula(
    case: str, learner: Learner, whole: torch.nn.Module
) -> None:
    name, options, formula = CASES[case]
    loss = LOSSES[name]
    data = rows(whole, {*loss.needed, *(set(loss.taken) & {"weights"})})
    adapter = learner.adapters["one"]
    adapter.drop_gradients()
    request = AdapterRows("one", data, name, options)
    request.check(learner.vocabulary, longest=100)
    (scored,) = learner.run([request])
    whole.zero_grad()
    total = torch.zeros(())
    for datum, logprobs in zip(data, scored.logprobs, strict=True):
        logps = logps_of(whole, datum.tokens, datum.targets)
        torch.testing.assert_close(logprobs, logps.detach(), rtol=1e-6, atol=1e-6)
        value = formula(logps, dict(datum.tensors))
        value.backward()
        total += value.detach()
    torch.testing.assert_close(torch.tensor(scored.loss), total, rtol=1e-6, atol=1e-6)
    own = {
        path.replace(".default.", "."): parameter
        for path, parameter in whole.named_parameters()
        if parameter.requires_grad
    }
    largest = max(float(parameter.grad.abs().max()) for parameter in own.values())
    for path, parameter in own.items():
        formed = adapter.parameters[path].grad
        torch.testing.assert_close(formed, parameter.grad, rtol=1e-6, atol=1e-6 * largest)


def test_thresholds_of_a_row_are_those_of_its_tokens() -> None:
    logps = torch.tensor([-1.0, -1.0, -1.0])
    row = {
        "logprobs": torch.tensor([-1.5, -1.5, -1.5]),
        "advantages": torch.ones(3),
        "clip_high_threshold": torch.tensor([1.1, 1.5, 9.0]),
    }
    loss = loss_named("ppo")
    losses = loss.of_tokens(logps, row, loss.settled({}))
    expected = -torch.tensor([1.1, 1.5, float(torch.tensor(0.5).exp())])
    torch.testing.assert_close(losses, expected)


def test_candidates_of_a_token_are_scored_each(learner: Learner) -> None:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, VOCABULARY, (8,), generator=generator)
    several = torch.randint(3, VOCABULARY, (8, 3), generator=generator)
    weights = torch.rand(8, 3, generator=generator)
    (scored,) = learner.run(
        [AdapterRows("one", [Datum(ids, several, {"weights": weights})], "cross_entropy")],
        differentiate=False,
    )
    for candidate in range(3):
        (single,) = learner.run(
            [AdapterRows("one", [Datum(ids, several[:, candidate])], "cross_entropy")],
            differentiate=False,
        )
        torch.testing.assert_close(scored.logprobs[0][:, candidate], single.logprobs[0])
    assert scored.loss == pytest.approx(float(-(scored.logprobs[0] * weights).sum()))


BAD = {
    "no such loss": (AdapterRows("one", [Datum(torch.ones(2).long(), torch.ones(2).long())], "nll"), "no loss"),
    "no rows": (AdapterRows("one", [], "cross_entropy"), "no rows"),
    "no such option": (
        AdapterRows("one", [Datum(torch.ones(2).long(), torch.ones(2).long())], "cross_entropy", {"beta": 1.0}),
        "no option beta",
    ),
    "no advantages": (
        AdapterRows("one", [Datum(torch.ones(2).long(), torch.ones(2).long())], "ppo"),
        "needs logprobs, advantages",
    ),
    "another length": (
        AdapterRows("one", [Datum(torch.ones(2).long(), torch.ones(3).long())], "cross_entropy"),
        "have the shape",
    ),
    "no such token": (
        AdapterRows("one", [Datum(torch.ones(2).long(), torch.full((2,), 9999))], "cross_entropy"),
        "not all of the vocabulary",
    ),
    "too long": (
        AdapterRows("one", [Datum(torch.ones(101).long(), torch.ones(101).long())], "cross_entropy"),
        "101 tokens",
    ),
    "not finite": (
        AdapterRows("one", [Datum(torch.ones(1).long(), torch.ones(1).long(), {"weights": torch.tensor([torch.nan])})], "cross_entropy"),
        "not finite",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_request_that_is_wrong_is_refused(case: str) -> None:
    request, message = BAD[case]
    with pytest.raises(DataError, match=message):
        request.check(VOCABULARY, longest=100)
