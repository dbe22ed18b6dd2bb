"""The comparison can fail: faults that should be seen are seen."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from parity import (
    Outcome,
    assert_same,
    draw_b,
    layers_of,
    streamed_model,
    streamed_step,
    trained,
    whole_model,
    whole_step,
)
from tiny import Checkpoint, micro_batches
from torch import nn
from transformers import AutoModelForCausalLM

CheckpointOf = Callable[..., Checkpoint]


@pytest.fixture
def expected(checkpoint_of: CheckpointOf) -> Outcome:
    whole = whole_model(checkpoint_of("llama"))
    draw_b(whole)
    return whole_step(whole, micro_batches(1))


@pytest.mark.slow
def test_two_layers_changed_over_on_disk_are_seen(
    checkpoint_of: CheckpointOf, expected: Outcome, tmp_path: Path
) -> None:
    checkpoint = checkpoint_of("llama")
    model = AutoModelForCausalLM.from_pretrained(checkpoint.published)
    layers = model.model.layers
    layers[2], layers[5] = layers[5], layers[2]
    model.save_pretrained(tmp_path, max_shard_size="150KB")
    found = streamed_outcome(replace(checkpoint, streamed=tmp_path))
    assert not torch.equal(found.loss, expected.loss)
    with pytest.raises(AssertionError, match=r"^loss"):
        assert_same(found, expected)


@pytest.mark.slow
def test_the_lowest_bit_of_one_weight_is_seen(
    checkpoint_of: CheckpointOf, expected: Outcome, tmp_path: Path
) -> None:
    checkpoint = checkpoint_of("llama")
    shutil.copytree(checkpoint.published, tmp_path / "copy")
    copy = replace(checkpoint, streamed=tmp_path / "copy")
    assert_same(streamed_outcome(copy), expected)
    with streamed_model(copy) as model:
        record = model.gbi["model.layers.7.mlp.up_proj.weight"]
    with record.file.open("r+b") as file:
        file.seek(record.offset)
        byte = file.read(1)[0]
        file.seek(record.offset)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(AssertionError, match=r"^loss|gradients differ"):
        assert_same(streamed_outcome(copy), expected)


def test_adapters_of_two_layers_changed_over_are_seen(
    checkpoint_of: CheckpointOf, expected: Outcome
) -> None:
    def change_over(adapters: dict[str, nn.Parameter]) -> None:
        for key, parameter in adapters.items():
            if ".layers.2." in key:
                other = adapters[key.replace(".layers.2.", ".layers.5.")]
                parameter.data, other.data = other.data, parameter.data

    with pytest.raises(AssertionError, match=r"^loss"):
        assert_same(streamed_outcome(checkpoint_of("llama"), change_over), expected)


def test_dropout_drawn_in_another_order_is_seen(checkpoint_of: CheckpointOf) -> None:
    """At several micro-batches a plain loop draws in another order: states must be given, and
    the right ones.
    """
    checkpoint = checkpoint_of("llama", dropout=0.1)
    batches = micro_batches(2)
    whole = whole_model(checkpoint, dropout=0.1)
    draw_b(whole)
    with streamed_model(checkpoint, lora_dropout=0.1) as model:
        draw_b(model.lora_manager)
        found = streamed_step(model, batches)
    assert_same(found, whole_step(whole, batches, layer_major=layers_of(whole, checkpoint)))
    with pytest.raises(AssertionError, match=r"^loss"):
        assert_same(found, whole_step(whole, batches))


def streamed_outcome(
    checkpoint: Checkpoint, change: Callable[[dict[str, nn.Parameter]], None] | None = None
) -> Outcome:
    with streamed_model(checkpoint) as model:
        draw_b(model.lora_manager)
        if change is not None:
            change(trained(model.lora_manager))
        return streamed_step(model, micro_batches(1))


def test_the_smallest_difference_of_one_gradient_is_seen(expected: Outcome) -> None:
    name, gradient = list(expected.gradients.items())[40]
    assert gradient is not None
    nudged = gradient.clone()
    nudged[0, 0] = torch.nextafter(nudged[0, 0], torch.tensor(torch.inf))
    for wrong in (nudged, None, gradient.double(), torch.zeros_like(gradient)):
        with pytest.raises(
            AssertionError, match=f"1 of {len(expected.gradients)} gradients differ"
        ):
            assert_same(replace(expected, gradients=expected.gradients | {name: wrong}), expected)
    with pytest.raises(AssertionError):
        assert_same(replace(expected, gradients={}), expected)
    with pytest.raises(AssertionError, match="generator"):
        assert_same(
            replace(expected, generator=torch.Generator().manual_seed(0).get_state()), expected
        )
