"""What one phase of a run needs: memory by part, bytes that move in a step, and seconds where speeds are known."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace

import psutil
from transformers import PreTrainedModel

from lema.backend import Backend
from lema.backend.hostmemory import memory_left
from lema.config import LemaConfig
from lema.config.units import parse_memory
from lema.errors import MemoryLimitError, ModelError
from lema.model.partition import open_backend
from lema.plan.allocate import UNKNOWN_DISK, UNKNOWN_LINK, allocated
from lema.plan.blueprint import Blueprint, draw_up
from lema.plan.cost import Allocation, Demand, Speeds, device_parts, fetches, host_parts, saved_elsewhere
from lema.plan.machine import Machine
from lema.plan.measure import probe
from lema.plan.simulator import simulate
from lema.plan.step import StepShape, Timings, by_arithmetic, demand_of, step_shape, untimed
from lema.plan.trainable_bytes import TrainedBytes, host_training
from lema.plan.workload import MicroBatch, Workload, measure
from lema.stream.schedule import fetched, training_order

__all__ = ["Moved", "PhaseNeeds", "Place", "place_of", "plan_phase"]


Chosen = Callable[[PreTrainedModel], Callable[[str], bool]]


@dataclass(frozen=True)
class Moved:
    """Bytes.

    Attributes:
        read: of weights, from disk.
        uploaded: to the device, of weights and of activations that come back.
        downloaded: from the device, of gradients and of activations that wait elsewhere.
    """

    read: int
    uploaded: int
    downloaded: int


@dataclass(frozen=True)
class Place:
    """Where a phase is to run.

    Attributes:
        machine: its memory, and its speeds where they are known.
        host_available: bytes of host memory that are free.
        told: whether speeds are a profile's.
        measured: whether speeds are measured, for each phase; without either they are not known.
    """

    machine: Machine
    host_available: int
    told: bool = False
    measured: bool = False


@dataclass(frozen=True)
class PhaseNeeds:
    """What a phase needs.

    Attributes:
        blueprint: its model.
        shape: of its steps.
        allocation: what memory is spent on.
        device: bytes of device memory by part.
        host: bytes of host memory by part; where the device computes in it, beside the device's.
        mapped: bytes in files that are mapped into memory.
        begin: bytes that move before the first step.
        first: in the first step.
        later: in each other step.
        seconds: of a step; None: speeds are not known.
        shared: whether the device computes in host memory.
        note: what is not counted, and why; empty: everything is.
    """

    blueprint: Blueprint
    shape: StepShape
    allocation: Allocation
    device: dict[str, int]
    host: dict[str, int]
    mapped: int
    begin: Moved
    first: Moved
    later: Moved
    seconds: float | None
    shared: bool
    note: str

    def moved(self, steps: int) -> Moved:
        """Return the bytes that so many steps move, with those before them."""

        def total(what: str) -> int:
            first, later = getattr(self.begin, what) + getattr(self.first, what), getattr(self.later, what)
            return int(first + (steps - 1) * later)

        return Moved(total("read"), total("uploaded"), total("downloaded"))


def place_of(
    config: LemaConfig, machine: Machine | None = None, *, measured: bool = False, backend: Backend | None = None
) -> Place:
    """Return the place a run is planned for: a machine's profile, or this machine, with or without its speeds.

    Args:
        config: names the device.
        machine: to plan for; None: this one.
        measured: the speeds are measured for each phase.
        backend: the device, opened; None: it is opened here.
    """
    if machine is not None:
        return Place(machine, machine.host_memory, told=True)
    with nullcontext(backend) if backend is not None else closing(open_backend(config)) as device:
        memory, host = device.memory(), psutil.virtual_memory()
        speeds = Speeds(UNKNOWN_DISK) if memory.shared else Speeds(UNKNOWN_DISK, UNKNOWN_LINK)
        left = memory_left()
        available = host.available if left is None else min(host.available, left)
        available = min(device.replicas.exchange(available))  # processes that share a machine must agree
        return Place(Machine(device.name, memory.total, host.total, speeds, 0.0, 0.0), available, False, measured)


def plan_phase(
    config: LemaConfig,
    place: Place,
    *,
    chosen: Chosen | None = None,
    device_memory: int | float | str | None = None,
    processes: int = 1,
    trust_remote_code: bool = False,
) -> PhaseNeeds:
    """Tell what a phase needs before it starts; no weights are read but to time them.

    Args:
        config: of the phase: its batch, micro-batch and length, and its adapters.
        place: where it is to run.
        chosen: given the model, returns what says of a parameter's name whether it trains; None: adapters do.
        device_memory: the limit of a phase of weights, which has none in `config`.
        processes: that share a batch, all of one machine.
        trust_remote_code: as in `LemaModel`.

    Raises:
        MemoryLimitError: a limit, or the memory there is, is too small.
        ConfigError: as training would raise it.
    """
    backend = open_backend(config) if place.measured else None
    try:
        blueprint = draw_up(config, backend=backend, trust_remote_code=trust_remote_code, chosen=chosen)
        shape = step_shape(config, getattr(blueprint.model.config, "max_position_embeddings", None), processes)
        names = () if blueprint.trained is None else blueprint.trained.names
        machine, timings, workload, note = place.machine, None, None, ""
        try:
            workload = measure(blueprint.model, blueprint.layers, shape.micro_batch, config.loss_chunk_tokens, names)
        except ModelError as error:
            note = f"{error.what}: neither activations nor hours are counted"
        if workload is not None and backend is not None:
            machine, timings = probe(blueprint, workload, config, shape, backend)
        elif workload is not None and place.told:
            timings = by_arithmetic(workload, blueprint.layers, machine, blueprint.model.dtype.itemsize)
    finally:
        if backend is not None:
            backend.close()
    demand = replace(_demand(blueprint, workload, timings, shape, shared=machine.shared), processes=processes)
    try:
        allocation = _allocation(config, machine, demand, place.host_available)
    except MemoryLimitError as error:
        if chosen is not None:  # of what it advises a phase of weights has nothing to choose
            error.how = "allow that much, or train adapters: their base streams from the disk"
        raise
    if (trained := blueprint.trained) is not None:
        allowed = _limit(config.host_memory, machine.host_memory, place.host_available)
        demand = _with_training(demand, allocation, trained, config, allowed)
        on_device = _limit(device_memory, machine.device_memory, machine.device_memory)
        _check_device(config, demand, allocation, on_device, shape.micro_batch)
    known, in_host = timings is not None, host_parts(demand, allocation)
    if trained is not None and processes > 1:  # each writes to its own
        in_host["cached"] += (processes - 1) * _slots(demand, [index for index, own in enumerate(trained.names) if own])
    order = training_order(len(demand.layers), demand.lowest)
    return PhaseNeeds(
        blueprint,
        shape,
        allocation,
        device_parts(demand, allocation),
        in_host,
        processes * demand.training.mapped,
        _begun(blueprint, demand, allocation),
        _in_step(demand, allocation, order, None),
        _in_step(demand, allocation, order, demand.lowest if blueprint.trained is None else None),
        simulate(demand, allocation, machine.speeds).seconds if known else None,
        machine.shared,
        note,
    )


def _demand(
    blueprint: Blueprint, workload: Workload | None, timings: Timings | None, shape: StepShape, *, shared: bool
) -> Demand:
    return demand_of(
        blueprint.layers,
        workload,
        timings,
        None if workload is None else shape,
        outside_bytes=blueprint.outside_bytes,
        adapter_bytes=blueprint.adapter_bytes,
        lowest=blueprint.lowest_adapted,
        shared=shared,
        trained=blueprint.trained,
    )


def _allocation(config: LemaConfig, machine: Machine, demand: Demand, host_available: int) -> Allocation:
    speeds = machine.speeds
    if config.device_memory is None or not config.gradient_checkpointing:
        demand = untimed(demand)
        speeds = Speeds(UNKNOWN_DISK) if machine.shared else Speeds(UNKNOWN_DISK, UNKNOWN_LINK)
    return allocated(config, demand, speeds, machine.device_memory, machine.host_memory, host_available)


def _with_training(
    demand: Demand, allocation: Allocation, trained: TrainedBytes, config: LemaConfig, allowed: int
) -> Demand:
    """Add what masters and moments take of host memory, as much in files as has to be.

    Raises:
        MemoryLimitError: what cannot be in files does not fit; says what would.
    """
    clipped, shared = config.max_grad_norm is not None, demand.shared
    there = _slots(demand, allocation.host_cached) + demand.outside_bytes * shared
    count = demand.processes
    try:
        training = host_training(trained, there, allowed, clipped=clipped, shared=shared, processes=count)
    except MemoryLimitError as error:
        where = "host_memory" if config.host_memory is not None else "memory available on this machine"
        how = f"{error.how}: of these {there:,} are the weights as they stream"
        raise MemoryLimitError(error.what, where=where, how=how) from error
    return replace(demand, training=training)


def _check_device(
    config: LemaConfig, demand: Demand, allocation: Allocation, limit: int, micro_batch: MicroBatch
) -> None:
    parts = device_parts(demand, allocation)
    if (needed := sum(parts.values())) <= limit:
        return
    options = []
    if not config.gradient_checkpointing:
        options.append(f"gradient_checkpointing: true ({parts['saved']:,} bytes less)")
    if micro_batch.rows > 1:
        options.append(f"micro_batch_size: 1 (about {parts['working'] * (micro_batch.rows - 1) // micro_batch.rows:,})")
    if parts["adapters"]:
        options.append(f"a selection without embeddings and head ({parts['adapters']:,})")
    if allocation.slots > 1:
        options.append(f"prefetch_depth: {allocation.slots - 2} ({parts['slots'] // allocation.slots:,})")
    raise MemoryLimitError(
        f"training these weights takes {needed:,} bytes of device memory, and there are {limit:,}",
        where="device_memory",
        how=f"{', or '.join(options) or 'shorten block_size'}; of it {parts['slots']:,} bytes are layers passing "
        f"through, {parts['gradients']:,} their gradients, {parts['working']:,} one micro-batch in one layer",
    )


def _begun(blueprint: Blueprint, demand: Demand, allocation: Allocation) -> Moved:
    """Return what is read and uploaded once: what lies outside the layers, and layers that stay."""
    kept = allocation.residents | allocation.host_cached
    read = blueprint.outside_bytes + sum(demand.layers[index].read_bytes for index in kept)
    stay = sum(demand.layers[index].upload_bytes for index in allocation.residents)
    return Moved(read, 0 if demand.shared else blueprint.outside_bytes + stay, 0)


def _in_step(demand: Demand, allocation: Allocation, order: tuple[int, ...], lowest: int | None) -> Moved:
    """Return what one step moves.

    Args:
        demand: of it.
        allocation: what memory is spent on.
        order: of its leases.
        lowest: the lowest layer that gradients reach, of a step after many others; None: nothing is there from the step
            before, as when its layers have been written to.
    """
    cached, stay = allocation.residents | allocation.host_cached, allocation.residents

    def layers(held: frozenset[int]) -> tuple[int, ...]:
        if lowest is None:
            return fetched(order, allocation.slots, held)
        return sum(fetches(len(demand.layers), allocation.slots, held, lowest), ())

    read = sum(demand.layers[index].read_bytes for index in layers(cached))
    if demand.shared:
        return Moved(read, 0, 0)
    uploaded = sum(demand.layers[index].upload_bytes for index in layers(stay))
    gone = sum(saved_elsewhere(demand, allocation).values())
    if allocation.boundaries != "device":
        kept = len(allocation.saved.intersection(demand.visited_twice))
        gone += (len(demand.visited_twice) - kept) * demand.boundary_bytes
    return Moved(read, uploaded + gone, sum(layer.gradient_bytes for layer in demand.layers) + gone)


def _slots(demand: Demand, layers: Iterable[int]) -> int:
    return sum(demand.layers[index].slot_bytes for index in layers)


def _limit(setting: int | float | str | None, total: int, otherwise: int) -> int:
    return otherwise if setting is None else parse_memory(setting, total)
