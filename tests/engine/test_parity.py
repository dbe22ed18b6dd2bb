"""Whatever is streamed has the numbers of the whole model: initial adapters, hidden states,
loss, every gradient.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from parity import (
    all_gradients,
    assert_same,
    draw_b,
    layers_of,
    relative_difference,
    streamed_model,
    streamed_step,
    trained,
    whole_model,
    whole_step,
)
from tiny import ARCHITECTURES, NUM_LAYERS, Checkpoint, micro_batches, wide_batch
from torch import Tensor, nn

from lema.stream.schedule import fetched, training_order

CheckpointOf = Callable[..., Checkpoint]

architectures = pytest.mark.parametrize("name", list(ARCHITECTURES))
recomputed_or_not = pytest.mark.parametrize("recompute", [True, False], ids=["recomputed", "kept"])


# What a step starts from


@pytest.mark.sampled(1)
@architectures
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_starts_with_the_values_peft_draws(
    checkpoint_of: CheckpointOf, name: str, dtype: str
) -> None:
    checkpoint = checkpoint_of(name, dtype=dtype)
    expected = trained(whole_model(checkpoint))
    # no target modules are named: every linear of a layer, as the whole's
    with streamed_model(checkpoint) as model:
        found = trained(model.lora_manager)
        assert found.keys() == expected.keys()
        for key, parameter in expected.items():
            assert found[key].dtype == torch.float32
            assert torch.equal(found[key], parameter), key
            assert bool(parameter.any()) == (".lora_A." in key)


@pytest.mark.sampled(1)
@architectures
def test_every_layer_passes_on_the_whole_models_hidden_state(
    checkpoint_of: CheckpointOf, name: str
) -> None:
    checkpoint = checkpoint_of(name)
    batches = micro_batches(2, padding=True)
    whole = whole_model(checkpoint).eval()
    draw_b(whole)
    layers = layers_of(whole, checkpoint)
    expected = [hidden_states(whole, layers, batch) for batch in batches]
    with streamed_model(checkpoint) as model, torch.no_grad():
        draw_b(model.lora_manager)
        model.lora_manager.eval()
        found = list(model.adapter.hidden_states(batches))
    assert len(found) == len(expected[0]) == NUM_LAYERS + 1
    for depth, states in enumerate(found):
        for index, state in enumerate(states):
            assert torch.equal(state, expected[index][depth]), (
                f"after {depth} layers, micro-batch {index}"
            )


def hidden_states(
    model: nn.Module, layers: nn.ModuleList, batch: dict[str, Tensor]
) -> list[Tensor]:
    states: list[Tensor] = []

    def before(layer: nn.Module, args: Any, kwargs: Any) -> None:
        states.append(args[0] if args else kwargs["hidden_states"])

    def after(layer: nn.Module, args: Any, output: Any) -> None:
        states.append(output if isinstance(output, Tensor) else output[0])

    hooks = [layers[0].register_forward_pre_hook(before, with_kwargs=True)]
    hooks += [layer.register_forward_hook(after) for layer in layers]
    with torch.no_grad():
        model(**batch)
    for hook in hooks:
        hook.remove()
    return states


# Loss and gradients


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "attention"),
    [(name, one) for name, found in ARCHITECTURES.items() for one in found.attentions],
)
def test_either_attention_streams(checkpoint_of: CheckpointOf, name: str, attention: str) -> None:
    checkpoint = checkpoint_of(name)
    batches = micro_batches(2, padding=True)
    whole = whole_model(checkpoint, attn_implementation=attention)
    draw_b(whole)
    with streamed_model(checkpoint, attn_implementation=attention) as model:
        draw_b(model.lora_manager)
        assert_same(streamed_step(model, batches), whole_step(whole, batches))


@pytest.mark.sampled(2)
@recomputed_or_not
@pytest.mark.parametrize("layers", [(0,), (3, 4), (NUM_LAYERS - 1,), (1, NUM_LAYERS - 1)], ids=str)
def test_adapters_on_some_layers_only(
    checkpoint_of: CheckpointOf, layers: tuple[int, ...], recompute: bool
) -> None:
    checkpoint = checkpoint_of("llama")
    batches = micro_batches(2)
    targets = rf".*\.layers\.({'|'.join(map(str, layers))})\.(self_attn\.q_proj|mlp\.up_proj)"
    whole = whole_model(checkpoint, targets=targets)
    draw_b(whole)
    expected = whole_step(whole, batches)
    assert len(expected.gradients) == 4 * len(layers)
    with streamed_model(
        checkpoint, lora_target_modules=targets, gradient_checkpointing=recompute
    ) as model:
        draw_b(model.lora_manager)
        before = model.memory.counters.layers_read
        assert_same(streamed_step(model, batches), expected)
        order = training_order(NUM_LAYERS, min(layers))
        assert model.memory.counters.layers_read - before == len(
            fetched(order, model.memory.num_slots)
        )


@pytest.mark.slow
@recomputed_or_not
def test_a_micro_batch_without_trained_tokens(checkpoint_of: CheckpointOf, recompute: bool) -> None:
    checkpoint = checkpoint_of("llama")
    batches = micro_batches(3)
    batches[1]["labels"].fill_(-100)
    whole = whole_model(checkpoint)
    draw_b(whole)
    with streamed_model(checkpoint, gradient_checkpointing=recompute) as model:
        draw_b(model.lora_manager)
        assert_same(streamed_step(model, batches), whole_step(whole, batches))


@pytest.mark.sampled(1)
@architectures
def test_documents_packed_in_one_row(checkpoint_of: CheckpointOf, name: str) -> None:
    checkpoint = checkpoint_of(name)
    batch = micro_batches(1)[0]
    batch["position_ids"] = torch.tensor([[*range(7), *range(5)], [*range(4), *range(8)]])
    whole = whole_model(checkpoint)
    # as transformers' Trainer trains; it sees packing only where there is no cache
    whole.config.use_cache = False
    draw_b(whole)
    expected = whole_step(whole, [batch])
    assert not torch.equal(expected.loss, whole_step(whole, micro_batches(1)).loss)
    with streamed_model(checkpoint) as model:
        draw_b(model.lora_manager)
        assert_same(streamed_step(model, [batch]), expected)


@pytest.mark.slow
@recomputed_or_not
def test_a_forward_without_its_backward_leaves_no_trace(
    checkpoint_of: CheckpointOf, recompute: bool
) -> None:
    checkpoint = checkpoint_of("llama")
    batches = micro_batches(2)
    whole = whole_model(checkpoint)
    draw_b(whole)
    with streamed_model(checkpoint, gradient_checkpointing=recompute) as model:
        draw_b(model.lora_manager)
        model.adapter.loss(micro_batches(1))
        assert_same(streamed_step(model, batches), whole_step(whole, batches))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "chunk"), [("llama", 1), *product(ARCHITECTURES, (5, 30))])
def test_a_loss_in_chunks_agrees_to_rounding(
    checkpoint_of: CheckpointOf, name: str, chunk: int
) -> None:
    checkpoint = checkpoint_of(name)
    batches = [wide_batch()]
    whole = whole_model(checkpoint)
    draw_b(whole)
    expected = whole_step(whole, batches)
    with streamed_model(checkpoint, loss_chunk_tokens=chunk) as model:
        draw_b(model.lora_manager)
        found = streamed_step(model, batches)
    assert found.gradients.keys() == expected.gradients.keys()
    assert relative_difference(found.loss, expected.loss) < 1e-6
    assert relative_difference(all_gradients(found), all_gradients(expected)) < 1e-6


# Half precision


@pytest.mark.sampled(1)
@architectures
@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
def test_bfloat16_weights_with_float32_adapters(
    checkpoint_of: CheckpointOf, name: str, stored: str
) -> None:
    """No tolerance: the same casts of the same values in the same order, whole or streamed."""
    checkpoint = checkpoint_of(name, dtype=stored)
    batches = micro_batches(2, padding=True)
    whole = whole_model(checkpoint, dtype=torch.bfloat16)
    draw_b(whole)
    expected = whole_step(whole, batches, autocast=torch.bfloat16)
    with streamed_model(
        checkpoint, dtype="bfloat16", gradient_checkpointing=stored == "float32"
    ) as model:
        draw_b(model.lora_manager)
        assert_same(streamed_step(model, batches), expected)
