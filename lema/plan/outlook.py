"""A plan: what a run takes, how fast it will be, what limits it, and what more memory would buy."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from lema.config import LemaConfig, parse_memory
from lema.plan.epoch import Epoch, epoch_of
from lema.plan.machine import Machine
from lema.plan.planner import Planner, planner_of
from lema.plan.simulator import Simulated
from lema.plan.workload import MicroBatch
from lema.stream.cost import Allocation, Demand, device_parts, host_parts, saved_elsewhere

__all__ = ["Plan", "PlannedMemory", "Room", "make_plan", "plan_with"]

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
