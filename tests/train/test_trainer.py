"""One step after the other: accumulation, clipping, the user's optimizer, and what is no batch."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from smallrun import (
    VOCABULARY,
    adapter_of,
    assert_steps_as_a_new_one,
    batch,
    momentum,
    opened,
    settings,
    token_rows,
    tokenizer,
    write_model,
)
from torch import Tensor

from lema import LemaConfig, LemaModel, LemaTrainer
from lema.data import collate
from lema.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def first_step(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The adapter after the first step of a trainer to which nothing has happened."""
    with opened(settings(llama, tmp_path_factory.mktemp("first"))) as model:
        model.get_trainer().train_step(batch(1))
        return adapter_of(model.skeleton)


@pytest.fixture
def model(llama: Path, tmp_path: Path) -> Iterator[LemaModel]:
    with opened(settings(llama, tmp_path / "out")) as found:
        yield found


def update(config: LemaConfig, steps: Callable[[LemaTrainer], None]) -> dict[str, Tensor]:
    """The gradient by which one step of plain gradient descent has moved the adapter."""
    rate = 1024.0  # so large that the rounding of the parameters does not show
    with opened(config) as model:
        before = adapter_of(model.skeleton)
        steps(model.get_trainer(torch.optim.SGD(model.get_trainable_parameters(), lr=rate)))
        after = adapter_of(model.skeleton)
    return {name: (before[name] - after[name]) / rate for name in before}


@pytest.mark.slow
def test_accumulating_over_calls_is_one_step_over_all_their_tokens(
    llama: Path, tmp_path: Path
) -> None:
    # Of one length: what padding rounds differently is no matter of accumulation.
    rows = [{name: ids[:9] for name, ids in row.items()} for row in token_rows(7)]
    parts = [collate(rows[:1]), collate(rows[1:5]), collate(rows[5:])]
    losses: list[float] = []

    def one_by_one(trainer: LemaTrainer) -> None:
        before = adapter_of(trainer.peft_model)
        for part in parts[:2]:
            losses.append(trainer.train_step(part)[1])
            assert trainer.global_step == 0
        assert all(
            torch.equal(before[name], tensor)
            for name, tensor in adapter_of(trainer.peft_model).items()
        )
        losses.append(trainer.train_step(parts[2])[1])
        assert (trainer.global_step, trainer.accumulation_step) == (1, 0)

    apart = update(settings(llama, tmp_path, gradient_accumulation_steps=3), one_by_one)
    whole: list[float] = []
    together = update(
        settings(llama, tmp_path),
        lambda trainer: whole.append(trainer.train_step(collate(rows))[1]),
    )
    found, expected = (
        torch.cat([tensor.flatten() for tensor in one.values()]) for one in (apart, together)
    )
    assert float((found - expected).norm()) <= 1e-6 * float(expected.norm())
    assert float((found - expected).abs().max()) <= 1e-6 * float(expected.abs().max())
    tokens = [int((part["labels"][:, 1:] != -100).sum()) for part in parts]
    assert len(set(tokens)) == 3  # so that a mean of means would be another number
    mean = sum(loss * count for loss, count in zip(losses, tokens, strict=True)) / sum(tokens)
    assert mean == pytest.approx(whole[0], rel=1e-6)


@pytest.mark.slow
def test_clipping_is_torch_s_over_all_adapters_together(llama: Path, tmp_path: Path) -> None:
    def step(trainer: LemaTrainer) -> None:
        trainer.train_step(batch(1))

    free = update(settings(llama, tmp_path, max_grad_norm=None), step)
    norm = float(torch.nn.utils.get_total_norm(list(free.values())))
    clipped = update(settings(llama, tmp_path, max_grad_norm=norm / 4), step)
    found = float(torch.nn.utils.get_total_norm(list(clipped.values())))
    assert found == pytest.approx(norm / 4, rel=1e-4)
    for name, expected in free.items():
        torch.testing.assert_close(clipped[name], expected / 4, rtol=1e-3, atol=1e-6)
    wide = update(settings(llama, tmp_path, max_grad_norm=norm * 4), step)
    assert all(torch.equal(wide[name], free[name]) for name in free)


def test_what_a_tokenizer_returns_is_a_batch(model: LemaModel) -> None:
    encode = tokenizer()
    encode.pad_token = encode.eos_token
    encoded = encode(["the miller", "the mill by the river"], padding=True, return_tensors="pt")
    logits, loss = model.get_trainer().train_step(encoded)
    ids = encoded["input_ids"]
    mask = encoded["attention_mask"]
    assert not bool(mask.all())
    targets = ids.masked_fill(mask == 0, -100)[:, 1:].flatten()
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets)
    assert loss == pytest.approx(float(expected), rel=1e-6)


def test_padding_is_never_learnt(model: LemaModel) -> None:
    """Tokens alone of texts that were padded are refused, because nothing says which of them are
    texts.
    """
    encode = tokenizer()
    encode.pad_token = encode.eos_token
    model.files.__dict__["tokenizer"] = encode  # as it is once `model.tokenizer` was used
    trainer = model.get_trainer()
    for side in ("right", "left"):
        encoded = encode(
            ["the miller", "the mill by the river"],
            padding=True,
            padding_side=side,
            return_tensors="pt",
        )
        with pytest.raises(DataError, match="rows are padded") as caught:
            trainer.train_step(encoded["input_ids"])
        assert "train_step(batch)" in caught.value.how
    ids = encode(["the mill by the river"] * 2, return_tensors="pt")["input_ids"]
    # the end of a text is no padding
    ended = torch.cat([ids, torch.full((2, 1), encode.eos_token_id)], dim=1)
    trainer.train_step(ended)
    # as the caller says
    trainer.train_step({"input_ids": encoded["input_ids"], "labels": encoded["input_ids"]})


def test_an_optimizer_of_the_user_s_is_the_one_that_steps(model: LemaModel) -> None:
    parameters = model.get_trainable_parameters()
    chosen = parameters[: len(parameters) // 2]
    trainer = model.get_trainer(momentum(chosen))
    before = [parameter.detach().clone() for parameter in parameters]
    for seed in (1, 2):
        trainer.train_step(batch(seed))
        # what nobody steps must not pile up
        assert all(parameter.grad is None for parameter in parameters)
    moved = [
        not torch.equal(parameter, old) for parameter, old in zip(parameters, before, strict=True)
    ]
    assert moved == [True] * len(chosen) + [False] * (len(parameters) - len(chosen))


def test_an_optimizer_over_something_else_is_refused(model: LemaModel) -> None:
    stranger = torch.optim.SGD([torch.zeros(3, requires_grad=True)], lr=1.0)
    with pytest.raises(
        ConfigError,
        match="the optimizer has none of the adapter's parameters, so it would train nothing",
    ) as caught:
        model.get_trainer(stranger)
    assert "get_trainable_parameters" in caught.value.how


def test_a_stream_of_another_model_is_refused(
    model: LemaModel, llama: Path, tmp_path: Path
) -> None:
    with (
        opened(settings(llama, tmp_path)) as other,
        pytest.raises(ConfigError, match="not the stream"),
    ):
        LemaTrainer(model.config, model.adapter, model.gbi, model.lora_manager, None, other.memory)


IDS = torch.arange(2, 14).reshape(2, 6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"inputs": IDS[0]}, r"throughout and not empty, not .*\(6,\)"),
        ({"inputs": IDS, "labels": IDS[:, :5]}, r"\(2, 6\).*\(2, 5\)"),
        ({"inputs": IDS, "attention_mask": torch.ones(2, 7)}, r"\(2, 6\).*\(2, 7\)"),
        ({"inputs": IDS[:0]}, "not empty"),
        ({"inputs": IDS.float()}, "input_ids should be whole numbers, not torch.float32"),
        ({"inputs": IDS.tolist()}, "a batch is a tensor of token ids"),
        ({"inputs": {"ids": IDS}}, "a mapping with input_ids"),
        (
            {"inputs": {"input_ids": IDS.tolist(), "labels": IDS.tolist()}},
            "input_ids, labels should be torch tensors",
        ),
        (
            {"inputs": IDS + VOCABULARY},
            f"input_ids holds {VOCABULARY + 13}, which is outside the vocabulary",
        ),
        ({"inputs": IDS, "labels": IDS - 7}, "labels holds -5, which is outside the vocabulary"),
        (
            {"inputs": IDS, "labels": torch.full_like(IDS, -100)},
            "this step trains on no token: every label is -100",
        ),
        ({"inputs": IDS[:, :1]}, "this step trains on no token: every label is -100"),
    ],
)
def test_what_is_no_batch_is_refused_and_changes_nothing(
    model: LemaModel, inputs: dict[str, Any], words: str, first_step: dict[str, Tensor]
) -> None:
    trainer = model.get_trainer()
    with pytest.raises(DataError, match=words):
        trainer.train_step(**inputs)
    assert trainer.global_step == 0
    assert_steps_as_a_new_one(trainer, first_step)
