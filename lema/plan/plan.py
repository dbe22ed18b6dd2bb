"""The plan of a run: what it takes, how fast it will be, what limits it, and what more memory would buy."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lema.config import LemaConfig
from lema.config.units import human_bytes
from lema.data import forms_of, needs_tokenizer, prepare_data
from lema.data.batches import Packs
from lema.data.preference import prepare_preferences
from lema.model.skeleton import main_dtype
from lema.plan.cost import Allocation, phases, saved_elsewhere
from lema.plan.machine import Machine
from lema.plan.planner import Planner, StepNeeds, planner_of, workload_of
from lema.plan.simulator import Simulated
from lema.plan.step import StepShape, of_rows
from lema.plan.workload import MicroBatch
from lema.storage.modelfiles import load_tokenizer
from lema.storage.quantized.published import LIBRARY
from lema.stream.placement import LayerBytes

__all__ = ["Epoch", "Headroom", "Plan", "PlannedMemory", "make_plan", "plan_with", "step_curve"]


GB = 10**9
MOST_TOKENS = 1 << 24  # per step; larger steps are not looked for
CURVE = 33  # points


@dataclass(frozen=True)
class PlannedMemory:
    """Bytes of memory by part, and how many may be used."""

    device: dict[str, int]  # of device memory
    host: dict[str, int]  # of host memory
    disk: dict[str, int]  # of disk space
    device_limit: int  # of device memory, what the settings allow or what there is
    host_limit: int  # of host memory, what the settings allow or what there is


@dataclass(frozen=True)
class Headroom:
    """What larger steps, or more memory, would give."""

    crossover: float | None  # tokens per step from which on moving weights is hidden; None: there is nothing to hide
    largest_micro_batch: int  # rows that still fit
    largest_step: int  # tokens per step that still fit
    gigabyte_on_device: float  # seconds that each GB more of device memory, enough for a layer, would save in each step
    gigabyte_in_host: float  # seconds that each GB more of host memory would save in each step


@dataclass(frozen=True)
class Epoch:
    """One pass over the training data."""

    rows: int  # of the data
    tokens: int  # of these rows
    steps: int  # optimizer steps
    hours: float  # they take
    cost: float | None  # at the price given; None: none was


@dataclass(frozen=True)
class Plan:
    """What is known of a run before it starts."""

    machine: Machine  # it is planned for
    measured: bool  # whether this machine was measured; else it is a profile
    itemsize: int  # bytes of one element of the frozen weights
    tokens: int  # per optimizer step, padding included
    micro_batch: MicroBatch  # rows computed at once, and their length
    allocation: Allocation  # what memory is spent on
    memory: PlannedMemory  # by part
    step: Simulated  # one step in the middle of a run
    room: Headroom  # what larger steps, or more memory, would give
    epoch: Epoch | None  # of the training data; None: the settings name none
    notes: tuple[str, ...]  # what a reader should know

    @property
    def host_peak(self) -> int:
        """Bytes of host memory; with those of the device where it computes in it."""
        memory = self.memory
        on_device = (self.step.device_peak - memory.device["slots"]) * self.machine.shared  # the ring is the slots
        return sum(memory.host.values()) + on_device

    @property
    def flops(self) -> float:
        """Operations per second in the model's dtype."""
        return self.machine.flops(self.itemsize)

    @property
    def tokens_per_second(self) -> float:
        """Tokens that the run trains on in a second, padding included."""
        return self.tokens / self.step.seconds

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain JSON types; what is infinite or unknown is None."""
        whole = {
            **asdict(self),
            "tokens_per_second": self.tokens_per_second,
            "bottleneck": self.step.bottleneck,
            "device_peak": self.step.device_peak,
            "host_peak": self.host_peak,
        }
        return {key: _plain(value) for key, value in whole.items()}


def make_plan(
    config: LemaConfig, machine: Machine | None = None, *, price: float | None = None, trust_remote_code: bool = False
) -> tuple[Plan, Planner]:
    """Plan a run.

    Args:
        machine: to plan for; None: this one, which is measured.
        price: of an hour, in any currency.

    Raises:
        MemoryLimitError: the limits of the settings, or the machine's memory, are too small.
        ConfigError, DataError: as training would raise them.
    """
    planner = planner_of(config, machine, trust_remote_code=trust_remote_code)
    return plan_with(planner, price=price, trust_remote_code=trust_remote_code), planner


def plan_with(planner: Planner, *, price: float | None = None, trust_remote_code: bool = False) -> Plan:
    """Plan a run with what is known of its model and machine; arguments and errors as `make_plan`."""
    needs = planner.needs()
    demand, allocation = needs.demand, needs.allocation
    step, memory = planner.simulated(demand, allocation), _memory(needs)
    return Plan(
        machine=planner.machine,
        measured=planner.site.speeds == "measured",
        itemsize=main_dtype(planner.blueprint.model).itemsize,
        tokens=planner.shape.tokens,
        micro_batch=planner.shape.micro_batch,
        allocation=allocation,
        memory=memory,
        step=step,
        room=_headroom(needs, memory, step.seconds),
        epoch=_epoch(needs, price, trust_remote_code),
        notes=_notes(planner, memory),
    )


def _epoch(needs: StepNeeds, price: float | None, trusted: bool) -> Epoch | None:
    """Read the training data as training would, and say how long an epoch takes; None: the settings name no data."""
    planner, config, length = needs.planner, needs.planner.config, needs.planner.shape.micro_batch.length
    if not config.train_data:
        return None
    tokenizer, preferences, forms = None, config.objective != "sft", forms_of(config)
    if preferences or needs_tokenizer(config.train_data, forms):
        how = "put the tokenizer's files beside the weights, or leave train_data out of the plan"
        tokenizer = load_tokenizer(planner.blueprint.directory, trusted=trusted, how=how)
    longest = sys.maxsize if config.packing == "wrapped" else length
    options: dict[str, Any] = {"max_length": longest, "overlong": config.overlong, "forms": forms}
    options |= {"vocab_size": planner.blueprint.vocabulary or None}
    if preferences and tokenizer is not None:
        labelled = config.objective == "kto"
        counts = prepare_preferences(config.train_data, tokenizer, labelled=labelled, **options).counts
    else:
        data = prepare_data(config.train_data, tokenizer, **options)
        counts = data.counts
        if config.packing:
            packs = Packs(data, length, config.seed, wrapped=config.packing == "wrapped")
            counts = replace(counts, rows=len(packs))
    rows, tokens = counts.rows, counts.tokens
    steps = math.ceil(rows / planner.shape.num_rows)
    part_of_full = planner.demand(scale=tokens / (rows * length))
    hours = steps * planner.simulated(part_of_full, needs.allocation).seconds / 3600
    return Epoch(rows, tokens, steps, hours, None if price is None else price * hours)


def _memory(needs: StepNeeds) -> PlannedMemory:
    planner, demand, allocation = needs.planner, needs.demand, needs.allocation
    spilled = len(demand.keeping) * demand.boundary_bytes * (allocation.boundaries == "disk")
    saved = sum(saved_elsewhere(demand, allocation).values()) * (allocation.saved_on == "disk")
    device_limit, host_limit = planner.limits
    return PlannedMemory(
        device=needs.device,
        host=needs.host | {"process": planner.site.process_bytes},
        disk={
            "model": planner.blueprint.stored_bytes,
            "boundaries": spilled,
            "saved": saved,
            "checkpoint": planner.blueprint.checkpoint_bytes,
        },
        device_limit=device_limit,
        host_limit=host_limit,
    )


def _headroom(needs: StepNeeds, memory: PlannedMemory, seconds: float) -> Headroom:
    planner, demand = needs.planner, needs.demand
    bought = math.ceil(max(layer.nbytes for layer in planner.blueprint.layers) / GB)  # less holds not one layer more

    def saved_by(setting: str, used: int) -> float:
        richer = planner.allocation(demand, **{setting: used + bought * GB})
        return max(0.0, seconds - planner.simulated(demand, richer).seconds) / bought

    config = planner.config
    on_device = sum(memory.device.values()) if config.device_memory is None else memory.device_limit
    in_host = sum(needs.host.values()) if config.host_memory is None else memory.host_limit
    return Headroom(
        crossover=_crossover(needs),
        largest_micro_batch=_largest_micro_batch(planner),
        largest_step=_largest_step(planner),
        gigabyte_on_device=saved_by("device_memory", on_device),
        gigabyte_in_host=saved_by("host_memory", in_host),
    )


def _crossover(needs: StepNeeds) -> float | None:
    """Return the tokens per step from which on weights are read and uploaded no longer than layers compute."""
    weights_alone = replace(needs.demand, boundary_bytes=0), replace(needs.allocation, saved_on="device")
    both = phases(*weights_alone, needs.planner.machine.speeds)
    needed = [max(phase.link, phase.disk) / phase.compute for phase in both if phase.compute > 0]
    return needs.planner.shape.tokens * max(needed, default=0.0) or None


def _largest_micro_batch(planner: Planner) -> int:
    """Return how many rows can be computed at once; the step has as many tokens as before, or one micro-batch."""
    own, config = planner.shape.micro_batch, planner.config
    # A micro-batch grows evenly with its rows, so that those of one row and of two tell what any takes.
    one, two = (
        planner.workload
        if rows == own.rows and planner.workload is not None
        else workload_of(planner.blueprint, replace(own, rows=rows), config)
        for rows in (1, 2)
    )
    at_once = max(1, config.loss_chunk_tokens // own.length)

    def fits(rows: int) -> bool:
        shape = StepShape(replace(own, rows=rows), max(rows, planner.shape.num_rows))
        return planner.fits(planner.demand(shape, of_rows(one, two, rows, at_once), rows / own.rows))

    return _largest(fits, MOST_TOKENS // own.length)


def _largest_step(planner: Planner) -> int:
    """Return how many tokens a step can have, in micro-batches as large as the run's own."""
    micro = planner.shape.micro_batch

    def fits(count: int) -> bool:
        return planner.fits(planner.demand(StepShape(micro, count * micro.rows)))

    return _largest(fits, MOST_TOKENS // micro.tokens) * micro.tokens


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number up to `most` that fits; 0: not even 1 does."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def step_curve(planner: Planner, allocation: Allocation, around: float) -> Iterator[tuple[int, Simulated]]:
    """Yield the tokens of larger and larger steps, on both sides of `around`, and each step with one allocation."""
    micro = planner.shape.micro_batch
    for point in range(CURVE):
        rows = max(1, round(around / micro.length * 2 ** (6 * point / (CURVE - 1) - 3)))
        shape = StepShape(replace(micro, rows=min(micro.rows, rows)), rows)
        times = StepShape(micro, rows)  # a part of a micro-batch takes a part of its time
        yield shape.tokens, planner.simulated(planner.demand(times), allocation)


def _notes(planner: Planner, memory: PlannedMemory) -> tuple[str, ...]:
    notes = [planner.machine.note] * bool(planner.machine.note)
    notes += _of_published_weights(planner.blueprint.layers)
    notes += planner.blueprint.tables.notes
    notes += planner.blueprint.head_notes
    if sum(memory.device.values()) > planner.machine.device_memory:
        notes.append("this does not fit the device: set device_memory, gradient_checkpointing or micro_batch_size")
    return tuple(notes)


def _of_published_weights(layers: Sequence[LayerBytes]) -> Iterator[str]:
    """Say what preparing the checkpoint would save."""
    moved = [(cast.move, cast.placed.dtype) for layer in layers for cast in layer.casts if cast.move is not None]
    pieces = len(moved) + sum(not run.alone for layer in layers for run in layer.runs)
    if pieces:
        aside = human_bytes(sum(move.count * dtype.itemsize for move, dtype in moved))
        yield f"layers are put together from {pieces:,} pieces, {aside} moved on the host: `lema prepare` does it once"
    published = [one for layer in layers for one in layer.expansions if one.library == LIBRARY]
    if published:
        stored = human_bytes(sum(part.nbytes for one in published for part in one.parts.values()))
        whole = human_bytes(sum(one.placed.nbytes for one in published))
        yield f"{stored} of weights are dequantised to {whole} at each lease: `lema prepare` writes them so, once"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, frozenset | set):
        return sorted(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
