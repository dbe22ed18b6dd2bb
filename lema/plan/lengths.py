"""What rows that go through layers in chunks take for each of their tokens, and how long a row may
become.

Everything that a step takes of memory either grows evenly with the length of its rows or does not
grow, once rows are longer than a chunk. So two lengths tell where a limit is reached, and by what.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lema.config.units import MEMORY_PARTS, human_bytes
from lema.plan.cost import Allocation, Tier
from lema.plan.memory import device_parts, host_parts
from lema.plan.work.step import StepShape
from lema.plan.work.workload import LayerWork, Workload

if TYPE_CHECKING:
    from lema.plan.needs import Planner

__all__ = ["LongRows", "long_rows"]

SMALL = 256  # tokens of a chunk, where the plan may choose
NAMED = 3  # holders of memory that are named
LAYER_PARTS = {
    "keys and values of a layer": "keys_values_bytes",
    "the sums of their gradients": "key_gradient_bytes",
    "states between chunks": "handed_on_bytes",
}
OF_KEYS = ("keys_values_bytes", "key_gradient_bytes")
WORKING = "working"


@dataclass(frozen=True)
class LongRows:
    """Rows that go through layers in chunks."""

    length: int  # tokens of the longest
    chunk: int  # tokens that go through a layer at once
    # the part of a step's operations that is attention, as far as it grows with the square of rows
    attention: float
    layer: dict[str, int]  # bytes that the layer with most holds of one row, by what they are
    longest: int  # tokens of a row with which a step would still fit
    reason: str  # why it cannot be longer


def long_rows(planner: Planner) -> LongRows | None:
    """Return what a step's rows take in chunks; None: they are not cut, or it cannot be told.

    Args:
        planner: of the step.
    """
    batch = planner.shape.micro_batch
    work = planner.workload
    if work is None or not batch.is_cut or batch.chunk is None:
        return None
    most = max(work.works, key=lambda layer: layer.working_bytes)
    layer = {what: getattr(most, name) for what, name in LAYER_PARTS.items()}
    layer["one chunk, forward and backward"] = most.chunk_bytes
    layer["inputs of a row, and gradients"] = work.hidden_bytes
    fitting = (_longest(planner, tier) for tier in _tiers(planner))
    longest, reason = max(fitting, key=lambda pair: pair[0])
    return LongRows(
        batch.length,
        batch.chunk,
        _attention(work),
        {what: size for what, size in layer.items() if size},
        longest,
        reason,
    )


def _attention(work: Workload) -> float:
    """Return the part of all operations that grows with the square of the rows."""
    layers = [work.of(index) for index in range(len(work.kinds))]
    square = sum(layer.square_flops for layer in layers)
    total = sum(layer.forward + layer.recompute + layer.backward for layer in layers)
    return square / max(1, total + work.head.flops)


def _tiers(planner: Planner) -> tuple[Tier, ...]:
    """Return where the inputs of layers may wait."""
    config = planner.config
    if config.offloading_tier is not None:
        return (config.offloading_tier,)
    if config.boundary_activations != "auto":
        return (config.boundary_activations,)
    return ("disk",) if planner.machine_state.machine.shared else ("host", "disk")


def _longest(planner: Planner, tier: Tier) -> tuple[int, str]:
    """Return the longest row with which a step fits whose layers' inputs wait at a place, and what
    is short of a longer one.
    """
    batch = planner.shape.micro_batch
    assert batch.chunk is not None
    chunk = min(batch.chunk, SMALL) if planner.chooses_chunk else batch.chunk
    lengths = batch.length, 2 * batch.length
    short, double = (_taken(planner, tier, length, chunk) for length in lengths)
    of_row = planner.work(replace(batch, chunk=chunk))
    answers = []
    for memory_name, limit, once, twice in zip(
        ("device memory", "host memory"), planner.limits, short, double, strict=True
    ):
        grown = {part: twice[part] - once[part] for part in once if twice[part] > once[part]}
        if not grown:
            continue
        fixed_bytes = sum(once.values()) - sum(grown.values())
        longest = int((limit - fixed_bytes) / sum(grown.values()) * batch.length)
        parts = _by_token(grown, of_row, batch.length)
        taken = sum(grown.values()) / batch.length
        reason = (
            f"{memory_name} is short of longer ones: a token takes {human_bytes(round(taken))} "
            "there, "
            f"{_named(parts)}, beside {human_bytes(max(0, fixed_bytes))} however long rows are"
        )
        if memory_name == "device memory" and planner.chooses_keys and not batch.host_keys:
            reason += "; keys_values: host has keys and values wait in host memory"
        answers.append((max(0, longest) // SMALL * SMALL, reason))
    return min(answers, key=lambda pair: pair[0], default=(batch.length, "nothing grows"))


def _taken(
    planner: Planner, tier: Tier, length: int, chunk: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Return what a step takes of device and of host memory with rows of a length, by part, and as
    little as can be of weights."""
    batch = replace(planner.shape.micro_batch, length=length, chunk=chunk)
    shape = StepShape(batch, planner.shape.num_rows)
    demand = planner.demand(shape, planner.work(batch))
    bare = Allocation(2, boundaries=tier, pieces=demand.pieces, recompute=True)
    return device_parts(demand, bare), host_parts(demand, bare)


def _by_token(grown: Mapping[str, int], work: Workload, length: int) -> dict[str, float]:
    """Return bytes for each token by what they are, of parts that grow with rows."""
    most = max(work.works, key=lambda layer: layer.working_bytes)
    parts = {MEMORY_PARTS[part]: size / length for part, size in grown.items() if part != WORKING}
    working = grown.get(WORKING, 0) / length
    for what, size in _holders(most):
        if working > 0:
            parts[what] = min(size / length, working)
            working -= parts[what]
    return {**parts, "what else is computed with": working}


def _holders(layer: LayerWork) -> Iterator[tuple[str, int]]:
    """Yield what a layer holds of a row on the device, and the bytes."""
    for what, name in LAYER_PARTS.items():
        if name in OF_KEYS and layer.paged_bytes:
            continue
        if size := getattr(layer, name):
            yield what, size


def _named(parts: Mapping[str, float]) -> str:
    largest = sorted(parts.items(), key=lambda part: -part[1])[:NAMED]
    return ", ".join(f"{human_bytes(round(size))} of them {what}" for what, size in largest if size)
