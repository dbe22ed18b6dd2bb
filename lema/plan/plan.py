"""A plan: what a run takes, how fast it will be, what limits it, and what more memory would bring.

A `Planner` holds a model and a machine, and plans steps of any shape on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import psutil

from lema.backend import Backend
from lema.backend.registry import kept_unasked
from lema.config import LemaConfig
from lema.config.units import parse_memory
from lema.errors import MemoryLimitError
from lema.model.partition import open_backend, planned_parallel
from lema.plan.allocate import UNKNOWN_DISK, UNKNOWN_LINK, allocated
from lema.plan.blueprint import Blueprint, draw_up
from lema.plan.cost import Allocation, Demand, Speeds, device_parts, host_parts, phases, saved_elsewhere
from lema.plan.machine import Machine
from lema.plan.measure import probe, process_bytes
from lema.plan.simulator import Simulated, simulate
from lema.plan.step import Epoch, StepShape, Timings, by_arithmetic, demand_of, epoch_of, of_rows, step_shape, untimed
from lema.plan.workload import MicroBatch, Workload, measure

__all__ = ["Plan", "PlannedMemory", "Planner", "Room", "make_plan", "plan_with", "planner_of"]


MOST_TOKENS = 1 << 24  # per step; what would fit beyond is not looked for
CURVE = 33  # points


@dataclass(frozen=True)
class Planner:
    """A model and a machine, of which steps of any shape can be planned.

    Attributes:
        config: of the run.
        blueprint: its model.
        machine: it runs on.
        workload: of one micro-batch of `shape`.
        timings: likewise.
        shape: of a step.
        host_available: bytes of host memory that are free.
        process_bytes: of interpreter and libraries; 0: unknown, for the machine is another.
        measured: whether the machine is this one, measured; else it is a profile.
        kept: the part of the device's memory up to which layers stay where the settings have no limit for it.
    """

    config: LemaConfig
    blueprint: Blueprint
    machine: Machine
    workload: Workload
    timings: Timings
    shape: StepShape
    host_available: int
    process_bytes: int = 0
    measured: bool = False
    kept: float = 0.0

    def demand(self, shape: StepShape | None = None, workload: Workload | None = None, scale: float = 1.0) -> Demand:
        """Return what a step needs.

        Args:
            shape: of the step; None: the run's own.
            workload: of one of its micro-batches; None: that of the run's own.
            scale: by which computing takes more, or less, than for full rows.
        """
        known = demand_of(
            self.blueprint.layers,
            workload or self.workload,
            self.timings.times(scale),
            shape or self.shape,
            outside_bytes=self.blueprint.outside_bytes,
            adapter_bytes=self.blueprint.adapter_bytes,
            lowest=self.blueprint.lowest_adapted,
            shared=self.machine.shared,
            trained=self.blueprint.trained,
        )
        return replace(known, processes=self.blueprint.parallel.size)

    def allocation(self, demand: Demand, **changes: Any) -> Allocation:
        """Return what a run spends memory on, with some settings changed.

        A run measures, and so do we for it, where a limit leaves it a choice; else bytes moved are what counts.

        Raises:
            MemoryLimitError: it does not fit.
        """
        config, machine = self.config.model_copy(update=changes), self.machine
        speeds = machine.speeds
        if config.device_memory is None or not config.gradient_checkpointing:
            demand = untimed(demand)
            speeds = Speeds(UNKNOWN_DISK) if machine.shared else Speeds(UNKNOWN_DISK, UNKNOWN_LINK)
        memory = machine.device_memory, machine.host_memory, self.host_available
        return allocated(config, demand, speeds, *memory, kept=self.kept)

    def measured_again(self, backend: Backend, clock: Callable[[], float]) -> Planner:
        """Return the planner with this machine measured once more.

        Args:
            backend: the device.
            clock: seconds, by which computing is timed.
        """
        machine, timings = probe(self.blueprint, self.workload, self.config, self.shape, backend, clock)
        return replace(self, machine=machine, timings=timings)

    def simulated(self, demand: Demand, allocation: Allocation) -> Simulated:
        """Return one step in the middle of a run."""
        return simulate(demand, allocation, self.machine.speeds)

    def fits(self, demand: Demand) -> bool:
        """Whether a step fits the limits, those of the settings and those of the machine."""
        try:
            allocation = self.allocation(demand)
        except MemoryLimitError:
            return False
        return sum(device_parts(demand, allocation).values()) <= self.machine.device_memory

    def largest_micro_batch(self) -> int:
        """Return how many rows can be computed at once; the step has as many tokens as before, or one micro-batch."""
        return _largest(lambda rows: self.fits(self._with_rows(rows)), MOST_TOKENS // self.shape.micro_batch.length)

    def largest_step(self) -> int:
        """Return how many tokens a step can have, in micro-batches as large as the run's own."""
        micro = self.shape.micro_batch

        def fits(count: int) -> bool:
            return self.fits(self.demand(StepShape(micro, count * micro.rows)))

        return _largest(fits, MOST_TOKENS // micro.tokens) * micro.tokens

    def crossover(self, demand: Demand, allocation: Allocation) -> float | None:
        """Return the tokens per step from which on the weights' way is no longer than the computation."""
        weights_alone = replace(demand, boundary_bytes=0), replace(allocation, saved_on="device")
        both = phases(*weights_alone, self.machine.speeds)
        needed = [max(phase.link, phase.disk) / phase.compute for phase in both if phase.compute > 0]
        return self.shape.tokens * max(needed, default=0.0) or None

    def curve(self, allocation: Allocation, around: float) -> Iterator[tuple[int, Simulated]]:
        """Yield steps of more and more tokens, on both sides of `around`, with one allocation."""
        micro = self.shape.micro_batch
        for place in range(CURVE):
            rows = max(1, round(around / micro.length * 2 ** (6 * place / (CURVE - 1) - 3)))
            shape = StepShape(replace(micro, rows=min(micro.rows, rows)), rows)
            times = StepShape(micro, rows)  # a part of a micro-batch takes a part of its time
            yield shape.tokens, self.simulated(self.demand(times), allocation)

    @cached_property
    def _few_rows(self) -> tuple[Workload, Workload]:
        """Micro-batches of one row and of two."""
        return self._measured(1), self._measured(2)

    def _with_rows(self, rows: int) -> Demand:
        """Return what a step needs in micro-batches of `rows`."""
        own = self.shape.micro_batch
        at_once = max(1, self.config.loss_chunk_tokens // own.length)
        shape = StepShape(replace(own, rows=rows), max(rows, self.shape.num_rows))
        return self.demand(shape, of_rows(*self._few_rows, rows, at_once), rows / own.rows)

    def _measured(self, rows: int) -> Workload:
        own = self.shape.micro_batch
        if rows == own.rows:
            return self.workload
        return _measure(self.blueprint, MicroBatch(rows, own.length), self.config)


def planner_of(config: LemaConfig, machine: Machine | None = None, *, trust_remote_code: bool = False) -> Planner:
    """Learn what a run's model needs, and what the machine gives.

    Args:
        config: of the run.
        machine: to plan for; None: this one, which is measured.
        trust_remote_code: as in `LemaModel`.

    Raises:
        ConfigError: as training would raise it.
    """
    if machine is None:
        return _on_this_machine(config, trust_remote_code)
    blueprint = draw_up(config, trust_remote_code=trust_remote_code, parallel=planned_parallel(config))
    shape, workload = _work(config, blueprint)
    timings = by_arithmetic(workload, blueprint.layers, machine, blueprint.model.dtype.itemsize)
    kept = kept_unasked(config.device)
    return Planner(config, blueprint, machine, workload, timings, shape, machine.host_memory, kept=kept)


def _on_this_machine(config: LemaConfig, trusted: bool) -> Planner:
    parallel = planned_parallel(config)
    # One process measures what each of several would see: the others need not be there.
    alone = {"tensor_parallel_size": 1, "sequence_parallel": False} if parallel.size > 1 else {}
    backend = open_backend(config.model_copy(update=alone))
    try:
        blueprint = draw_up(config, backend=backend, trust_remote_code=trusted, parallel=parallel)
        shape, workload = _work(config, blueprint)
        available = psutil.virtual_memory().available
        machine, timings = probe(blueprint, workload, config, shape, backend)
    finally:
        backend.close()
    # The process is looked at with what computing a layer has left behind in it, as it does in training.
    known = (config, blueprint, machine, workload, timings, shape, available, process_bytes())
    return Planner(*known, measured=True, kept=kept_unasked(backend))


def _work(config: LemaConfig, blueprint: Blueprint) -> tuple[StepShape, Workload]:
    positions = getattr(blueprint.model.config, "max_position_embeddings", None)
    shape = step_shape(config, positions, parts=blueprint.parallel.size)
    return shape, _measure(blueprint, shape.micro_batch, config)


def _measure(blueprint: Blueprint, batch: MicroBatch, config: LemaConfig) -> Workload:
    return measure(blueprint.model, blueprint.layers, batch, config.loss_chunk_tokens, parallel=blueprint.parallel)


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


GB = 10**9
CHECKPOINTED = 12  # bytes per trained parameter: its value and two moments, in fp32


@dataclass(frozen=True)
class PlannedMemory:
    """Bytes by part, and what is allowed, or there.

    Attributes:
        device: of device memory.
        host: of host memory.
        disk: of disk space.
        device_limit: bytes of device memory allowed, or there.
        host_limit: likewise of host memory.
    """

    device: dict[str, int]
    host: dict[str, int]
    disk: dict[str, int]
    device_limit: int
    host_limit: int


@dataclass(frozen=True)
class Room:
    """What another step, or more memory, would give.

    Attributes:
        crossover: tokens per step from which on reading and copying weights is hidden behind computing; None: there is
            nothing to hide.
        largest_micro_batch: rows that still fit.
        largest_step: tokens per step that still fit.
        gigabyte_on_device: seconds that each GB more of device memory, enough for a layer, would save in each step.
        gigabyte_in_host: likewise.
    """

    crossover: float | None
    largest_micro_batch: int
    largest_step: int
    gigabyte_on_device: float
    gigabyte_in_host: float


@dataclass(frozen=True)
class Plan:
    """What is known of a run before it starts.

    Attributes:
        machine: it is planned for.
        measured: whether this machine was measured; else it is a profile.
        itemsize: bytes of one element of the frozen weights.
        tokens: per optimizer step, padding included.
        micro_batch: rows computed at once, and their length.
        allocation: what memory is spent on.
        memory: by part.
        step: one step in the middle of a run.
        room: for more.
        epoch: of the training data; None: the settings name none.
        notes: what a reader should know.
    """

    machine: Machine
    measured: bool
    itemsize: int
    tokens: int
    micro_batch: MicroBatch
    allocation: Allocation
    memory: PlannedMemory
    step: Simulated
    room: Room
    epoch: Epoch | None
    notes: tuple[str, ...]

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
        plain: dict[str, Any] = _plain(whole)
        return plain


def make_plan(
    config: LemaConfig,
    machine: Machine | None = None,
    *,
    price: float | None = None,
    trust_remote_code: bool = False,
) -> tuple[Plan, Planner]:
    """Plan a run.

    Args:
        config: of the run.
        machine: to plan for; None: this one, which is measured.
        price: of an hour, in any currency.
        trust_remote_code: as in `LemaModel`.

    Raises:
        MemoryLimitError: the limits of the settings, or the machine's memory, are too small.
        ConfigError, DataError: as training would raise them.
    """
    planner = planner_of(config, machine, trust_remote_code=trust_remote_code)
    return plan_with(planner, price=price, trust_remote_code=trust_remote_code), planner


def plan_with(planner: Planner, *, price: float | None = None, trust_remote_code: bool = False) -> Plan:
    """Plan a run with what is known of its model and machine; arguments and errors as `make_plan`."""
    demand = planner.demand()
    allocation = planner.allocation(demand)
    step, memory = planner.simulated(demand, allocation), _memory(planner, demand, allocation)

    def seconds_of_part(part: float) -> float:
        return planner.simulated(planner.demand(scale=part), allocation).seconds

    return Plan(
        machine=planner.machine,
        measured=planner.measured,
        itemsize=planner.blueprint.model.dtype.itemsize,
        tokens=planner.shape.tokens,
        micro_batch=planner.shape.micro_batch,
        allocation=allocation,
        memory=memory,
        step=step,
        room=_room(planner, demand, allocation, memory, step.seconds),
        epoch=epoch_of(
            planner.config,
            planner.blueprint,
            planner.shape,
            price,
            seconds_of_part,
            trust_remote_code=trust_remote_code,
        ),
        notes=_notes(planner, memory),
    )


def _memory(planner: Planner, demand: Demand, allocation: Allocation) -> PlannedMemory:
    config, machine, blueprint = planner.config, planner.machine, planner.blueprint
    spilled = len(demand.visited_twice) * demand.boundary_bytes * (allocation.boundaries == "disk")
    saved = sum(saved_elsewhere(demand, allocation).values()) * (allocation.saved_on == "disk")
    return PlannedMemory(
        device=device_parts(demand, allocation),
        host=host_parts(demand, allocation) | {"process": planner.process_bytes},
        disk={
            "model": blueprint.stored_bytes,
            "boundaries": spilled,
            "saved": saved,
            "checkpoint": CHECKPOINTED * blueprint.adapter_parameters,
        },
        device_limit=_limit(config.device_memory, machine.device_memory, machine.device_memory),
        host_limit=_limit(config.host_memory, machine.host_memory, planner.host_available),
    )


def _room(planner: Planner, demand: Demand, allocation: Allocation, memory: PlannedMemory, seconds: float) -> Room:
    config = planner.config
    bought = math.ceil(max(layer.nbytes for layer in planner.blueprint.layers) / GB)  # less holds not one layer more

    def saved_by(setting: str, used: int) -> float:
        richer = planner.allocation(demand, **{setting: used + bought * GB})
        return max(0.0, seconds - planner.simulated(demand, richer).seconds) / bought

    on_device = sum(memory.device.values()) if config.device_memory is None else memory.device_limit
    in_host = sum(memory.host.values()) - planner.process_bytes if config.host_memory is None else memory.host_limit
    return Room(
        crossover=planner.crossover(demand, allocation),
        largest_micro_batch=planner.largest_micro_batch(),
        largest_step=planner.largest_step(),
        gigabyte_on_device=saved_by("device_memory", on_device),
        gigabyte_in_host=saved_by("host_memory", in_host),
    )


def _notes(planner: Planner, memory: PlannedMemory) -> tuple[str, ...]:
    notes = [planner.machine.note] * bool(planner.machine.note)
    if sum(memory.device.values()) > planner.machine.device_memory:
        notes.append("this does not fit the device: set device_memory, gradient_checkpointing or micro_batch_size")
    return tuple(notes)


def _limit(setting: int | float | str | None, total: int, otherwise: int) -> int:
    return otherwise if setting is None else parse_memory(setting, total)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, frozenset | set):
        return sorted(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
