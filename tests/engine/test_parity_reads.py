"""What a step reads from disk, by the stream's own counters and by the sizes of the files."""

from collections.abc import Callable

import pytest
import torch
from parity import assert_same, draw_b, streamed_model, streamed_step
from safetensors import safe_open
from tiny import NUM_LAYERS, Checkpoint, micro_batches

from lema.plan.budget import spread
from lema.stream.schedule import fetched_per_step

CheckpointOf = Callable[..., Checkpoint]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("num_residents", [0, NUM_LAYERS // 2, NUM_LAYERS])
def test_a_step_reads_each_layer_twice_less_the_residents_and_what_the_slots_keep(
    checkpoint_of: CheckpointOf, num_residents: int, count: int
) -> None:
    checkpoint = checkpoint_of("llama")
    batches = micro_batches(count)
    layers, _ = bytes_on_disk(checkpoint)
    spent = {"residents": frozenset(spread(num_residents, NUM_LAYERS))}
    with streamed_model(checkpoint, gradient_checkpointing=True, spent=spent) as model:
        residents = model.memory.residents
        slots = model.memory.num_slots
        streamed_step(model, batches)  # the first step finds nothing kept from a step before
        for _ in range(2):
            before = model.memory.counters
            streamed_step(model, batches)
            after = model.memory.counters
            read = fetched_per_step(NUM_LAYERS, slots, residents)
            assert (
                after.layers_read - before.layers_read
                == len(read)
                == 2 * max(0, NUM_LAYERS - num_residents - slots)
            )
            assert after.bytes_read - before.bytes_read == sum(layers[layer] for layer in read)
            assert after.leases - before.leases == 2 * NUM_LAYERS - 1
    assert len(residents) == num_residents


@pytest.mark.slow
@pytest.mark.parametrize("poison", [False, True])
def test_what_was_read_ahead_for_a_step_disturbs_nothing_that_comes_in_between(
    checkpoint_of: CheckpointOf, poison: bool
) -> None:
    """The next step is announced and read ahead; an evaluation of another shape comes in
    between.
    """
    checkpoint = checkpoint_of("llama")
    batches = micro_batches(2)
    with streamed_model(checkpoint, poison=poison, gradient_checkpointing=True) as model:
        draw_b(model.lora_manager)
        alone = streamed_step(model, batches)
        loss = model.adapter.evaluate(micro_batches(1))[0]
        model.adapter.announce_step()
        assert torch.equal(model.adapter.evaluate(micro_batches(1))[0], loss)
        assert model.memory.announced == 0
        model.adapter.announce_step()
        assert_same(streamed_step(model, batches), alone)
        model.adapter.announce_step()
        assert_same(streamed_step(model, micro_batches(4)), streamed_step(model, micro_batches(4)))


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_weights_in_host_memory_are_read_once(checkpoint_of: CheckpointOf, tied: bool) -> None:
    checkpoint = checkpoint_of("llama", tied)
    batches = micro_batches(4)
    layers, outside = bytes_on_disk(checkpoint)
    with streamed_model(checkpoint, strategy="resident") as model:
        for _ in range(2):
            streamed_step(model, batches)
            assert model.memory.counters.layers_read == 0
            assert model.memory.counters.bytes_read == sum(layers) + outside


def bytes_on_disk(checkpoint: Checkpoint) -> tuple[list[int], int]:
    """Return the bytes of each layer's tensors, and of all others."""
    layers = [0] * NUM_LAYERS
    outside = 0
    for file in checkpoint.streamed.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - not a mapping
                prefix, _, rest = key.partition(f"{checkpoint.architecture.layers}.")
                if prefix:
                    outside += tensors.get_tensor(key).nbytes
                else:
                    layers[int(rest.partition(".")[0])] += tensors.get_tensor(key).nbytes
    return layers, outside
