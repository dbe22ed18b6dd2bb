"""Preference losses that continue from an adapter compare with that adapter, as the whole model
with PEFT does.

There it is a second adapter, `ref`, loaded from the same files and frozen, as TRL 1.16 has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import Outcome, all_gradients, assert_same, draw_b, relative_difference, trained
from peft import LoraConfig, PeftModel, get_peft_model
from preferences import BY_HAND, batch_of, examples, parts_of, sums
from tiny import NUM_LAYERS, Checkpoint
from torch import nn
from transformers import AutoModelForCausalLM

from lema import LemaConfig, LemaModel
from lema.errors import LemaError
from lema.lora.files import with_adapter
from lema.plan.blueprint import draw_up
from lema_cpu import CpuBackend

CheckpointOf = Callable[..., Checkpoint]
WITHIN = 2e-6  # as in test_objectives.py
KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "rslora on two layers": {"use_rslora": True, "layers_to_transform": [7, 9]},
    "head": {"modules_to_save": ["lm_head"]},
    "embeddings and head": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "rows of embeddings": {"trainable_token_indices": [4, 9, 30]},
    "embeddings adapted": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
}


def base_of(checkpoint: Checkpoint) -> Any:
    base = AutoModelForCausalLM.from_pretrained(checkpoint.published)
    base.config.use_cache = False
    return base


def supervised(checkpoint: Checkpoint, directory: Path, **options: Any) -> Path:
    """Write an adapter that has learnt something, and is not the base."""
    torch.manual_seed(5)
    targets = sorted(checkpoint.architecture.targets)
    config = LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": targets, "task_type": "CAUSAL_LM"} | options
    )
    model = get_peft_model(base_of(checkpoint), config)
    draw_b(model)
    moved(model, seed=8)
    model.save_pretrained(str(directory), save_embedding_layers=False)
    return directory


def moved(model: nn.Module, seed: int = 9) -> None:
    """Move what trains away from where it is, so that the reference is another model."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(trained(model).items()):
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.03)


def whole_with_reference(checkpoint: Checkpoint, adapter: Path) -> PeftModel:
    model = PeftModel.from_pretrained(base_of(checkpoint), str(adapter), is_trainable=True)
    model.load_adapter(str(adapter), adapter_name="ref")
    return model.train()


@contextmanager
def begun(checkpoint: Checkpoint, adapter: Path, **settings: Any) -> Iterator[LemaModel]:
    """Open the model for streaming, with the saved adapter, in training mode."""
    streams: dict[str, Any] = {
        "device": "cpu",
        "save_steps": 0,
        "device_memory": None,
        "gradient_checkpointing": True,
    }
    config = LemaConfig(
        str(checkpoint.streamed), adapter_name_or_path=str(adapter), **(streams | settings)
    )
    model = LemaModel(config, backend=CpuBackend(poison=True))
    try:
        model.initialize_lora()
        model.lora_manager.train()
        yield model
    finally:
        model.close()


def assert_close(streamed: Outcome, whole: Outcome) -> None:
    assert streamed.gradients.keys() == whole.gradients.keys()
    assert float(streamed.loss) == pytest.approx(float(whole.loss), rel=WITHIN, abs=1e-7)
    assert relative_difference(all_gradients(streamed), all_gradients(whole)) < WITHIN
    for name, gradient in streamed.gradients.items():
        other = whole.gradients[name]
        assert gradient is not None
        assert other is not None
        assert relative_difference(gradient, other) < 10 * WITHIN, name


@pytest.mark.covered(4)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_peft_with_a_second_adapter(
    checkpoint_of: CheckpointOf, kind: str, tmp_path: Path
) -> None:
    checkpoint = checkpoint_of("llama")
    adapter = supervised(checkpoint, tmp_path / "supervised", **KINDS[kind])
    for objective in ("dpo", "kto"):
        batch = batch_of(examples(labelled=objective == "kto"))
        whole = whole_with_reference(checkpoint, adapter)
        with begun(checkpoint, adapter, objective=objective) as model:
            for step in range(3):
                loss = BY_HAND[objective](whole, batch)
                loss.backward()
                found = model.adapter.loss(parts_of(batch, 3, 5))
                found.backward()
                if step == 0 and objective == "dpo":
                    assert float(found.detach()) == pytest.approx(0.6931471805599453, abs=1e-7)
                assert_close(Outcome.of(model.lora_manager, found), Outcome.of(whole, loss))
                for one in (whole, model.lora_manager):
                    moved(one, seed=step)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_checkpointing": False},
        {"boundary_activations": "host", "loss_chunk_tokens": 7},
        {"strategy": "resident", "activation_offloading": "disk"},
        {"arithmetic": "fast"},
    ],
    ids=lambda one: "-".join(sorted(one)),
)
def test_memory_settings_change_no_number(
    checkpoint_of: CheckpointOf, settings: dict[str, Any], tmp_path: Path
) -> None:
    checkpoint = checkpoint_of("qwen3")
    batch = batch_of(examples())
    adapter = supervised(checkpoint, tmp_path / "supervised")
    whole = whole_with_reference(checkpoint, adapter)
    moved(whole)
    loss = BY_HAND["dpo"](whole, batch)
    loss.backward()
    with begun(checkpoint, adapter, objective="dpo", **settings) as model:
        moved(model.lora_manager)
        found = model.adapter.loss(parts_of(batch, 4, 4))
        found.backward()
        assert_close(Outcome.of(model.lora_manager, found), Outcome.of(whole, loss))


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["dpo", "kto"])
@pytest.mark.parametrize("recompute", [True, False], ids=["recomputed", "kept"])
def test_compiled_layers_compare_with_the_same_adapter(
    checkpoint_of: CheckpointOf,
    objective: str,
    recompute: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # torch's own kernels, which make the same bits
    monkeypatch.setattr("lema.model.layers.compiled.COMPILER", "aot_eager")
    checkpoint = checkpoint_of("llama")
    batch = batch_of(examples(labelled=objective == "kto"))
    adapter = supervised(checkpoint, tmp_path / "supervised")
    outcomes = []
    settings = {"objective": objective, "gradient_checkpointing": recompute}
    for compiled in (False, True):
        torch.compiler.reset()
        with begun(checkpoint, adapter, torch_compile=compiled, **settings) as model:
            moved(model.lora_manager)
            found = model.adapter.loss(parts_of(batch, 4, 4))
            found.backward()
            outcomes.append(Outcome.of(model.lora_manager, found))
    torch.compiler.reset()
    plain, traced = outcomes
    assert_same(traced, plain)
    assert len(model.split.compiled.kinds) == NUM_LAYERS
    whole = whole_with_reference(checkpoint, adapter)
    moved(whole)
    loss = BY_HAND[objective](whole, batch)
    loss.backward()
    assert_close(traced, Outcome.of(whole, loss))


def test_reference_base_compares_with_the_model_without_adapters(
    checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    checkpoint = checkpoint_of("llama")
    batch = batch_of(examples())
    adapter = supervised(checkpoint, tmp_path / "supervised")
    whole = PeftModel.from_pretrained(base_of(checkpoint), str(adapter), is_trainable=True).train()
    loss = BY_HAND["dpo"](whole, batch)
    loss.backward()
    with begun(checkpoint, adapter, objective="dpo", reference="base") as model:
        assert model.reference is None
        found = model.adapter.loss([batch])
        found.backward()
        assert_close(Outcome.of(model.lora_manager, found), Outcome.of(whole, loss))
    assert abs(float(loss.detach()) - 0.6931471805599453) > 1e-3


def test_trained_biases_can_be_compared_with_what_they_were(
    checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    """PEFT has no second adapter with biases, so the reference is a second model."""
    checkpoint = checkpoint_of("gpt2")
    batch = batch_of(examples())
    adapter = supervised(checkpoint, tmp_path / "supervised", bias="lora_only", fan_in_fan_out=True)
    whole, other = (
        PeftModel.from_pretrained(base_of(checkpoint), str(adapter), is_trainable=True)
        for _ in range(2)
    )
    moved(whole)
    with torch.no_grad():
        reference = sums(other, batch)
    ratios = sums(whole, batch) - reference
    loss = -torch.nn.functional.logsigmoid(0.1 * (ratios[::2] - ratios[1::2])).mean()
    loss.backward()
    with begun(checkpoint, adapter, objective="dpo") as model:
        moved(model.lora_manager)
        found = model.adapter.loss([batch])
        found.backward()
        assert any(name.endswith(".bias") for name in trained(model.lora_manager))
        assert_close(Outcome.of(model.lora_manager, found), Outcome.of(whole, loss))
    with pytest.raises(LemaError, match="trained biases cannot be undone"):
        LemaModel(
            LemaConfig(
                str(checkpoint.streamed),
                adapter_name_or_path=str(adapter),
                device="cpu",
                objective="dpo",
                reference="base",
            )
        )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("objective", ["kto", "dpo"])
def test_no_byte_of_a_weight_is_read_for_the_adapter_of_the_reference(
    checkpoint_of: CheckpointOf, objective: str, tmp_path: Path
) -> None:
    checkpoint = checkpoint_of("llama")
    batch = batch_of(examples(labelled=objective == "kto"))
    adapter = supervised(checkpoint, tmp_path / "supervised")
    costs = []
    for chosen in ("sft", objective):
        with begun(checkpoint, adapter, objective=chosen) as model:
            for _ in range(2):  # the first step finds nothing kept from a step before
                before = model.memory.counters
                model.adapter.loss(parts_of(batch, 4, 4)).backward()
            after = model.memory.counters
        names = ("bytes_read", "bytes_uploaded", "leases")
        costs.append([getattr(after, name) - getattr(before, name) for name in names])
    assert costs[0] == costs[1]
    assert costs[0][2] == 2 * NUM_LAYERS - 1


def test_the_reference_is_frozen_and_in_the_plan(
    checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    checkpoint = checkpoint_of("llama")
    batch = batch_of(examples())
    adapter = supervised(checkpoint, tmp_path / "supervised")
    planned = {}
    for reference in ("base", "adapter"):
        settings = {"objective": "dpo", "reference": reference}
        with begun(checkpoint, adapter, **settings) as model:
            of_training = model.planner.demand().adapter_bytes
            config = LemaConfig(
                str(checkpoint.streamed),
                device="cpu",
                adapter_name_or_path=str(adapter),
                **settings,
            )
            drawn = draw_up(with_adapter(config))
            assert drawn.adapter_bytes + drawn.reference_bytes == of_training
            assert drawn.checkpoint_bytes == model.planner.blueprint.checkpoint_bytes
            planned[reference] = of_training, drawn.checkpoint_bytes
            if model.reference is None:
                continue
            before = [one.clone() for one in model.reference.values()]
            model.get_trainer().train_step(batch)
            assert all(one.grad is None for one in model.reference.values())
            assert all(map(torch.equal, before, model.reference.values()))
            assert not all(map(torch.equal, before, trained(model.lora_manager).values()))
            values = sum(one.nbytes for one in trained(model.lora_manager).values())
            assert model.reference.nbytes == values
    assert [
        more - less for less, more in zip(planned["base"], planned["adapter"], strict=True)
    ] == [values, values]
