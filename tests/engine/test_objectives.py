"""Objectives of rows are, to rounding, those of the whole model with PEFT, and read no weight more
than cross-entropy.

The head's gradient of each log-probability is scaled after it is formed, so products round
otherwise than where the loss is differentiated through it: gradients agree to a few parts in ten
million.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity import (
    SEED,
    Outcome,
    all_gradients,
    draw_b,
    relative_difference,
    streamed_model,
    trained,
    whole_model,
)
from peft import LoraConfig, get_peft_model
from preferences import BY_HAND, batch_of, examples, parts_of, row_logps
from tiny import NUM_LAYERS, Checkpoint, micro_batches
from transformers import AutoModelForCausalLM

from lema.config import LemaConfig
from lema.engine.head.objectives import grpo, objective_of
from lema.errors import DataError
from lema.plan.work.meter import Tally

CheckpointOf = Callable[..., Checkpoint]
TIGHT = 2e-6


def whole_outcome(
    checkpoint: Checkpoint, objective: str, batch: dict[str, torch.Tensor], **options: Any
) -> Outcome:
    model = whole_model(checkpoint, **options)
    draw_b(model)
    loss = BY_HAND[objective](model, batch)
    loss.backward()
    return Outcome.of(model, loss)


def assert_close(streamed: Outcome, whole: Outcome) -> None:
    assert streamed.gradients.keys() == whole.gradients.keys()
    assert float(streamed.loss) == pytest.approx(float(whole.loss), rel=TIGHT, abs=1e-7)
    assert relative_difference(all_gradients(streamed), all_gradients(whole)) < TIGHT
    for name, gradient in streamed.gradients.items():
        other = whole.gradients[name]
        assert gradient is not None
        assert other is not None
        assert relative_difference(gradient, other) < 10 * TIGHT, name


def outcome(model: Any, parts: list[dict[str, torch.Tensor]]) -> Outcome:
    loss = model.adapter.loss(parts)
    loss.backward()
    return Outcome.of(model.lora_manager, loss)


@pytest.mark.covered(6)
@pytest.mark.parametrize("cuts", [(8,), (3, 5), (1,) * 8], ids=str)
@pytest.mark.parametrize("objective", BY_HAND)
def test_loss_and_gradients_are_those_of_the_whole_model(
    checkpoint_of: CheckpointOf, objective: str, cuts: tuple[int, ...]
) -> None:
    checkpoint = checkpoint_of("llama")
    batch = batch_of(examples(labelled=objective == "kto"))
    whole = whole_outcome(checkpoint, objective, batch)
    with streamed_model(checkpoint, gradient_checkpointing=True, objective=objective) as model:
        draw_b(model.lora_manager)
        assert_close(outcome(model, parts_of(batch, *cuts)), whole)


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_checkpointing": False},
        {"gradient_checkpointing": True, "boundary_activations": "host", "loss_chunk_tokens": 7},
        {"gradient_checkpointing": True, "activation_offloading": "disk"},
        {
            "gradient_checkpointing": True,
            "strategy": "resident",
            "lora_layers_to_transform": [7, 9],
        },
        {"gradient_checkpointing": True, "pad_to_multiple_of": 5},
    ],
    ids=lambda one: "-".join(sorted(one)),
)
def test_memory_settings_change_no_number(
    checkpoint_of: CheckpointOf, settings: dict[str, Any]
) -> None:
    checkpoint = checkpoint_of("qwen3")
    batch = batch_of(examples())
    alone = {"gradient_checkpointing": True, "objective": "dpo"}
    alone |= {name: settings[name] for name in ("lora_layers_to_transform",) if name in settings}
    with streamed_model(checkpoint, **alone) as model:
        draw_b(model.lora_manager)
        expected = outcome(model, [batch])
    with streamed_model(checkpoint, objective="dpo", **settings) as model:
        draw_b(model.lora_manager)
        assert_close(outcome(model, parts_of(batch, 4, 4)), expected)


@pytest.mark.parametrize(
    "saved", [["lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head"]], ids=str
)
def test_what_trains_outside_the_layers_has_its_gradient_and_the_reference_has_not_got_it(
    checkpoint_of: CheckpointOf, saved: list[str]
) -> None:
    checkpoint = checkpoint_of("llama")
    batch = batch_of(examples())
    base = AutoModelForCausalLM.from_pretrained(checkpoint.published)
    torch.manual_seed(SEED)
    targets = sorted(checkpoint.architecture.targets)
    options: dict[str, Any] = {
        "target_modules": targets,
        "modules_to_save": saved,
        "task_type": "CAUSAL_LM",
    }
    whole = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, **options)).train()
    settings: dict[str, Any] = {
        "gradient_checkpointing": True,
        "objective": "dpo",
        "lora_modules_to_save": saved,
    }
    with streamed_model(checkpoint, **settings) as model:
        for one in (whole, model.lora_manager):
            draw_b(one)
            with torch.no_grad():  # so that the reference is another model
                for name, parameter in trained(one).items():
                    if "lora_" not in name:
                        parameter.mul_(1.5)
        loss = BY_HAND["dpo"](whole, batch)
        loss.backward()
        assert_close(outcome(model, parts_of(batch, 5, 3)), Outcome.of(whole, loss))


def test_dropout_of_the_model_draws_once_for_the_loss_and_its_gradient(
    checkpoint_of: CheckpointOf,
) -> None:
    checkpoint = checkpoint_of("llama", dropout=0.2)
    batch = batch_of(examples())
    whole = whole_model(checkpoint)
    draw_b(whole)
    torch.manual_seed(4)
    loss = BY_HAND["orpo"](whole, batch)
    loss.backward()
    with streamed_model(checkpoint, gradient_checkpointing=True, objective="orpo") as model:
        draw_b(model.lora_manager)
        torch.manual_seed(4)
        found = outcome(model, [batch])
        assert_close(found, Outcome.of(whole, loss))
        torch.manual_seed(5)
        assert outcome(model, [batch]).loss != found.loss


@pytest.mark.parametrize("objective", BY_HAND)
def test_no_byte_of_a_weight_is_read_for_the_reference(
    checkpoint_of: CheckpointOf, objective: str
) -> None:
    batch = batch_of(examples(labelled=objective == "kto"))
    costs = []
    for given in ("sft", objective):
        with streamed_model(
            checkpoint_of("llama"), gradient_checkpointing=True, objective=given
        ) as model:
            draw_b(model.lora_manager)
            # the first step finds nothing kept from a step before
            outcome(model, parts_of(batch, 4, 4))
            before = model.memory.counters
            outcome(model, parts_of(batch, 4, 4))
            after = model.memory.counters
        costs.append(
            [
                getattr(after, name) - getattr(before, name)
                for name in ("bytes_read", "bytes_uploaded", "leases")
            ]
        )
    assert costs[0] == costs[1]
    assert costs[0][2] == 2 * NUM_LAYERS - 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("objective", "most"), [("dpo", 1.4), ("kto", 2.1), ("orpo", 1.04), ("simpo", 1.04)]
)
def test_a_step_computes_little_more_than_the_reference(
    checkpoint_of: CheckpointOf, objective: str, most: float
) -> None:
    """A third for the reference of pairs; KTO's mismatched rows are two thirds more, and the top
    layer runs twice.
    """
    batch = batch_of(examples(labelled=objective == "kto"))
    flops = []
    for given in ("sft", objective):
        with streamed_model(
            checkpoint_of("llama"), gradient_checkpointing=True, objective=given
        ) as model:
            outcome(model, [batch])
            with Tally() as counter:
                outcome(model, [batch])
            flops.append(counter.flops)
    assert 1.0 < flops[1] / flops[0] < most


def test_evaluation_is_the_loss_without_adapters_moved_or_gradients(
    checkpoint_of: CheckpointOf,
) -> None:
    checkpoint = checkpoint_of("llama")
    for objective, by_hand in BY_HAND.items():
        batch = batch_of(examples(labelled=objective == "kto"))
        whole = whole_model(checkpoint)
        draw_b(whole)
        with streamed_model(checkpoint, objective=objective) as model, torch.no_grad():
            draw_b(model.lora_manager)
            value, count = model.adapter.evaluate(parts_of(batch, 3, 5))
            assert float(value) == pytest.approx(float(by_hand(whole, batch)), rel=TIGHT)
            assert count == (8 if objective == "kto" else 4)
            assert {
                "rewards/chosen",
                "rewards/margins",
                "logps/rejected",
            } <= model.adapter.measured.keys()
            assert all(parameter.grad is None for parameter in model.lora_manager.parameters())


@pytest.mark.covered(5)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo"])
def test_grpo_clips_the_ratio_to_the_model_that_made_the_rows(
    checkpoint_of: CheckpointOf, loss_type: str, level: str
) -> None:
    checkpoint = checkpoint_of("llama")
    batch = batch_of(examples())
    del batch["example"]
    draw = torch.Generator().manual_seed(1)
    batch["advantages"] = torch.randn(8, generator=draw)
    whole = whole_model(checkpoint)
    draw_b(whole)
    mask = (batch["labels"][:, 1:] != -100).float()
    with torch.no_grad():
        old = row_logps(whole, batch, batch["labels"])
        old = old + torch.randn(old.shape, generator=draw) * 0.3 * mask
    batch["old_logps"] = torch.nn.functional.pad(old, (1, 0))
    logps = row_logps(whole, batch, batch["labels"])
    apart = (
        logps - old if level == "token" else (((logps - old) * mask).sum(1) / mask.sum(1))[:, None]
    )
    ratio = apart.exp()
    advantage = batch["advantages"][:, None]
    losses = -torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.3) * advantage) * mask
    reference = whole_reference(whole, batch)
    losses = losses + 0.04 * (torch.exp(reference - logps) - (reference - logps) - 1) * mask
    loss = {
        "grpo": (losses.sum(1) / mask.sum(1)).mean(),
        "dr_grpo": losses.sum() / (8 * 11),
    }.get(loss_type, losses.sum() / mask.sum())
    loss.backward()
    with streamed_model(checkpoint, gradient_checkpointing=True) as model:
        draw_b(model.lora_manager)
        options: dict[str, Any] = {
            "loss_type": loss_type,
            "max_completion_length": 11,
            "importance_sampling_level": level,
        }
        model.adapter.objective = grpo(epsilon=0.1, epsilon_high=0.3, beta=0.04, **options)
        found = outcome(model, parts_of(batch, 3, 5))
        assert 0 < float(model.adapter.measured["clip_ratio/region_mean"][0]) < 1
    assert_close(found, Outcome.of(whole, loss))


def whole_reference(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad(), model.disable_adapter():
        return row_logps(model, batch, batch["labels"])


def test_rows_of_which_nothing_is_said_are_refused(checkpoint_of: CheckpointOf) -> None:
    with streamed_model(checkpoint_of("llama"), objective="dpo") as model:
        with pytest.raises(DataError, match="a batch lacks what the objective needs of its rows"):
            model.adapter.loss(micro_batches(1))
        model.adapter.objective = grpo()
        with pytest.raises(DataError, match="advantages"):
            model.adapter.loss(micro_batches(1))
        model.adapter.objective = objective_of(LemaConfig("m", objective="kto"))
        with pytest.raises(DataError, match="no mismatched"):
            model.adapter.loss([batch_of(examples())])


def test_memory_that_runs_out_cuts_rows_apart_and_changes_no_number(
    checkpoint_of: CheckpointOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = checkpoint_of("llama")
    batch = batch_of(examples())
    whole = whole_outcome(checkpoint, "dpo", batch)
    with streamed_model(checkpoint, gradient_checkpointing=True, objective="dpo") as model:
        draw_b(model.lora_manager)
        run = model.split.run_layer

        def scarce(
            index: int, weights: Any, call: Any, hidden: torch.Tensor, **options: Any
        ) -> torch.Tensor:
            if len(hidden) > 3 and torch.is_grad_enabled() and index == NUM_LAYERS - 1:
                raise torch.OutOfMemoryError("out of memory: pretended")
            return run(index, weights, call, hidden, **options)

        def both_ways(micro_batches: Any) -> torch.Tensor:
            loss = model.adapter.loss(micro_batches)
            loss.backward()
            return loss

        monkeypatch.setattr(model.split, "run_layer", scarce)
        parameters = list(trained(model.lora_manager).values())
        with pytest.warns(UserWarning, match="micro-batches of at most 2 rows instead of 8"):
            loss = model.adapter.retry.run_pass(both_ways, [batch], parameters=parameters)
        assert_close(Outcome.of(model.lora_manager, loss), whole)


def test_two_batches_of_a_step_count_alike_whatever_their_rows(checkpoint_of: CheckpointOf) -> None:
    """As accumulation over two batches does in a trainer: the mean of their means."""
    checkpoint = checkpoint_of("llama")
    data = examples()
    batches = [{**data.batch_of(rows, rows)} for rows in ([0, 1, 2], [3])]
    for number, batch in enumerate(batches):
        batch["example"][:, 0], batch["example"][:, 4] = number, 2
    whole = whole_model(checkpoint)
    draw_b(whole)
    loss = sum(BY_HAND["dpo"](whole, batch) for batch in batches) / 2
    loss.backward()
    with streamed_model(checkpoint, gradient_checkpointing=True, objective="dpo") as model:
        draw_b(model.lora_manager)
        assert_close(outcome(model, batches), Outcome.of(whole, loss))
