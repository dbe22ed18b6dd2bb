"""Ways to differentiate a streamed model: `torch.autograd.grad`, a graph that is kept, some
inputs alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import VOCABULARY, Checkpoint
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import lema
from lema.errors import ConfigError

CheckpointOf = Callable[..., Checkpoint]
pytestmark = pytest.mark.filterwarnings("ignore:gradients are accumulated")
Gradients = dict[str, Tensor | None]
IDS = torch.randint(3, VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(5))
WAYS: list[dict[str, Any]] = [
    {},
    {"gradient_checkpointing": False},
    {"boundary_activations": "host"},
    {"boundary_activations": "disk"},
    {"gradient_checkpointing": False, "activation_offloading": "disk"},
]


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(
        r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM", **options
    )


def whole(checkpoint: Checkpoint, **options: Any) -> Any:
    base = AutoModelForCausalLM.from_pretrained(checkpoint.published)
    torch.manual_seed(1)
    return get_peft_model(base, lora(**options)).train()


def streamed(checkpoint: Checkpoint, adapter: dict[str, Any] | None = None, **options: Any) -> Any:
    return lema.streamed(
        checkpoint.streamed, lora(**(adapter or {})), device="cpu", seed=1, **options
    ).train()


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: one for name, one in model.named_parameters() if one.requires_grad}


def loss_of(model: Any, ids: Tensor = IDS) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def asked(model: Any, loss: Tensor, **options: Any) -> Gradients:
    parameters = trained(model)
    return dict(
        zip(parameters, torch.autograd.grad(loss, [*parameters.values()], **options), strict=True)
    )


def added(model: nn.Module) -> Gradients:
    return {name: one.grad for name, one in trained(model).items()}


def assert_same(found: Gradients, expected: Gradients) -> None:
    assert found.keys() == expected.keys() and any(one is not None for one in expected.values())
    for name, one in expected.items():
        other = found[name]
        assert one is other is None or (
            one is not None and other is not None and torch.equal(one, other)
        ), name


@pytest.mark.parametrize("settings", WAYS, ids=str)
def test_gradients_that_are_asked_for_are_returned(
    checkpoint_of: CheckpointOf, settings: dict[str, Any], tmp_path: Path
) -> None:
    """And `.grad` stays as it was; afterwards a backward adds to it."""
    checkpoint = checkpoint_of("llama")
    outcomes = []
    for model in (whole(checkpoint), streamed(checkpoint, offload_dir=str(tmp_path), **settings)):
        loss_of(model).backward()
        before = {name: None if one is None else one.clone() for name, one in added(model).items()}
        loss = loss_of(model, IDS.flip(0))
        found = asked(model, loss, retain_graph=True)
        assert_same(added(model), before)
        loss.backward()
        outcomes.append((found, added(model)))
    for one, other in zip(outcomes[1], outcomes[0], strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("settings", WAYS, ids=str)
def test_a_graph_that_is_kept_is_differentiated_again(
    checkpoint_of: CheckpointOf, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Also when another step has come between."""
    checkpoint = checkpoint_of("llama")
    outcomes = []
    for model in (whole(checkpoint), streamed(checkpoint, offload_dir=str(tmp_path), **settings)):
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        loss_of(model, IDS.flip(0)).backward()
        loss.backward(retain_graph=True)
        loss.backward()
        outcomes.append(added(model))
    assert_same(outcomes[1], outcomes[0])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    loss_of(model).backward()


def test_a_layer_whose_graph_was_freed_says_so(checkpoint_of: CheckpointOf) -> None:
    """A probe of a hook is differentiated by itself, from its layer downwards."""
    checkpoint = checkpoint_of("llama")
    outcomes = []
    for model in (whole(checkpoint), streamed(checkpoint)):
        probed = list[Tensor]()
        layer = next(one for name, one in model.named_modules() if name.endswith("layers.2"))
        layer.register_forward_hook(lambda *given, to=probed: to.append(given[-1]))
        loss_of(model)
        for kept in (True, False):
            probed[0].sum().backward(retain_graph=kept)
        outcomes.append(added(model))
    assert_same(outcomes[1], outcomes[0])
    with pytest.raises(
        ConfigError, match="differentiated again, and it was freed by an earlier backward"
    ):
        probed[0].sum().backward()


def test_micro_batches_are_added_up_one_after_the_other(checkpoint_of: CheckpointOf) -> None:
    checkpoint = checkpoint_of("llama")
    outcomes = []
    for model, parts in (
        (whole(checkpoint), IDS.split(2)),
        (streamed(checkpoint, micro_batch_size=2), [IDS]),
    ):
        found: Gradients = dict.fromkeys(trained(model))
        for part in parts:
            logits = model(input_ids=part).logits
            for name, one in asked(model, logits.square().sum()).items():
                so_far = found[name]
                found[name] = one if so_far is None or one is None else so_far + one
        outcomes.append(found)
    assert_same(outcomes[1], outcomes[0])


@pytest.mark.parametrize(
    "adapter", [{"modules_to_save": ["embed_tokens"]}, {"modules_to_save": ["lm_head"]}], ids=str
)
def test_what_trains_around_the_layers_is_asked_for_too(
    checkpoint_of: CheckpointOf, adapter: dict[str, Any]
) -> None:
    checkpoint = checkpoint_of("llama")
    outcomes = []
    for model in (whole(checkpoint, **adapter), streamed(checkpoint, adapter)):
        loss = loss_of(model)
        found = asked(model, loss, retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        outcomes.append((found, added(model)))
    for one, other in zip(outcomes[1], outcomes[0], strict=True):
        assert_same(one, other)


def test_some_inputs_alone(checkpoint_of: CheckpointOf) -> None:
    """Of embeddings that are given, and of one adapter; nothing is added to the others' `.grad`."""
    checkpoint = checkpoint_of("llama")
    outcomes = []
    for model in (whole(checkpoint), streamed(checkpoint)):
        embeds = model.get_input_embeddings()(IDS).detach().requires_grad_()
        (by_embeds,) = torch.autograd.grad(model(inputs_embeds=embeds, labels=IDS).loss, [embeds])
        assert not [name for name, one in added(model).items() if one is not None]
        name, one = next((name, one) for name, one in trained(model).items() if "layers.2" in name)
        loss_of(model).backward(inputs=[one])
        outcomes.append(({"embeds": by_embeds}, added(model)))
        assert [other for other, gradient in added(model).items() if gradient is not None] == [name]
    for found, expected in zip(outcomes[1], outcomes[0], strict=True):
        assert_same(found, expected)


def test_experts_that_are_leased_in_groups(checkpoint_of: CheckpointOf) -> None:
    checkpoint = checkpoint_of("mixtral")
    outcomes = []
    for options in ({}, {"experts_per_slot": 2}):
        model = streamed(checkpoint, {"target_parameters": ["experts.down_proj"]}, **options)
        loss = loss_of(model)
        found = asked(model, loss, retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        outcomes.append((found, added(model)))
    for one, other in zip(outcomes[1], outcomes[0], strict=True):
        for name, gradient in other.items():
            torch.testing.assert_close(one[name], gradient, rtol=1e-4, atol=1e-6)
    for name, gradient in outcomes[1][0].items():
        torch.testing.assert_close(outcomes[1][1][name], 2 * gradient, rtol=1e-5, atol=1e-7)


def test_gradients_of_gradients_are_refused(checkpoint_of: CheckpointOf) -> None:
    model = streamed(checkpoint_of("llama"))
    loss = loss_of(model)
    with pytest.raises(ConfigError, match="derivatives of gradients are asked for"):
        asked(model, loss, create_graph=True)


def test_hooks_of_parameters_see_gradients_only(checkpoint_of: CheckpointOf) -> None:
    model = streamed(checkpoint_of("llama"))
    seen = list[Any]()
    one = next(iter(trained(model).values()))
    one.register_hook(seen.append)
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    assert len(seen) == 1 and torch.equal(seen[0], one.grad)
    with pytest.raises(ConfigError, match="hooks on parameters that train"):
        asked(model, loss)


@pytest.mark.parametrize(
    "settings", [{}, {"gradient_checkpointing": False}, {"micro_batch_size": 2}], ids=str
)
def test_adapters_that_changed_after_the_forward_are_seen(
    checkpoint_of: CheckpointOf, settings: dict[str, Any]
) -> None:
    model = streamed(checkpoint_of("llama"), **settings)
    loss = loss_of(model)
    with torch.no_grad():
        next(iter(trained(model).values())).mul_(2)
    with pytest.raises(ConfigError, match="values of the adapters changed"):
        loss.backward()
    loss_of(model).backward()
    model.close()
