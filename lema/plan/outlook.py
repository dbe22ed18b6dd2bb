"""A plan: what a run takes, how fast it will be, what limits it, and what more memory would buy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import psutil

from lema.backend import load
from lema.config import LemaConfig, parse_memory
from lema.errors import MemoryLimitError
from lema.plan.allocate import allocated
from lema.plan.blueprint import Blueprint, draw_up
from lema.plan.epoch import Epoch, epoch_of
from lema.plan.machine import Machine
from lema.plan.probe import probe, process_bytes
from lema.plan.simulator import Simulated, simulate
from lema.plan.step import StepShape, Timings, by_arithmetic, demand_of, step_shape
from lema.plan.workload import MicroBatch, Workload, measure
from lema.stream.cost import Allocation, Demand, device_parts, host_parts, phases

__all__ = ["Plan", "Planner", "make_plan"]

GB = 10**9
MOST_TOKENS = 1 << 24  # per step; what would fit beyond is not looked for
CURVE = 33  # points


@dataclass(frozen=True)
class Plan:
    """What is known of a run before it starts.

    Attributes:
        machine: it is planned for.
        measured: whether this machine was measured; else it is a profile.
        tokens: per optimizer step, padding included.
        micro_batch: rows computed at once, and their length.
        allocation: what memory is spent on.
        device: bytes of device memory by part.
        host: bytes of host memory by part.
        disk: bytes on disk by part.
        device_limit: bytes allowed, or there.
        host_limit: likewise.
        step: one step in the middle of a run.
        crossover: tokens per step from which on reading and copying weights is hidden behind computing; None: there is
            nothing to hide.
        largest_micro_batch: rows that still fit.
        largest_step: tokens per step that still fit.
        gigabyte_on_device: seconds that each GB more of device memory, enough for a layer, would save in each step.
        gigabyte_in_host: likewise.
        epoch: of the training data; None: the settings name none.
        itemsize: bytes of one element of the frozen weights.
        notes: what a reader should know.
    """

    machine: Machine
    measured: bool
    tokens: int
    micro_batch: MicroBatch
    allocation: Allocation
    device: dict[str, int]
    host: dict[str, int]
    disk: dict[str, int]
    device_limit: int
    host_limit: int
    step: Simulated
    crossover: float | None
    largest_micro_batch: int
    largest_step: int
    gigabyte_on_device: float
    gigabyte_in_host: float
    epoch: Epoch | None
    itemsize: int
    notes: tuple[str, ...]

    @property
    def host_peak(self) -> int:
        """Bytes of host memory; with those of the device where it computes in it."""
        beside = self.host["process"] + (self.step.device_peak - self.device["slots"]) * self.machine.shared
        return sum(size for part, size in self.host.items() if part != "process") + beside

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


class Planner:
    """A model and a machine, of which steps of any shape can be planned.

    Args:
        config: of the run.
        blueprint: its model.
        machine: it runs on.
        workload: of one micro-batch of `shape`.
        timings: likewise.
        shape: of a step.
        host_available: bytes of host memory that are free.
    """

    def __init__(
        self,
        config: LemaConfig,
        blueprint: Blueprint,
        machine: Machine,
        workload: Workload,
        timings: Timings,
        shape: StepShape,
        host_available: int,
    ) -> None:
        self.config, self.blueprint, self.machine, self.shape = config, blueprint, machine, shape
        self.workload, self.timings = workload, timings
        self._host_available = host_available
        self._row_bytes: Callable[[int], int] | None = None

    def demand(self, shape: StepShape | None = None, workload: Workload | None = None, scale: float = 1.0) -> Demand:
        """Return what a step needs.

        Args:
            shape: of the step; None: the run's own.
            workload: of one of its micro-batches; None: that of the run's own.
            scale: by which computing takes more, or less, than for full rows.
        """
        return demand_of(
            self.blueprint.layers,
            workload or self.workload,
            self.timings.times(scale),
            shape or self.shape,
            outside_bytes=self.blueprint.outside_bytes,
            adapter_bytes=self.blueprint.adapter_bytes,
            lowest=self.blueprint.lowest_adapted,
            shared=self.machine.shared,
        )

    def allocation(self, demand: Demand, **changes: Any) -> Allocation:
        """Return what memory is spent on, with some settings changed.

        Raises:
            MemoryLimitError: it does not fit.
        """
        config = self.config.model_copy(update=changes)
        machine = self.machine
        return allocated(
            config, demand, machine.speeds, machine.device_memory, machine.host_memory, self._host_available
        )

    def simulated(self, demand: Demand, allocation: Allocation) -> Simulated:
        """Return one step in the middle of a run."""
        return simulate(demand, allocation, self.machine.speeds, self.blueprint.layers)

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
        both = phases(replace(demand, boundary_bytes=0), allocation, self.machine.speeds)
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

    def _with_rows(self, rows: int) -> Demand:
        """Return what a step needs in micro-batches of `rows`: what one takes grows evenly with its rows."""
        if self._row_bytes is None:
            length = self.shape.micro_batch.length
            one, two = (self._measured(MicroBatch(count, length)).working_bytes for count in (1, 2))
            self._row_bytes = lambda count: one + (count - 1) * (two - one)
        times = rows / self.shape.micro_batch.rows
        demand = self.demand(StepShape(self.shape.micro_batch, max(rows, self.shape.num_rows)))
        hidden = round(times * self.workload.hidden_bytes)
        return replace(
            demand,
            working_bytes=self._row_bytes(rows),
            flight_bytes=demand.flight_bytes + min(self.workload.hidden_bytes, hidden) - hidden,
            micro_boundary_bytes=hidden,
        )

    def _measured(self, batch: MicroBatch) -> Workload:
        return measure(self.blueprint.model, self.blueprint.layers, batch, self.config.loss_chunk_tokens)


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
    backend = None if machine is not None else load(config.device)
    blueprint = draw_up(config, backend=backend, trust_remote_code=trust_remote_code)
    shape = step_shape(config, getattr(blueprint.model.config, "max_position_embeddings", None))
    workload = measure(blueprint.model, blueprint.layers, shape.micro_batch, config.loss_chunk_tokens)
    notes = []
    if machine is None:
        assert backend is not None
        available, measured = psutil.virtual_memory().available, True
        machine, timings = probe(blueprint, workload, config, shape, backend)
        backend.close()
    else:
        available, measured = machine.host_memory, False
        timings = by_arithmetic(workload, machine, blueprint.model.dtype.itemsize)
        notes += [machine.note] * bool(machine.note)
    process = process_bytes() * measured  # with what computing a layer has left behind, as it does in training
    planner = Planner(config, blueprint, machine, workload, timings, shape, available)
    demand = planner.demand()
    allocation = planner.allocation(demand)
    device, host = device_parts(demand, allocation), host_parts(demand, allocation) | {"process": process}
    if sum(device.values()) > machine.device_memory:
        notes.append("this does not fit the device: set device_memory, gradient_checkpointing or micro_batch_size")
    step = planner.simulated(demand, allocation)

    bought = math.ceil(max(layer.nbytes for layer in blueprint.layers) / GB)  # less would not hold one layer more

    def saved_by(setting: str, used: int) -> float:
        richer = planner.allocation(demand, **{setting: used + bought * GB})
        return max(0.0, step.seconds - planner.simulated(demand, richer).seconds) / bought

    def seconds_of_part(part: float) -> float:
        return planner.simulated(planner.demand(scale=part), allocation).seconds

    device_limit = _limit(config.device_memory, machine.device_memory, machine.device_memory)
    host_limit = _limit(config.host_memory, machine.host_memory, available)
    plan = Plan(
        machine=machine,
        measured=measured,
        tokens=shape.tokens,
        micro_batch=shape.micro_batch,
        allocation=allocation,
        device=device,
        host=host,
        disk={
            "model": blueprint.stored_bytes,
            "boundaries": len(demand.visited_twice) * demand.boundary_bytes * (allocation.boundaries == "disk"),
            "checkpoint": 12 * blueprint.adapter_parameters,  # value and two moments, in fp32
        },
        device_limit=device_limit,
        host_limit=host_limit,
        step=step,
        crossover=planner.crossover(demand, allocation),
        largest_micro_batch=planner.largest_micro_batch(),
        largest_step=planner.largest_step(),
        gigabyte_on_device=saved_by(
            "device_memory", sum(device.values()) if config.device_memory is None else device_limit
        ),
        gigabyte_in_host=saved_by(
            "host_memory", sum(host.values()) - process if config.host_memory is None else host_limit
        ),
        epoch=epoch_of(
            config,
            blueprint,
            shape,
            price,
            lambda part: planner.simulated(planner.demand(scale=part), allocation).seconds,
        ),
        itemsize=blueprint.model.dtype.itemsize,
        notes=tuple(notes),
    )
    return plan, planner


def _limit(setting: int | float | str | None, total: int, otherwise: int) -> int:
    return otherwise if setting is None else parse_memory(setting, total)


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


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, frozenset | set):
        return sorted(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
