"""Advice for a run that does not fit: what the plan counts on the device, and which settings would need less."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from transformers import PreTrainedModel

from lema.backend import Backend
from lema.config import LemaConfig
from lema.errors import LemaError
from lema.metrics import human_bytes
from lema.optim import training_bytes
from lema.outofmemory import Shortage
from lema.plan.allocate import of_one_process
from lema.plan.step import StepShape, demand_of, step_shape
from lema.plan.workload import MicroBatch, measure
from lema.skeleton import find_layers
from lema.stream.cost import Allocation, Demand, Tier, device_parts
from lema.stream.placement import LayerBytes

__all__ = ["PARTS", "advise"]

PARTS = {
    "slots": "layers passing through",
    "residents": "layers that stay",
    "outside": "embeddings, norm, head",
    "adapters": "adapter, gradients, optimizer",
    "gradients": "gradients of two layers",
    "working": "one micro-batch in one layer",
    "flight": "hidden states between layers",
    "expanded": "weights of one layer, expanded",
    "gathered": "layers put together of parts",
    "boundaries": "inputs of layers, kept",
    "saved": "activations not recomputed",
}
LARGEST = 3  # parts that are named
WORTH_IT = 0.01  # of the peak: what saves less is not spoken of
OTHERWISE = "lower max_length, loss_chunk_tokens or lora_rank; `lema plan` shows what takes how much"


def advise(
    config: LemaConfig,
    model: PreTrainedModel,
    layers: Sequence[LayerBytes],
    outside_bytes: int,
    allocation: Allocation,
    backend: Backend,
    short: Shortage,
) -> str:
    """Return which settings would need less device memory, and by how much, in the plan's numbers.

    Args:
        config: of the run.
        model: the skeleton, adapters attached.
        layers: its decoder layers as bytes.
        outside_bytes: of what lies outside them, on the device.
        allocation: what the run spends memory on.
        backend: the device.
        short: what did not fit.
    """
    allocation, batch = replace(allocation, slots=short.slots), MicroBatch(short.rows, short.length)
    if not short.rows:  # it was no micro-batch
        positions = getattr(model.config, "max_position_embeddings", None)
        batch = step_shape(config, positions, parts=backend.parallel.size).micro_batch
    name, stack = find_layers(model)
    trained = (index for index, layer in enumerate(stack) if any(one.requires_grad for one in layer.parameters()))
    lowest, num_rows = next(trained, len(layers) - 1), config.batch_size * config.gradient_accumulation_steps

    def demand(batch: MicroBatch, chunk: int) -> Demand:
        alone = demand_of(
            layers,
            measure(model, layers, batch, chunk, parallel=backend.parallel),
            None,
            StepShape(batch, max(num_rows // backend.replicas.size, batch.rows)),
            outside_bytes=outside_bytes,
            adapter_bytes=training_bytes(model, name),
            lowest=lowest,
            shared=backend.memory().shared,
        )
        return of_one_process(alone, backend.replicas, sharded=config.shard_weights)

    chunk = config.loss_chunk_tokens
    try:
        now = demand(batch, chunk)
        others = [(f"loss_chunk_tokens: {chunk // 4}", demand(batch, chunk // 4))] if chunk >= 4 else []
        if batch.length > 1:
            shorter = replace(batch, length=batch.length // 2)
            others.append((f"max_length: {shorter.length}", demand(shorter, chunk)))
    except (LemaError, RuntimeError):
        return OTHERWISE
    peak = _peak(now, allocation)
    options = [*_allocations(config, now, allocation), *((setting, _peak(one, allocation)) for setting, one in others)]
    saving = sorted(((peak - less, setting) for setting, less in options), key=lambda option: -option[0])
    named = [f"{setting} ({human_bytes(less)} less)" for less, setting in saving if less > WORTH_IT * peak]
    largest = sorted(device_parts(now, allocation).items(), key=lambda part: -part[1])[:LARGEST]
    counted = ", ".join(f"{human_bytes(size)} {PARTS[part]}" for part, size in largest if size)
    return f"set {', or '.join(named) or OTHERWISE}; the plan counts {human_bytes(peak)} at the peak, of it {counted}"


def _allocations(config: LemaConfig, demand: Demand, allocation: Allocation) -> Iterator[tuple[str, int]]:
    """Yield settings that change what memory is spent on, and the peak with each."""
    if not config.gradient_checkpointing:
        yield "gradient_checkpointing: true", _peak(demand, replace(allocation, saved=frozenset(), saved_on="device"))
        if config.activation_offloading is False:
            away: Tier = "disk" if demand.shared else "host"
            setting = "disk" if demand.shared else "true"
            yield f"activation_offloading: {setting}", _peak(demand, replace(allocation, saved_on=away))
    elif allocation.boundaries == "device" and not demand.shared:
        yield "boundary_activations: host", _peak(demand, replace(allocation, boundaries="host"))
    if allocation.residents or (allocation.saved and config.gradient_checkpointing):
        bare = replace(allocation, residents=frozenset(), saved=frozenset())
        yield "a lower device_memory", _peak(demand, bare)


def _peak(demand: Demand, allocation: Allocation) -> int:
    return sum(device_parts(demand, allocation).values())
