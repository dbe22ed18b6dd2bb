"""Hooks that a user registers on the modules of a streamed model see what they see of the whole
model, as often.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from everytype import write_model
from peft import LoraConfig, get_peft_model
from tiny import NUM_LAYERS, VOCABULARY, Checkpoint
from tinyconfig import tiny_config
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import lema
from lema.errors import ConfigError

CheckpointOf = Callable[..., Checkpoint]
Register = Callable[[Any], Any]
IDS = torch.randint(3, VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(5))
LAYERS = ["layers.0", "layers.2", f"layers.{NUM_LAYERS - 1}"]
AROUND = ["embed_tokens", "model.norm", "lm_head"]


def lora(**options: Any) -> LoraConfig:
    usual = {"target_modules": "all-linear", "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    return LoraConfig(r=4, **{**usual, **options})


def whole(checkpoint: Checkpoint) -> Any:
    base = AutoModelForCausalLM.from_pretrained(checkpoint.published)
    torch.manual_seed(1)
    return get_peft_model(base, lora()).train()


def streamed(checkpoint: Checkpoint, **options: Any) -> Any:
    return lema.streamed(checkpoint.streamed, lora(), device="cpu", seed=1, **options).train()


def part(model: Any, target: str) -> nn.Module:
    return next(one for name, one in model.named_modules() if name.endswith(target))


def step(
    model: Any, *, before_backward: Callable[[], None] = lambda: None
) -> tuple[Tensor, dict[str, Tensor]]:
    out = model(input_ids=IDS, labels=IDS)
    before_backward()
    out.loss.backward()
    found = {name: one.grad for name, one in model.named_parameters() if one.requires_grad}
    return out.logits.detach(), found


def assert_same(
    found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]
) -> None:
    assert torch.equal(found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert torch.equal(found[1][name], gradient), name


def first(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value


def with_first(value: Any, other: Tensor) -> Any:
    return (other, *value[1:]) if isinstance(value, tuple) else other


@pytest.mark.parametrize("recomputed", [True, False])
@pytest.mark.parametrize("target", [*LAYERS, *AROUND, "layers.2.mlp"])
def test_a_forward_hook_fires_once_and_what_it_returns_counts(
    checkpoint_of: CheckpointOf, target: str, recomputed: bool
) -> None:
    """The first forward included, in which a streamed model learns what its layers return."""
    checkpoint = checkpoint_of("llama")
    outcomes = []
    for model in (whole(checkpoint), streamed(checkpoint, gradient_checkpointing=recomputed)):
        seen: list[Tensor] = []

        def change(_: nn.Module, __: Any, out: Any, seen: list[Tensor] = seen) -> Any:
            seen.append(first(out).detach().clone())
            return with_first(out, first(out) * 1.5 + 0.1)

        part(model, target).register_forward_hook(change)
        outcomes.append((step(model), seen))
    (expected, true), (found, fired) = outcomes
    assert_same(found, expected)
    again = recomputed and target == "layers.2.mlp"  # as under gradient checkpointing
    assert len(fired) == (2 if again else 1)
    assert all(torch.equal(one, true[0]) for one in fired)


@pytest.mark.parametrize("target", LAYERS)
def test_a_hook_before_the_forward_may_change_what_a_layer_is_given(
    checkpoint_of: CheckpointOf, target: str
) -> None:
    checkpoint = checkpoint_of("llama")
    outcomes = []
    for model in (whole(checkpoint), streamed(checkpoint)):
        seen: list[Any] = []

        def change(_: nn.Module, args: Any, kwargs: Any, seen: list[Any] = seen) -> Any:
            seen.append((args[0].detach().clone(), sorted(kwargs)))
            return (args[0] * 1.5, *args[1:]), {
                **kwargs,
                "position_embeddings": kwargs["position_embeddings"][::-1],
            }

        part(model, target).register_forward_pre_hook(change, with_kwargs=True)
        outcomes.append((step(model), seen))
    (expected, true), (found, fired) = outcomes
    assert_same(found, expected)
    assert len(fired) == len(true) == 1
    assert torch.equal(fired[0][0], true[0][0])


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("target", LAYERS)
def test_a_backward_hook_sees_the_gradients_once_and_may_change_them(
    checkpoint_of: CheckpointOf, target: str
) -> None:
    checkpoint = checkpoint_of("llama")
    outcomes = []
    for model in (whole(checkpoint), streamed(checkpoint)):
        seen: list[Any] = []

        def change(_: nn.Module, given: Any, made: Any, seen: list[Any] = seen) -> Any:
            seen.append([None if one is None else one.clone() for one in (*given, *made)])
            return None if given[0] is None else (given[0] * 0.5, *given[1:])

        part(model, target).register_full_backward_hook(change)
        part(model, target).register_full_backward_pre_hook(
            lambda _, made: (made[0] * 2, *made[1:])
        )
        outcomes.append((step(model), seen))
    (expected, true), (found, fired) = outcomes
    assert_same(found, expected)
    assert len(fired) == len(true) == 1
    for one, other in zip(fired[0], true[0], strict=True):
        assert one is other is None or torch.equal(one, other)


def test_what_a_hook_trains_gets_its_gradient(checkpoint_of: CheckpointOf) -> None:
    """A steering vector that is added to a layer's output, and a loss that is formed of another
    layer's.
    """
    checkpoint = checkpoint_of("llama")
    vectors = []
    for model in (whole(checkpoint), streamed(checkpoint)):
        vector = nn.Parameter(torch.full((model.config.hidden_size,), 0.1))
        probed = list[Tensor]()

        def steer(_: nn.Module, __: Any, out: Any, vector: Tensor = vector) -> Any:
            return with_first(out, first(out) + vector)

        def probe(_: nn.Module, __: Any, out: Any, probed: list[Tensor] = probed) -> None:
            probed.append(first(out).square().mean())

        part(model, "layers.1").register_forward_hook(steer)
        part(model, "layers.2").register_forward_hook(probe)
        loss = model(input_ids=IDS, labels=IDS).loss + sum(probed)
        loss.backward()
        vectors.append(
            (vector.grad, {name: p.grad for name, p in model.named_parameters() if p.requires_grad})
        )
    (true, expected), (found, gradients) = vectors
    assert torch.equal(found, true)
    assert all(torch.equal(gradients[name], one) for name, one in expected.items())


def test_a_hook_inside_a_layer_is_there_in_the_recomputation(checkpoint_of: CheckpointOf) -> None:
    """It may be gone when the backward begins, and another one may have come."""
    checkpoint = checkpoint_of("llama")
    outcomes = []
    for model in (whole(checkpoint), streamed(checkpoint)):
        mlp = part(model, "layers.2.mlp")
        handle = mlp.register_forward_hook(lambda _, __, out: out * 1.5)

        def removed(handle: Any = handle, mlp: nn.Module = mlp) -> None:
            handle.remove()
            mlp.register_forward_hook(lambda *_: pytest.fail("it was not there in the forward"))

        outcomes.append(step(model, before_backward=removed))
    assert_same(outcomes[1], outcomes[0])


def test_each_micro_batch_comes_by_once(checkpoint_of: CheckpointOf) -> None:
    fired: dict[str, list[Any]] = {target: [] for target in (*LAYERS, *AROUND)}
    model = streamed(checkpoint_of("llama"), micro_batch_size=2)
    for target, seen in fired.items():
        part(model, target).register_forward_hook(
            lambda _, __, out, seen=seen: seen.append(len(first(out)))
        )
    step(model)
    cut = [2, 2]
    assert fired == {
        **dict.fromkeys([*LAYERS, "embed_tokens"], cut),
        "model.norm": [4],
        "lm_head": [4],
    }


def test_hooks_fire_once_for_every_token(checkpoint_of: CheckpointOf) -> None:
    checkpoint = checkpoint_of("llama")
    outcomes = []
    for model in (whole(checkpoint), streamed(checkpoint)):
        fired: list[Tensor] = []

        def change(_: nn.Module, __: Any, out: Any, fired: list[Tensor] = fired) -> Any:
            fired.append(first(out).clone())
            return with_first(out, -first(out))

        part(model, "layers.2").register_forward_hook(change)
        made = model.eval().generate(
            input_ids=IDS, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        outcomes.append((made, fired))
    (expected, true), (found, fired) = outcomes
    assert torch.equal(found, expected)
    assert len(fired) == len(true) == 4
    assert all(torch.equal(one, other) for one, other in zip(fired, true, strict=True))


def test_hooks_that_cannot_be_kept_are_refused_by_name(checkpoint_of: CheckpointOf) -> None:
    model = streamed(checkpoint_of("llama"))
    handle = part(model, "layers.2").register_backward_hook(lambda *_: None)
    with pytest.raises(ConfigError, match=r"(?s)register_backward_hook sees.*layers\.2"):
        model(input_ids=IDS)
    handle.remove()
    model(input_ids=IDS)


def test_hooks_below_all_adapters_train_nothing(checkpoint_of: CheckpointOf) -> None:
    adapter = lora(target_modules=["q_proj"], layers_to_transform=[2, 3])
    model = lema.streamed(checkpoint_of("llama").streamed, adapter, device="cpu").train()
    vector = nn.Parameter(torch.zeros(model.config.hidden_size))
    handle = part(model, "layers.1").register_forward_hook(
        lambda _, __, out: with_first(out, first(out) + vector)
    )
    with pytest.raises(
        ConfigError, match=r"(?s)trains something below the lowest layer.*layers\.1"
    ):
        model(input_ids=IDS)
    with torch.no_grad():
        model(input_ids=IDS)
    handle.remove()
    part(model, "layers.2").register_forward_hook(
        lambda _, __, out: with_first(out, first(out) + vector)
    )
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert vector.grad is not None


def test_layers_that_hand_on_more_than_the_hidden_state_refuse_hooks(tmp_path: Path) -> None:
    directory = write_model(tiny_config("gemma3n_text"), tmp_path / "published")
    model = lema.streamed(directory, lora(), device="cpu")
    part(model, "layers.1").register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigError, match=r"(?s)the layers of this model hand more.*layers\.1"):
        model(input_ids=IDS)


def test_lemas_own_training_refuses_hooks_of_layers(checkpoint_of: CheckpointOf) -> None:
    model = streamed(checkpoint_of("llama"))
    part(model, "layers.1").register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigError, match=r"(?s)LEMA's own training.*layers\.1"):
        model.opened.adapter.loss([{"input_ids": IDS, "labels": IDS}])


@pytest.mark.parametrize("rows", [None, 2])
def test_an_adapter_for_each_row(checkpoint_of: CheckpointOf, rows: int | None) -> None:
    """PEFT tells modules the names by hooks that are gone when the backward begins."""
    checkpoint = checkpoint_of("llama")
    outcomes = []
    names = ["default", "other", "__base__", "default"]
    for model in (whole(checkpoint), streamed(checkpoint, micro_batch_size=rows)):
        torch.manual_seed(2)
        model.add_adapter("other", lora())
        model.eval()
        # the whole model takes the micro-batches one by one
        cut = rows is not None and not outcomes
        logits = []
        for own in [slice(2), slice(2, 4)] if cut else [slice(4)]:
            out = model(input_ids=IDS[own], adapter_names=names[own])
            out.logits.square().sum().backward()
            logits.append(out.logits.detach())
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        outcomes.append((torch.cat(logits), gradients))
    assert outcomes[0][1]
    assert_same(outcomes[1], outcomes[0])
