"""Optimizer steps of a streamed model leave what a plain loop over the whole model leaves."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from parity import (
    DRAWS,
    SEED,
    Outcome,
    accumulate,
    all_gradients,
    draw_b,
    layers_of,
    relative_difference,
    streamed_model,
    trained,
    whole_model,
    whole_step,
)
from tiny import ARCHITECTURES, Checkpoint, micro_batches, wide_batch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW
from transformers import get_scheduler

from lema.engine.optim import make_schedule

CheckpointOf = Callable[..., Checkpoint]

architectures = pytest.mark.parametrize("name", list(ARCHITECTURES))
recomputed_or_not = pytest.mark.parametrize("recompute", [True, False], ids=["recomputed", "kept"])


def rows(count: int) -> list[dict[str, list[int]]]:
    """Rows of different lengths, each with a prompt that is not trained."""
    generator = torch.Generator().manual_seed(4)
    made = []
    for index in range(count):
        ids = torch.randint(3, 96, (6 + index % 7,), generator=generator).tolist()
        made.append({"input_ids": ids, "labels": [-100] * 2 + ids[2:]})
    return made


def padded(some: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    longest = max(len(row["input_ids"]) for row in some)
    fill = {"input_ids": 0, "labels": -100}
    batch = {
        key: torch.tensor([row[key] + [value] * (longest - len(row[key])) for row in some])
        for key, value in fill.items()
    }
    ones = [[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in some]
    return {**batch, "attention_mask": torch.tensor(ones)}


def longest_first(row: dict[str, list[int]]) -> int:
    return -len(row["input_ids"])


@pytest.mark.slow
@recomputed_or_not
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_five_steps_of_a_fit_leave_the_adapters_of_a_plain_loop(
    checkpoint_of: CheckpointOf, tmp_path: Path, name: str, recompute: bool
) -> None:
    checkpoint = checkpoint_of(name, dropout=0.1)
    data = rows(40)
    dropout = 0.1
    whole = whole_model(checkpoint, dropout=dropout)
    optimizer = AdamW(trained(whole).values(), lr=1e-2, weight_decay=0.1)
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=1, num_training_steps=5)
    norms = []
    torch.manual_seed(SEED)
    for step in range(5):
        batches = [
            sorted(data[at : at + 4], key=longest_first) for at in range(8 * step, 8 * step + 8, 4)
        ]
        halves = [padded(batch[at : at + 2]) for batch in batches for at in (0, 2)]
        accumulate(whole, halves, layer_major=layers_of(whole, checkpoint))
        norms.append(float(clip_grad_norm_(trained(whole).values(), 0.05)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    generator = torch.get_rng_state()
    assert max(norms) > 0.05, "nothing was clipped"
    with streamed_model(
        checkpoint,
        lora_dropout=dropout,
        learning_rate=1e-2,
        weight_decay=0.1,
        warmup_steps=1,
        max_steps=5,
        batch_size=4,
        micro_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=0.05,
        shuffle=False,
        gradient_checkpointing=recompute,
        output_dir=tmp_path,
    ) as model:
        trainer = model.get_trainer()
        trainer.fit(data)
        assert trainer.global_step == 5
        assert torch.equal(torch.get_rng_state(), generator)
        assert_same_adapters(model.lora_manager, whole)
    logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["grad_norm"] for row in logged if "grad_norm" in row] == norms


@pytest.mark.slow
@recomputed_or_not
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_five_steps_of_train_step_leave_the_adapters_of_a_plain_loop(
    checkpoint_of: CheckpointOf, tmp_path: Path, name: str, recompute: bool
) -> None:
    """Passes with one micro-batch each draw dropout in the order of a plain loop."""
    checkpoint = checkpoint_of(name, dropout=0.1)
    dropout = 0.1
    generator = torch.Generator().manual_seed(5)
    steps = [
        [{"input_ids": torch.randint(3, 96, (2, 10), generator=generator)} for _ in range(2)]
        for _ in range(5)
    ]
    whole = whole_model(checkpoint, dropout=dropout)
    optimizer = AdamW(trained(whole).values(), lr=1e-2, weight_decay=0.0)
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=5)
    torch.manual_seed(DRAWS)
    expected = []
    for passes in steps:
        for batch in passes:
            outcome = whole(**batch, labels=batch["input_ids"], num_items_in_batch=36)
            outcome.loss.backward()
            expected.append((outcome.logits.detach(), float(outcome.loss.detach()) * 2))
        clip_grad_norm_(trained(whole).values(), 0.05)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    after = torch.get_rng_state()
    with streamed_model(
        checkpoint,
        lora_dropout=dropout,
        learning_rate=1e-2,
        gradient_accumulation_steps=2,
        max_grad_norm=0.05,
        gradient_checkpointing=recompute,
        output_dir=tmp_path,
    ) as model:
        trainer = model.get_trainer()
        trainer.schedule = make_schedule(trainer.ready(), model.config, 5)
        torch.manual_seed(DRAWS)
        found = [trainer.train_step(batch) for passes in steps for batch in passes]
        assert trainer.global_step == 5
        assert torch.equal(torch.get_rng_state(), after)
        assert_same_adapters(model.lora_manager, whole)
    for (logits, loss), (whole_logits, whole_loss) in zip(found, expected, strict=True):
        assert torch.equal(logits, whole_logits)
        assert loss == whole_loss


@pytest.mark.sampled(1)
@architectures
def test_a_batch_split_into_micro_batches_gives_the_whole_models_logits(
    checkpoint_of: CheckpointOf, tmp_path: Path, name: str
) -> None:
    checkpoint = checkpoint_of(name)
    batch = wide_batch()
    whole = whole_model(checkpoint)
    pairs = [{key: value[at : at + 2] for key, value in batch.items()} for at in (0, 2, 4)]
    with torch.no_grad():
        expected = torch.cat([whole(**pair).logits for pair in pairs])
    loss = accumulate(whole, pairs)
    with streamed_model(checkpoint, micro_batch_size=2, output_dir=tmp_path) as model:
        logits, value = model.get_trainer().train_step(batch)
    assert torch.equal(logits, expected)
    assert value == float(loss)


@pytest.mark.slow
def test_passes_with_unlike_numbers_of_tokens_are_weighted_by_token(
    checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    """How many tokens a step has is not known when its first pass runs, so gradients are scaled
    right at its end.
    """
    checkpoint = checkpoint_of("llama")
    batches = micro_batches(3)
    whole = whole_model(checkpoint)
    draw_b(whole)
    expected = whole_step(whole, batches)
    with streamed_model(
        checkpoint, gradient_accumulation_steps=3, max_grad_norm=None, output_dir=tmp_path
    ) as model:
        draw_b(model.lora_manager)
        optimizer = SGD(model.get_trainable_parameters(), lr=1.0)
        outcomes = []
        optimizer.register_step_pre_hook(
            lambda *_: outcomes.append(Outcome.of(model.lora_manager, torch.zeros(())))
        )
        trainer = model.get_trainer(optimizer)
        for batch in batches:
            trainer.train_step(batch)
    assert len(outcomes) == 1
    assert relative_difference(all_gradients(outcomes[0]), all_gradients(expected)) < 1e-6


@pytest.mark.sampled(1)
@architectures
def test_an_evaluation_between_two_steps_has_the_whole_models_loss_and_changes_nothing(
    checkpoint_of: CheckpointOf, tmp_path: Path, name: str
) -> None:
    data = sorted(rows(4), key=longest_first)  # as a batch has them: sums are added in this order
    checkpoint = checkpoint_of(name, dropout=0.1)
    batch = padded(rows(2))
    whole = whole_model(checkpoint, dropout=0.1).eval()
    with torch.no_grad():
        loss = float(whole(**padded(data)).loss)
    adapters = []
    for evaluates in (True, False):
        with streamed_model(
            checkpoint, lora_dropout=0.1, learning_rate=1e-2, batch_size=4, output_dir=tmp_path
        ) as model:
            trainer = model.get_trainer()
            torch.manual_seed(DRAWS)
            if evaluates:
                assert trainer.evaluate(data)["eval_loss"] == pytest.approx(loss, rel=1e-12)
            trainer.train_step(batch)
            if evaluates:
                assert trainer.evaluate(data)["eval_loss"] < loss
            trainer.train_step(batch)
            adapters.append(trained(model.lora_manager))
    assert all(torch.equal(adapters[0][key], parameter) for key, parameter in adapters[1].items())


@pytest.mark.slow
@recomputed_or_not
def test_float16_steps_with_a_gradient_scaler(
    checkpoint_of: CheckpointOf, tmp_path: Path, recompute: bool
) -> None:
    """The loss falls, and weights and scale are bitwise those of the same scaler on the whole
    model.
    """
    checkpoint = checkpoint_of("llama", dtype="float16")
    batches = micro_batches(2)
    whole = whole_model(checkpoint)
    optimizer = AdamW(trained(whole).values(), lr=3e-3, weight_decay=0.0)
    scaler = torch.amp.GradScaler("cpu")
    expected = []
    for _ in range(6):
        loss = accumulate(whole, batches, autocast=torch.float16, scaler=scaler)
        scaler.unscale_(optimizer)
        clip_grad_norm_(trained(whole).values(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        expected.append(float(loss))
    with streamed_model(
        checkpoint,
        learning_rate=3e-3,
        max_grad_norm=1.0,
        gradient_checkpointing=recompute,
        output_dir=tmp_path,
    ) as model:
        trainer = model.get_trainer()
        found = [trainer.accumulate(batches).loss for _ in range(6)]
        assert found == expected
        assert found[-1] < found[0] - 0.01
        assert trainer.scaler.is_enabled()
        assert trainer.scaler.get_scale() == scaler.get_scale()
        assert_same_adapters(model.lora_manager, whole)


def assert_same_adapters(streamed: nn.Module, whole: nn.Module) -> None:
    found = trained(streamed)
    expected = trained(whole)
    assert found.keys() == expected.keys()
    assert all(parameter.any() for parameter in expected.values()), "some adapter was not trained"
    assert all(torch.equal(found[key], parameter) for key, parameter in expected.items())
