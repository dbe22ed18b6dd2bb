"""Weights of streamed layers that train themselves get the whole model's gradients, bit for bit."""

from collections.abc import Callable, Collection

import pytest
import torch
from fulltraining import attention_of_the_last_four, everything, one_in_the_middle
from parity import DRAWS, accumulate
from tiny import NUM_LAYERS, Checkpoint, micro_batches
from torch import Tensor
from trainedways import bare_model
from transformers import AutoModelForCausalLM

from lema.engine.trained_weights import TrainedWeights
from lema.errors import ConfigError, ModelError

Gradients = dict[str, Tensor]


def whole(
    checkpoint: Checkpoint, chosen: Callable[[str], bool], count: int
) -> tuple[Tensor, Gradients]:
    """Accumulate gradients of the chosen weights on the whole model; return the loss, and them."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint.published)
    model.config.use_cache = False
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(chosen(name))
    model.train()
    torch.manual_seed(DRAWS)
    loss = accumulate(model, micro_batches(count))
    return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def streamed(
    checkpoint: Checkpoint, chosen: Callable[[str], bool], count: int, **settings: object
) -> tuple[Tensor, Gradients]:
    """Do the same streamed."""
    found: Gradients = {}
    with bare_model(checkpoint, dict(settings)) as model:
        model.skeleton.train()
        layers = f"{model.split.layers_name}."
        inside: dict[int, Collection[str]] = {
            number: [
                name for name, _ in layer.named_parameters() if chosen(f"{layers}{number}.{name}")
            ]
            for number, layer in enumerate(model.split.layers)
        }
        for name, parameter in model.skeleton.named_parameters():
            parameter.requires_grad_(not name.startswith(layers) and chosen(name))

        def done(layer: int, gradients: Gradients) -> None:
            found.update(
                {f"{layers}{layer}.{name}": gradient for name, gradient in gradients.items()}
            )

        model.adapter.train_weights(TrainedWeights(inside, done))
        torch.manual_seed(DRAWS)
        loss = model.adapter.loss(micro_batches(count))
        loss.backward()
        outside = {
            name: p.grad for name, p in model.skeleton.named_parameters() if p.grad is not None
        }
    return loss.detach(), {**found, **outside}


SELECTIONS = [everything, attention_of_the_last_four, one_in_the_middle]


def assert_same(one: tuple[Tensor, Gradients], other: tuple[Tensor, Gradients]) -> None:
    assert one[1].keys() == other[1].keys() and other[1]
    assert torch.equal(one[0].detach(), other[0])
    different = [
        name for name, gradient in other[1].items() if not torch.equal(one[1][name], gradient)
    ]
    assert not different


@pytest.mark.covered
@pytest.mark.sampled(2)
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_gradients_of_weights_are_those_of_the_whole_model(
    name: str,
    selection: Callable[[str], bool],
    count: int,
    recompute: bool,
    checkpoint_of: Callable[..., Checkpoint],
) -> None:
    checkpoint = checkpoint_of(name)
    found = streamed(checkpoint, selection, count, gradient_checkpointing=recompute)
    assert_same(found, whole(checkpoint, selection, count))


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings_train_beside_layers_or_apart(
    tied: bool, checkpoint_of: Callable[..., Checkpoint]
) -> None:
    checkpoint = checkpoint_of("llama", tied)
    found = streamed(checkpoint, everything, 2, gradient_checkpointing=True, prefetch_depth=1)
    assert_same(found, whole(checkpoint, everything, 2))


def test_experts_train_too(checkpoint_of: Callable[..., Checkpoint]) -> None:
    checkpoint = checkpoint_of("mixtral")
    found = streamed(checkpoint, everything, 2, gradient_checkpointing=True)
    expected = whole(checkpoint, everything, 2)
    assert_same(found, expected)


def test_offloaded_graphs_give_the_same(checkpoint_of: Callable[..., Checkpoint]) -> None:
    checkpoint = checkpoint_of("llama")
    expected = whole(checkpoint, everything, 4)
    assert_same(streamed(checkpoint, everything, 4, activation_offloading=True), expected)


def test_a_layer_is_done_once_and_below_the_lowest_none_is(
    checkpoint_of: Callable[..., Checkpoint],
) -> None:
    order: list[int] = []
    with bare_model(checkpoint_of("llama"), {"gradient_checkpointing": True}) as model:
        model.skeleton.requires_grad_(False)
        name = "self_attn.q_proj.weight"
        trained = TrainedWeights(
            {layer: [name] for layer in range(5, NUM_LAYERS)},
            lambda layer, gradients: order.append(layer) if gradients.keys() == {name} else None,
        )
        model.adapter.train_weights(trained)
        model.adapter.loss(micro_batches(3)).backward()
    assert order == list(range(NUM_LAYERS - 1, 4, -1))


def test_what_cannot_train_is_refused(checkpoint_of: Callable[..., Checkpoint]) -> None:
    with bare_model(checkpoint_of("llama")) as model:
        model.skeleton.requires_grad_(False)
        model.adapter.train_weights(TrainedWeights({3: ["nothing.weight"]}, lambda *_: None))
        with pytest.raises(ModelError, match=r"nothing\.weight of layer 3"):
            model.adapter.loss(micro_batches(1))
    compiled = bare_model(checkpoint_of("llama"), {"torch_compile": True})
    with compiled as model, pytest.raises(ConfigError, match="compiled"):
        model.adapter.train_weights(TrainedWeights({}, lambda *_: None))
