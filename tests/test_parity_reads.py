"""What a step reads from disk, by the stream's own counters and by the sizes of the files."""

from collections.abc import Callable

import pytest
from parity import streamed_model, streamed_step
from safetensors import safe_open
from tiny import NUM_LAYERS, Checkpoint, micro_batches

CheckpointOf = Callable[..., Checkpoint]


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("num_residents", [0, NUM_LAYERS // 2, NUM_LAYERS])
def test_a_step_reads_each_layer_twice_less_the_turn_and_the_residents(
    checkpoint_of: CheckpointOf, device_memory: Callable[..., int], num_residents: int, count: int
) -> None:
    checkpoint, batches = checkpoint_of("llama"), micro_batches(count)
    layers, _ = bytes_on_disk(checkpoint)
    budget = device_memory("llama", False, num_residents, 2)
    with streamed_model(checkpoint, gradient_checkpointing=True, device_memory=budget) as model:
        residents = model.memory.residents
        visits = [0 if layer in residents else 2 - (layer == NUM_LAYERS - 1) for layer in range(NUM_LAYERS)]
        for _ in range(2):
            before = model.memory.counters
            streamed_step(model, batches)
            after = model.memory.counters
            assert after.layers_read - before.layers_read == sum(visits)
            assert after.bytes_read - before.bytes_read == sum(
                times * nbytes for times, nbytes in zip(visits, layers, strict=True)
            )
    assert len(residents) == num_residents


@pytest.mark.parametrize("tied", [False, True])
def test_weights_in_host_memory_are_read_once(checkpoint_of: CheckpointOf, tied: bool) -> None:
    checkpoint, batches = checkpoint_of("llama", tied), micro_batches(4)
    layers, outside = bytes_on_disk(checkpoint)
    with streamed_model(checkpoint, strategy="resident") as model:
        for _ in range(2):
            streamed_step(model, batches)
            assert model.memory.counters.layers_read == 0
            assert model.memory.counters.bytes_read == sum(layers) + outside


def bytes_on_disk(checkpoint: Checkpoint) -> tuple[list[int], int]:
    """Return the bytes of each layer's tensors, and of all others."""
    layers, outside = [0] * NUM_LAYERS, 0
    for file in checkpoint.streamed.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - not a mapping
                prefix, _, rest = key.partition(f"{checkpoint.architecture.layers}.")
                if prefix:
                    outside += tensors.get_tensor(key).nbytes
                else:
                    layers[int(rest.partition(".")[0])] += tensors.get_tensor(key).nbytes
    return layers, outside
