"""Advice to a run whose device has too little memory: the settings that would need less of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lema.config import LemaConfig
from lema.config.units import MEMORY_PARTS, human_bytes
from lema.engine.head.loss import CHUNK_TOKENS
from lema.engine.oom import Shortage
from lema.errors import LemaError
from lema.plan.choice import choice_of, cut
from lema.plan.cost import Allocation, Demand, Tier
from lema.plan.memory import device_parts
from lema.plan.needs import Planner
from lema.plan.work.step import StepShape, micro_batch_of
from lema.plan.work.workload import MicroBatch

__all__ = ["advise"]

LARGEST = 3  # parts that are named
WORTH_IT = 0.01  # of the peak: what saves less is not spoken of
OTHERWISE = (
    "lower max_length, loss_chunk_tokens or lora_rank; `lema plan` shows what takes how much"
)


def advise(planner: Planner, allocation: Allocation, short: Shortage) -> str:
    """Return which settings would need less device memory, and by how much, in the plan's numbers.
    `short` is what a device ran out at, and `allocation` what its memory is spent on."""
    allocation = replace(allocation, slots=short.slots)
    batch = planner.shape.micro_batch
    if short.rows:  # else it was no micro-batch
        batch = micro_batch_of(planner.config, short.rows, short.length)
    chunk = planner.config.loss_chunk_tokens or CHUNK_TOKENS
    choice = replace(choice_of(planner), head_in_pieces=allocation.pieces > 0)
    planner = cut(planner, choice)

    def demand(batch: MicroBatch, chunk: int) -> Demand:
        step = StepShape(batch, max(planner.shape.num_rows, batch.rows))
        return planner.demand(step, planner.work(batch, chunk))

    try:
        now = demand(batch, chunk)
        demands = (
            [(f"loss_chunk_tokens: {chunk // 4}", demand(batch, chunk // 4))] if chunk >= 4 else []
        )
        if batch.is_cut and batch.chunk is not None and batch.chunk > 2:
            half = replace(batch, chunk=batch.chunk // 2)
            demands.append((f"sequence_chunk: {half.chunk}", demand(half, chunk)))
        if batch.length > 1:
            shorter = replace(batch, length=batch.length // 2)
            demands.append((f"max_length: {shorter.length}", demand(shorter, chunk)))
    except (LemaError, RuntimeError):
        return OTHERWISE
    peak = _peak(now, allocation)
    options = [*_allocations(planner.config, now, allocation)]
    options += [(what, _peak(candidate, allocation)) for what, candidate in demands]
    saving = sorted(
        ((peak - option_peak, setting) for setting, option_peak in options),
        key=lambda option: -option[0],
    )
    named = [
        f"{setting} ({human_bytes(saved_bytes)} less)"
        for saved_bytes, setting in saving
        if saved_bytes > WORTH_IT * peak
    ]
    largest = sorted(device_parts(now, allocation).items(), key=lambda part: -part[1])[:LARGEST]
    counted = ", ".join(
        f"{human_bytes(size)} {MEMORY_PARTS[part]}" for part, size in largest if size
    )
    return (
        f"set {', or '.join(named) or OTHERWISE}; the plan counts {human_bytes(peak)} at the "
        f"peak, of it {counted}"
    )


def _allocations(
    config: LemaConfig, demand: Demand, allocation: Allocation
) -> Iterator[tuple[str, int]]:
    """Yield settings that change what memory is spent on, and the peak with each."""
    if not allocation.recompute:
        again = replace(allocation, saved=frozenset(), saved_on="device", recompute=True)
        yield "gradient_checkpointing: true", _peak(demand, again)
        if config.activation_offloading is False:
            away: Tier = "disk" if demand.shared else "host"
            setting = "disk" if demand.shared else "true"
            yield (
                f"activation_offloading: {setting}",
                _peak(demand, replace(allocation, saved_on=away)),
            )
    elif allocation.boundaries == "device" and not demand.shared:
        yield "boundary_activations: host", _peak(demand, replace(allocation, boundaries="host"))
    if allocation.residents or allocation.products or (allocation.saved and allocation.recompute):
        bare = replace(allocation, residents=frozenset(), saved=frozenset(), products=frozenset())
        yield "a lower device_memory", _peak(demand, bare)


def _peak(demand: Demand, allocation: Allocation) -> int:
    return sum(device_parts(demand, allocation).values())
