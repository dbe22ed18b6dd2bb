"""A pass through the layers is one function of the caller's graph, and what goes down through it is
let go of layer by layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from parity import Outcome, assert_same, draw_b, streamed_model, whole_model
from tiny import NUM_LAYERS, Checkpoint, micro_batches
from torch import Tensor

from lema import LemaModel
from lema.engine.layers.layer_pass import _UpAndDown
from lema.engine.stack import LayerStack
from lema.errors import ConfigError

CheckpointOf = Callable[..., Checkpoint]


@contextmanager
def stacked(checkpoint: Checkpoint, **options: Any) -> Iterator[tuple[LemaModel, Any]]:
    with streamed_model(checkpoint, gradient_checkpointing=True, **options) as model:
        stack = LayerStack(model.adapter)
        draw_b(model.lora_manager)
        yield model, model.lora_manager
        stack.take_out()


def passes_in(tensor: Tensor) -> int:
    """Count the passes in the graph that a tensor ends."""
    wanted = _UpAndDown._backward_cls  # type: ignore[attr-defined] # the node's class, by torch
    seen = set[Any]()
    nodes = [tensor.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
    return sum(isinstance(node, wanted) for node in seen)


def test_a_step_is_one_function_of_autograd(checkpoint_of: CheckpointOf) -> None:
    with streamed_model(checkpoint_of("llama"), gradient_checkpointing=True) as model:
        loss = model.adapter.loss(micro_batches(2, padding=True))
        assert passes_in(loss) == 1
        loss.backward()


@pytest.mark.parametrize(
    ("hooked", "num_passes"), [((), 1), ((0,), 2), ((2,), 3), ((2, 3), 4), ((NUM_LAYERS - 1,), 2)]
)
def test_a_forward_is_one_function_between_two_layers_with_hooks(
    checkpoint_of: CheckpointOf, hooked: Sequence[int], num_passes: int
) -> None:
    with stacked(checkpoint_of("llama")) as (model, called):
        for layer in hooked:
            model.split.layers[layer].register_forward_hook(lambda *_: None)
        loss = called(**micro_batches(1)[0]).loss
        assert passes_in(loss) == num_passes
        loss.backward()


def test_the_gradient_that_arrives_is_let_go_of_when_its_layer_is_done(
    checkpoint_of: CheckpointOf,
) -> None:
    with stacked(checkpoint_of("llama")) as (model, called):
        alive = list[Any]()
        num_alive = list[int]()

        def observe(_: int, gradients: Sequence[Tensor | None]) -> None:
            num_alive.append(sum(storage() is not None for storage in alive))
            alive.extend(
                weakref.ref(gradient.untyped_storage())
                for gradient in gradients
                if gradient is not None
            )

        out = called(**micro_batches(1)[0])

        def arrives(gradient: Tensor) -> Tensor:
            fresh = gradient.clone()
            alive.append(weakref.ref(fresh.untyped_storage()))
            return fresh

        hidden = _input_of_the_head(out.logits)
        hidden.register_prehook(lambda gradients: tuple(map(arrives, gradients)))
        with model.adapter.engine.observing(observe):
            out.loss.backward()
        assert num_alive == [0] * NUM_LAYERS


def _input_of_the_head(logits: Tensor) -> Any:
    """Return the node of a pass's hidden states: above it is the caller's graph."""
    wanted = _UpAndDown._backward_cls  # type: ignore[attr-defined] # the node's class, by torch
    nodes = [logits.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        following = [after for after, _ in node.next_functions]
        if any(isinstance(after, wanted) for after in following):
            return node
        nodes += following
    raise AssertionError("there is no pass in the graph")


def test_nothing_of_a_step_is_left_behind(checkpoint_of: CheckpointOf) -> None:
    """Without a collection: no circle holds a step's tensors."""
    with stacked(checkpoint_of("llama")) as (_, called):
        for _ in range(2):
            out = called(**micro_batches(1)[0])
            node = weakref.ref(_input_of_the_head(out.logits))
            out.loss.backward()
            called.zero_grad()
            del out
            assert node() is None


@pytest.mark.parametrize(
    "settings",
    [{}, {"lora_modules_to_save": ["lm_head"]}, {"lora_modules_to_save": ["embed_tokens"]}],
    ids=str,
)
def test_a_loss_may_be_multiplied_after_it_was_formed(
    checkpoint_of: CheckpointOf, settings: dict[str, Any]
) -> None:
    """Gradients are formed with the loss, and know the factor from the backward alone. By a power
    of two no bit of a mantissa changes.
    """
    batches = micro_batches(3, padding=True)
    outcomes = []
    with streamed_model(checkpoint_of("llama"), gradient_checkpointing=True, **settings) as model:
        draw_b(model.lora_manager)
        for factor in (1.0, 0.25):
            loss = model.adapter.loss(batches)
            (loss * factor).backward()
            outcomes.append(Outcome.of(model.lora_manager, loss))
    first, scaled = outcomes
    expected = {
        name: None if gradient is None else gradient * 0.25
        for name, gradient in first.gradients.items()
    }
    assert_same(scaled, Outcome(first.loss, expected, scaled.generator))


def test_a_loss_of_one_layer_s_routers_reaches_no_layer_above(checkpoint_of: CheckpointOf) -> None:
    """Their gradients are None, not zero, which an optimizer with momentum would move."""
    checkpoint = checkpoint_of("mixtral")
    (batch,) = micro_batches(1)
    reached = []
    whole = whole_model(checkpoint)
    draw_b(whole)
    with stacked(checkpoint) as (_, streamed):
        for model in (whole, streamed):
            out = model(**batch, output_router_logits=True)
            out.router_logits[1].square().sum().backward()
            reached.append(Outcome.of(model, out.loss).gradients)
    expected, found = reached
    assert {name for name, gradient in expected.items() if gradient is None}
    for name, gradient in expected.items():
        assert (found[name] is None) is (gradient is None), name
        assert gradient is None or torch.equal(found[name], gradient), name


def test_outputs_of_routers_are_let_go_of_where_a_layer_has_a_hook(
    checkpoint_of: CheckpointOf,
) -> None:
    with stacked(checkpoint_of("mixtral")) as (model, called):
        model.split.layers[2].register_forward_hook(lambda *_: None)
        for _ in range(2):
            out = called(**micro_batches(1)[0], output_router_logits=True)
            logits = weakref.ref(out.router_logits[2].untyped_storage())
            node = weakref.ref(_input_of_the_head(out.logits))
            out.loss.backward()
            called.zero_grad()
            del out
            assert logits() is None
            assert node() is None


def test_a_loss_formed_with_its_gradients_is_differentiated_once(
    checkpoint_of: CheckpointOf,
) -> None:
    with streamed_model(checkpoint_of("llama"), gradient_checkpointing=True) as model:
        loss = model.adapter.loss(micro_batches(2))
        loss.backward(retain_graph=True)
        with pytest.raises(ConfigError, match="differentiated again"):
            loss.backward()
        model.adapter.loss(micro_batches(2)).backward()
