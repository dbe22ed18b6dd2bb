"""The routers' load-balancing loss trains under streaming: losses and gradients are the whole
model's, bit for bit.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from parity import (
    ALPHA,
    DRAWS,
    RANK,
    SEED,
    Outcome,
    all_gradients,
    assert_same,
    draw_b,
    relative_difference,
    streamed_model,
    streamed_step,
    whole_model,
)
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import ARCHITECTURES, Architecture, Checkpoint, micro_batches, write_checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM, OlmoeConfig, Qwen3MoeConfig

import lema as package
from lema.engine.head.cut import HeadCut
from lema.errors import ConfigError, MemoryLimitError

COEFFICIENT = 0.3  # so large that gradients without it differ in their first digits
TARGETS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
ROUTED: dict[str, Any] = {
    "qwen3_moe": tiny._config(
        Qwen3MoeConfig,
        head_dim=8,
        moe_intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
        mlp_only_layers=[2],
    ),
    "olmoe": tiny._config(OlmoeConfig, num_experts=4, num_experts_per_tok=2),
}


def checkpoint(
    name: str, directory: Path, monkeypatch: pytest.MonkeyPatch, **said: Any
) -> Checkpoint:
    """Write a model, whose config.json says what is `said`, too."""
    if name in ROUTED:
        monkeypatch.setitem(
            ARCHITECTURES, name, Architecture(ROUTED[name], targets=TARGETS, prepared=True)
        )
    written = write_checkpoint(name, directory)
    for place in {written.published, written.streamed}:
        file = place / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **said}))
    return written


def whole_step(model: PeftModel, batches: Sequence[Mapping[str, Tensor]]) -> Outcome:
    """Take a step as TRL has it: of each micro-batch its tokens' share, and of the routers'
    losses their mean.
    """
    torch.manual_seed(DRAWS)
    tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    total = torch.zeros(())
    for batch in batches:
        given = {name: tensor for name, tensor in batch.items() if name != "labels"}
        out = model(**given, output_router_logits=True)
        base = model.get_base_model()
        loss = base.loss_function(
            out.logits, batch["labels"], base.config.vocab_size, num_items_in_batch=tokens
        )
        loss = loss + COEFFICIENT * out.aux_loss / len(batches)
        loss.backward()
        total = total + loss.detach()
    return Outcome.of(model, total)


@pytest.mark.parametrize(
    ("name", "padding"), [("mixtral", True), ("qwen3_moe", True), ("olmoe", False)]
)
def test_a_step_is_that_of_the_whole_model(
    name: str, padding: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = checkpoint(name, tmp_path, monkeypatch)
    batches = micro_batches(3, padding=padding)
    whole = whole_model(written)
    draw_b(whole)
    expected = whole_step(whole, batches)
    elsewhere = {"activation_offloading": True}  # graphs that wait in host memory
    for settings in ({"gradient_checkpointing": True}, elsewhere if name == "mixtral" else {}):
        settings |= {"lora_target_modules": sorted(TARGETS), "router_aux_loss_coef": COEFFICIENT}
        with streamed_model(written, **settings) as model:
            model.get_trainer()
            draw_b(model.lora_manager)
            found = streamed_step(model, batches)
            assert found.loss == pytest.approx(float(expected.loss), rel=1e-6)
            assert_same(Outcome(expected.loss, found.gradients, found.generator), expected)


def test_a_loss_may_be_multiplied_after_it_was_formed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a power of two, so that no bit of a mantissa changes."""
    written = checkpoint("mixtral", tmp_path, monkeypatch)
    batches = micro_batches(3, padding=True)
    settings = {"lora_target_modules": sorted(TARGETS), "router_aux_loss_coef": COEFFICIENT}
    outcomes = []
    with streamed_model(written, gradient_checkpointing=True, **settings) as model:
        model.get_trainer()
        draw_b(model.lora_manager)
        for factor in (1.0, 0.25):
            loss = model.adapter.loss(batches)
            (loss * factor).backward()
            outcomes.append(Outcome.of(model.lora_manager, loss))
    first, scaled = outcomes
    expected = {name: gradient * 0.25 for name, gradient in first.gradients.items()}
    assert_same(scaled, Outcome(first.loss, expected, scaled.generator))


def test_one_batch_of_a_model_that_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In config.json, as `transformers` reads it; and 0 in the settings leaves it out."""
    said = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
    written, (batch,) = (
        checkpoint("mixtral", tmp_path, monkeypatch, **said),
        micro_batches(1, padding=True),
    )
    whole = whole_model(written)
    draw_b(whole)
    losses = []
    for settings in ({}, {"router_aux_loss_coef": 0.0}):
        whole.get_base_model().config.output_router_logits = not settings
        loss = whole(**batch).loss
        loss.backward()
        with streamed_model(written, **settings) as model:
            model.get_trainer()
            draw_b(model.lora_manager)
            found = streamed_step(model, [batch])
            expected = Outcome.of(whole, loss)
            assert_same(Outcome(found.loss, found.gradients, expected.generator), expected)
        losses.append(float(found.loss))
    assert losses[0] - losses[1] > COEFFICIENT


def test_layers_below_the_lowest_adapter_count_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = checkpoint("mixtral", tmp_path, monkeypatch)
    batches = micro_batches(2, padding=True)
    base = AutoModelForCausalLM.from_pretrained(written.published)
    base.config.use_cache = False
    torch.manual_seed(SEED)
    options = {"target_modules": ["v_proj"], "layers_to_transform": [5, 7, 11]}
    whole = get_peft_model(
        base, LoraConfig(r=RANK, lora_alpha=ALPHA, task_type="CAUSAL_LM", **options)
    ).train()
    draw_b(whole)
    settings = {f"lora_{name}": value for name, value in options.items()}
    with streamed_model(written, router_aux_loss_coef=COEFFICIENT, **settings) as model:
        model.get_trainer()
        draw_b(model.lora_manager)
        expected = whole_step(whole, batches)
        assert_same(streamed_step(model, batches), expected)
        assert model.adapter.lowest_trained == 5


def test_the_head_may_stream_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeadCut, "spans", lambda *_: ((0, 40), (40, 80), (80, 96)))
    written = checkpoint("mixtral", tmp_path, monkeypatch)
    batches = micro_batches(2, padding=True)
    whole = whole_model(written)
    draw_b(whole)
    with streamed_model(written, router_aux_loss_coef=COEFFICIENT, head="stream") as model:
        model.get_trainer()
        draw_b(model.lora_manager)
        found = streamed_step(model, batches)
        expected = whole_step(whole, batches)
    assert float(found.loss) == pytest.approx(float(expected.loss), rel=1e-6)
    assert relative_difference(all_gradients(found), all_gradients(expected)) < 1e-6


def test_it_is_measured_beside_the_loss_and_costs_no_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = checkpoint("mixtral", tmp_path, monkeypatch)
    batches = micro_batches(2, padding=True)
    whole = whole_model(written)
    uploads = []
    for settings in ({}, {"router_aux_loss_coef": COEFFICIENT}):
        with streamed_model(written, **settings) as model:
            trainer = model.get_trainer()
            result = trainer.accumulate(batches)
            uploads.append(model.adapter.counters.bytes_uploaded)
            with torch.no_grad():
                means = [
                    float(whole(**batch, output_router_logits=True).aux_loss) for batch in batches
                ]
            assert result.measured.keys() == ({"aux_loss"} if settings else set())
    total, count = result.measured["aux_loss"]
    assert total / count == pytest.approx(sum(means) / len(means), rel=1e-6)
    assert uploads[0] == uploads[1]


def test_micro_batches_are_not_made_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of smaller ones the loss is another."""
    written = checkpoint("mixtral", tmp_path, monkeypatch)
    batches = micro_batches(2, padding=True)
    with streamed_model(written, router_aux_loss_coef=COEFFICIENT) as model:
        trainer = model.get_trainer()

        def short(*_: Any, **__: Any) -> None:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")

        monkeypatch.setattr(model.split, "run_layer", short)
        with pytest.raises(MemoryLimitError, match="2 rows"):
            trainer.accumulate(batches)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"torch_compile": True}, "torch_compile"),
        ({"objective": "dpo"}, "objective: dpo"),
        ({"cache_frozen_prefix": True, "shuffle": False}, "cache_frozen_prefix"),
    ],
)
def test_what_it_cannot_be_had_with(
    settings: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = checkpoint("mixtral", tmp_path, monkeypatch)
    with (
        streamed_model(written, router_aux_loss_coef=COEFFICIENT, **settings) as model,
        pytest.raises(
            ConfigError, match=f"the loss of routers cannot be combined with {why}"
        ) as caught,
    ):
        model.get_trainer()
    assert caught.value.where == "router_aux_loss_coef"


def test_a_model_without_routers_has_no_such_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        streamed_model(
            write_checkpoint("llama", tmp_path), router_aux_loss_coef=COEFFICIENT
        ) as model,
        pytest.raises(ConfigError, match="LlamaForCausalLM has no load-balancing loss"),
    ):
        model.get_trainer()


def test_a_model_for_foreign_trainers_asks_for_it_as_its_config_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = checkpoint("mixtral", tmp_path, monkeypatch, output_router_logits=True)
    config = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    for coefficient, asked in ((None, True), (0, False)):
        made = package.streamed(
            str(written.streamed), config, device="cpu", router_aux_loss_coef=coefficient
        )
        assert bool(made.get_base_model().config.output_router_logits) == asked
        made.close()
