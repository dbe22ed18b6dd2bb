"""The planner of a run or of one of its phases: what a step needs of memory, what moves in it, and how long it takes.

It plans runs that train adapters and phases that train weights of the model: the blueprint knows which.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import psutil
from transformers import PreTrainedModel

from lema.backend import Backend, SingleProcess
from lema.backend.hostmemory import memory_available
from lema.backend.registry import kept_unasked
from lema.config import LemaConfig
from lema.config.units import parse_memory
from lema.errors import MemoryLimitError, ModelError
from lema.model.partition import open_backend, planned_parallel
from lema.model.skeleton import main_dtype
from lema.plan.allocate import allocated, unknown_speeds
from lema.plan.blueprint import Blueprint, draw_up
from lema.plan.cost import Allocation, Demand, HostTraining, Traffic, device_parts, host_parts, traffic
from lema.plan.machine import Machine
from lema.plan.measure import probe, process_bytes
from lema.plan.simulator import Simulated, simulate
from lema.plan.step import StepShape, Timings, by_arithmetic, demand_of, step_shape
from lema.plan.trainable_bytes import TrainedBytes, host_training
from lema.plan.workload import MicroBatch, Workload, measure

__all__ = ["Planner", "Site", "StepNeeds", "planner_of", "site_of", "workload_of"]


Chosen = Callable[[PreTrainedModel], Callable[[str], bool]]
Memory = int | float | str | None  # a limit as the settings write it


@dataclass(frozen=True)
class Site:
    """The machine that a run or a phase is planned for, as far as it is known."""

    machine: Machine  # its memory in bytes and, unless `speeds` is `unknown`, its speeds
    host_available: int  # bytes of host memory that are free
    speeds: Literal["profile", "measured", "unknown"] = "unknown"  # `measured`: on this machine, with the model
    kept: float = 0.0  # the fraction of device memory up to which layers stay there without a limit in the settings
    process_bytes: int = 0  # bytes of host memory that interpreter and libraries take; 0: not known

    def limits(self, device_memory: Memory, host_memory: Memory) -> tuple[int, int]:
        """Return the bytes of device and of host memory that may be used: what the settings allow, or what there is."""
        device, host = self.machine.device_memory, self.machine.host_memory
        return (
            device if device_memory is None else parse_memory(device_memory, device),
            self.host_available if host_memory is None else parse_memory(host_memory, host),
        )


def site_of(
    config: LemaConfig, machine: Machine | None = None, *, backend: Backend | None = None, measured: bool = False
) -> Site:
    """Return the site that a run is planned for: that of a profile, or this machine, whose backend may be open already.

    A planner measures the speeds of this machine if it is to be `measured`; else they are not known.
    """
    if machine is not None:
        return Site(machine, machine.host_memory, "profile", kept_unasked(config.device))
    if backend is not None:
        return _this_machine(backend, measured=measured)
    with closing(_alone(config) if measured else open_backend(config)) as opened:
        return _this_machine(opened, measured=measured)


def _this_machine(backend: Backend, *, measured: bool) -> Site:
    memory, host_total = backend.memory(), psutil.virtual_memory().total
    available = min(backend.replicas.exchange(memory_available()))  # processes that share a machine must agree
    machine = Machine(backend.name, memory.total, host_total, unknown_speeds(shared=memory.shared), 0.0, 0.0)
    return Site(machine, available, "measured" if measured else "unknown", kept_unasked(backend))


def _alone(config: LemaConfig) -> Backend:
    """Open the backend for one process, which measures what each of several would see: they need not be there."""
    alone = {"tensor_parallel_size": 1, "sequence_parallel": False} if planned_parallel(config).size > 1 else {}
    return open_backend(config.model_copy(update=alone))


@dataclass(frozen=True)
class Planner:
    """A model and a machine, for which steps of any shape can be planned."""

    config: LemaConfig  # the settings of the run or of the phase
    blueprint: Blueprint  # its model, and what of it trains
    site: Site  # the machine
    workload: Workload | None  # what one micro-batch of `shape` costs; None: it cannot be told, so weights alone count
    timings: Timings | None  # the seconds of such a micro-batch; None: speeds are not known
    shape: StepShape  # the rows and tokens of a step, of one process
    processes: int = 1  # how many share each batch, all of them on one machine
    device_memory: Memory = None  # the limit of a phase that trains weights, which has none in `config`
    note: str = ""  # what is not counted, and why; empty: everything is

    @property
    def limits(self) -> tuple[int, int]:
        """Bytes of device and of host memory that may be used."""
        device = self.config.device_memory if self.device_memory is None else self.device_memory
        return self.site.limits(device, self.config.host_memory)

    def demand(self, shape: StepShape | None = None, workload: Workload | None = None, scale: float = 1.0) -> Demand:
        """Return the bytes of memory and the seconds of computing that one optimizer step needs, layer by layer.

        Its shape and the workload of a micro-batch are the run's where there is None; such a micro-batch computes
        `scale` times as long as one of the run's.
        """
        workload = workload or self.workload
        known = demand_of(
            self.blueprint.layers,
            workload,
            None if self.timings is None else self.timings.times(scale),
            None if workload is None else shape or self.shape,
            outside_bytes=self.blueprint.outside_bytes,
            adapter_bytes=self.blueprint.adapter_bytes,
            lowest=self.blueprint.lowest_adapted,
            shared=self.site.machine.shared,
            trained=self.blueprint.trained,
            pieces=self.blueprint.pieces,
        )
        rows = self.blueprint.tables.row_bytes * (shape or self.shape).tokens
        return replace(known, processes=self.processes * self.blueprint.parallel.size, row_bytes=rows)

    def allocation(self, demand: Demand, **changes: Any) -> Allocation:
        """Return which layers, activations and inputs of layers memory is spent on, with some settings changed.

        Seconds decide only where a limit of device memory leaves a choice, since a run measures only then; else the
        bytes that move do.

        Raises:
            MemoryLimitError: it does not fit.
        """
        config, machine, speeds = self.config.model_copy(update=changes), self.site.machine, self.site.machine.speeds
        if config.device_memory is None or not config.gradient_checkpointing:
            demand, speeds = _untimed(demand), unknown_speeds(shared=machine.shared)
        memory = machine.device_memory, machine.host_memory, self.site.host_available
        kept = self.site.kept if self.blueprint.trained is None else 0.0  # weights that train pass through
        try:
            return allocated(config, demand, speeds, *memory, kept=kept)
        except MemoryLimitError as error:
            if self.blueprint.trained is not None:  # nothing of what the error advises can be set in such a phase
                error.how = "allow that much, or train adapters: their base streams from the disk"
            raise

    def needs(self) -> StepNeeds:
        """Return what a step of the run takes of memory, and what memory is spent on, or raise a MemoryLimitError."""
        demand = self.demand()
        allocation = self.allocation(demand)
        if (trained := self.blueprint.trained) is not None:
            demand = replace(demand, training=self._host_training(demand, allocation, trained))
            self._check_device(demand, allocation)
        return StepNeeds(self, demand, allocation)

    def simulated(self, demand: Demand, allocation: Allocation) -> Simulated:
        """Return the seconds and bytes of one step in the middle of a run."""
        return simulate(demand, allocation, self.site.machine.speeds)

    def fits(self, demand: Demand) -> bool:
        """Whether a step fits the limits, those of the settings and those of the machine."""
        try:
            allocation = self.allocation(demand)
        except MemoryLimitError:
            return False
        return sum(device_parts(demand, allocation).values()) <= self.site.machine.device_memory

    def _host_training(self, demand: Demand, allocation: Allocation, trained: TrainedBytes) -> HostTraining:
        """Return the bytes that masters and moments take of host memory, as many of them in files as has to be."""
        cached = sum(demand.layers[index].slot_bytes for index in allocation.host_cached)
        there = cached + demand.outside_bytes * demand.shared
        settings = {"clipped": self.config.max_grad_norm is not None, "shared": demand.shared}
        try:
            return host_training(trained, there, self.limits[1], **settings, processes=demand.processes)
        except MemoryLimitError as error:
            limited = self.config.host_memory is not None
            where = "host_memory" if limited else "memory available on this machine"
            how = f"{error.how}: of these {there:,} are the weights as they stream"
            raise MemoryLimitError(error.what, where=where, how=how) from error

    def _check_device(self, demand: Demand, allocation: Allocation) -> None:
        """Raise a MemoryLimitError where weights that train take more device memory than there is."""
        parts, limit, rows = device_parts(demand, allocation), self.limits[0], self.shape.micro_batch.rows
        if (needed := sum(parts.values())) <= limit:
            return
        options = []
        if not self.config.gradient_checkpointing:
            options.append(f"gradient_checkpointing: true ({parts['saved']:,} bytes less)")
        if rows > 1:
            options.append(f"micro_batch_size: 1 (about {parts['working'] * (rows - 1) // rows:,})")
        if parts["adapters"]:
            options.append(f"a selection without embeddings and head ({parts['adapters']:,})")
        if allocation.slots > 1:
            options.append(f"prefetch_depth: {allocation.slots - 2} ({parts['slots'] // allocation.slots:,})")
        raise MemoryLimitError(
            f"training these weights takes {needed:,} bytes of device memory, and there are {limit:,}",
            where="device_memory",
            how=f"{', or '.join(options) or 'lower max_length'}; of it {parts['slots']:,} bytes are layers passing "
            f"through, {parts['gradients']:,} their gradients, {parts['working']:,} one micro-batch in one layer",
        )


def _untimed(demand: Demand) -> Demand:
    """Return a demand of which only the bytes are known."""
    layers = tuple(replace(layer, expand=0.0, forward=0.0, recompute=0.0, backward=0.0) for layer in demand.layers)
    return replace(demand, layers=layers, turn=0.0, rest=0.0)


@dataclass(frozen=True)
class StepNeeds:
    """What a step of a run or of a phase takes of memory, and what memory is spent on."""

    planner: Planner  # that says so
    demand: Demand  # the bytes and seconds of a step
    allocation: Allocation  # what memory is spent on

    @cached_property
    def device(self) -> dict[str, int]:
        """Bytes of device memory at the peak, by part."""
        return device_parts(self.demand, self.allocation)

    @cached_property
    def host(self) -> dict[str, int]:
        """Bytes of host memory at the peak, by part, of all processes, beside those of a device that computes in it."""
        parts = host_parts(self.demand, self.allocation)
        if (trained := self.planner.blueprint.trained) is not None:  # each process writes to a copy of its own
            own = sum(layer.slot_bytes for layer, names in zip(self.demand.layers, trained.names, strict=True) if names)
            parts["cached"] += (self.demand.processes - 1) * own
        return parts

    @property
    def mapped(self) -> int:
        """Bytes in files that are mapped into memory, of all processes."""
        return self.demand.processes * self.demand.training.mapped

    @property
    def seconds(self) -> float | None:
        """Seconds of a step; None: speeds are not known."""
        planner = self.planner
        return None if planner.timings is None else planner.simulated(self.demand, self.allocation).seconds

    def traffic(self, steps: int) -> Traffic:
        """Return the bytes that so many steps read, upload and download, with those before the first of them."""
        return traffic(self.demand, self.allocation, steps, rewritten=self.planner.blueprint.trained is not None)


def planner_of(
    config: LemaConfig,
    machine: Machine | None = None,
    *,
    site: Site | None = None,
    chosen: Chosen | None = None,
    device_memory: Memory = None,
    processes: int = 1,
    strict: bool = True,
    trust_remote_code: bool = False,
) -> Planner:
    """Learn what the model of a run or phase needs, and what the machine gives; weights are read only to time them.

    Args:
        machine: the profile to plan for; None: this machine, which is measured, or of which `site` is known.
        chosen: given the model, returns what says of a parameter's name whether it trains; None: adapters do.
        device_memory: the limit of a phase that trains weights, which has none in `config`.
        processes: that share each batch, all of them on one machine.
        strict: whether a model whose activations cannot be told is an error; else weights alone are counted.

    Raises `ConfigError` as training would.
    """
    parallel = SingleProcess() if chosen is not None else planned_parallel(config)
    with ExitStack() as stack:
        backend = None
        if machine is not None:
            site = site_of(config, machine)
        if site is None or site.speeds == "measured":
            backend = stack.enter_context(closing(_alone(config)))
            site = site or _this_machine(backend, measured=True)
        blueprint = draw_up(
            config, backend=backend, trust_remote_code=trust_remote_code, chosen=chosen, parallel=parallel
        )
        positions = getattr(blueprint.model.config, "max_position_embeddings", None)
        shape = step_shape(config, positions, processes, parts=parallel.size)
        workload, timings, note = None, None, ""
        try:
            workload = workload_of(blueprint, shape.micro_batch, config)
        except ModelError as error:
            if strict:
                raise
            note = f"{error.what}: neither activations nor hours are counted"
        if workload is not None and backend is not None:
            measured, timings = probe(blueprint, workload, config, shape, backend)
            # The process is looked at with what computing a layer has left behind in it, as it does in training.
            site = replace(site, machine=measured, process_bytes=process_bytes())
        elif workload is not None and site.speeds == "profile":
            timings = by_arithmetic(workload, blueprint.layers, site.machine, main_dtype(blueprint.model).itemsize)
    planner = Planner(config, blueprint, site, workload, timings, shape, processes, device_memory, note)
    return planner if blueprint.head.module is None else _with_head(planner)


def _with_head(planner: Planner) -> Planner:
    """Return the planner with the head where a run would have it: in pieces if it is asked for or does not fit."""
    blueprint, head = planner.blueprint, planner.blueprint.head
    if not head.asked:
        whole = replace(blueprint, outside_bytes=blueprint.outside_bytes + head.nbytes)
        on_device = replace(planner, blueprint=whole)
        with suppress(MemoryLimitError):
            on_device.allocation(on_device.demand())
            head.keep_whole(blueprint.tables)
            return on_device
    return replace(planner, blueprint=replace(blueprint, pieces=head.pieces(blueprint.layers)))


def workload_of(blueprint: Blueprint, batch: MicroBatch, config: LemaConfig) -> Workload:
    """Return the bytes and operations of one micro-batch of a model; errors as `measure`."""
    names, (model, layers) = blueprint.names, (blueprint.model, blueprint.layers)
    return measure(model, layers, batch, config.loss_chunk_tokens, names, blueprint.parallel, blueprint.head)
