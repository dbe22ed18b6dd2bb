"""From settings to an allocation: the limits as bytes, and what the solver makes of them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import psutil
from transformers import PreTrainedModel

from lema.backend import Backend, Replicas, kept_unasked
from lema.config import LemaConfig, MemoryStrategy, parse_memory
from lema.errors import MemoryLimitError, ModelError
from lema.optim import training_bytes
from lema.plan.probe import calibrate
from lema.plan.step import StepShape, demand_of
from lema.plan.workload import Workload, measure
from lema.processes import local_processes
from lema.skeleton import find_layers
from lema.stream.budget import solve
from lema.stream.cost import Allocation, Demand, Speeds, Tier
from lema.stream.gathered import NUM_BUFFERS
from lema.stream.parts import part_bytes
from lema.stream.placement import LayerBytes

__all__ = ["allocate", "allocated", "of_one_process"]

# Not known: then bytes moved are what counts, and those from disk most.
UNKNOWN_DISK, UNKNOWN_LINK = 1.0, 10.0


def allocate(
    config: LemaConfig,
    model: PreTrainedModel,
    layers: Sequence[LayerBytes],
    outside_bytes: int,
    backend: Backend,
    *,
    shape: StepShape | None = None,
) -> Allocation:
    """Return what the memory of a run is to be spent on.

    Without limits in the settings it is what streaming needs, and nothing is measured for it; or, with a backend on
    which layers stay unasked, as many of them as its memory holds. Where a device memory limit leaves a choice between
    layers that stay and layers that are not recomputed, disk, link and one layer of each kind are measured, which takes
    a few seconds.

    Args:
        config: of the run.
        model: the skeleton, adapters attached; the decoder layers' weights on `meta`.
        layers: its decoder layers as bytes.
        outside_bytes: of what lies outside them, on the device.
        backend: the device.
        shape: of a step, whose activations count towards the limits; None: weights and what trains alone. Of a model
            whose activations cannot be told ahead these alone count too, with a warning.

    Several processes ask for it at once, and get the same: that of the least memory any of them has. Where they hold
    layers together, layers are not timed.

    Raises:
        MemoryLimitError: the limits are too small.
    """
    name, stack = find_layers(model)
    memory, speeds, timings = backend.memory(), Speeds(UNKNOWN_DISK, UNKNOWN_LINK), None
    kept = kept_unasked(backend) if config.device_memory is None and memory.total else 0.0
    limited = config.device_memory is not None or config.host_memory is not None
    workload = None
    if shape is not None and (limited or kept):
        instead = "the memory limits are spent on weights alone" if limited else "no layer stays on the device"
        workload = _workload(config, model, layers, shape, backend, instead)
        kept = kept if workload is not None else 0.0
    if memory.shared:
        speeds = Speeds(UNKNOWN_DISK)
    to_choose = config.device_memory is not None and config.gradient_checkpointing
    to_choose = to_choose and backend.parallel.size == 1  # a layer that several run together is not timed alone
    if to_choose and workload is not None and shape is not None:
        speeds, timings = calibrate(model, layers, workload, shape, backend)
    trained = (index for index, layer in enumerate(stack) if any(one.requires_grad for one in layer.parameters()))
    demand = demand_of(
        layers,
        workload,
        timings,
        None if workload is None else shape,
        outside_bytes=outside_bytes,
        adapter_bytes=training_bytes(model, name),
        lowest=next(trained, len(layers) - 1),
        shared=memory.shared,
    )
    host = psutil.virtual_memory()
    # What processes measure differs; that they spend memory alike does not depend on it.
    told = backend.replicas.everyone((demand, speeds, memory.total, host.total, host.available))
    (demand, speeds, *_), totals = told[0], zip(*(one[2:] for one in told), strict=True)
    demand = of_one_process(demand, backend.replicas, sharded=config.shard_weights)
    of_copies = demand.processes * backend.parallel.size  # which more machines than this one may hold
    demand = replace(demand, processes=min(of_copies, local_processes() or of_copies))
    return allocated(config, demand, speeds, *map(min, totals), kept=kept)


def of_one_process(demand: Demand, replicas: Replicas, *, sharded: bool) -> Demand:
    """Return what a step needs of one of several processes, given what it needs of one alone.

    Args:
        demand: of one alone.
        replicas: the processes.
        sharded: whether each has only its part of every layer's weights; of one process, that is all.
    """
    demand, size = replace(demand, processes=replicas.local_size), replicas.size
    if not sharded or size == 1:
        return demand
    layers = []
    for layer in demand.layers:
        part = part_bytes(layer.slot_bytes, size)
        layers.append(replace(layer, slot_bytes=part, upload_bytes=part, read_bytes=math.ceil(layer.read_bytes / size)))
    largest = max(layer.slot_bytes for layer in layers)
    return replace(demand, layers=tuple(layers), gathered_bytes=NUM_BUFFERS * size * largest)


def _workload(
    config: LemaConfig,
    model: PreTrainedModel,
    layers: Sequence[LayerBytes],
    shape: StepShape,
    backend: Backend,
    instead: str,
) -> Workload | None:
    """Return what a micro-batch costs; None, with a warning: it cannot be told, and this is done instead."""
    try:
        return measure(model, layers, shape.micro_batch, config.loss_chunk_tokens, parallel=backend.parallel)
    except ModelError as error:
        warnings.warn(f"{error.what}: {instead}", stacklevel=2)
        return None


def allocated(
    config: LemaConfig,
    demand: Demand,
    speeds: Speeds,
    device_total: int,
    host_total: int,
    host_available: int,
    *,
    kept: float = 0.0,
) -> Allocation:
    """Return the best allocation within the limits that the settings set.

    Args:
        config: of the run.
        demand: what a step needs.
        speeds: of disk and link.
        device_total: bytes of the device, of which a limit may be a fraction.
        host_total: bytes of host memory, likewise.
        host_available: those of them that are free; the limit where the settings have none.
        kept: the part of the device's memory up to which layers stay where the settings have no limit for it; what
            else there is to choose stays as streaming has it, and so do layers where none fits.

    Raises:
        MemoryLimitError: the limits are too small.
    """
    device_limit = None if config.device_memory is None else parse_memory(config.device_memory, device_total)
    host_limit = None if config.host_memory is None else parse_memory(config.host_memory, host_total)
    resident, tier = config.strategy is MemoryStrategy.RESIDENT, config.offloading_tier
    boundaries = None if config.boundary_activations == "auto" else config.boundary_activations
    if config.gradient_checkpointing and tier is not None:
        boundaries = tier

    def solved(limit: int | None, where: Tier | None) -> Allocation:
        return solve(
            demand,
            speeds,
            config.prefetch_depth + 1,
            device_limit=limit,
            host_limit=host_available if host_limit is None else host_limit,
            host_cache="all" if resident else "none" if host_limit is None else "fill",
            recompute=config.gradient_checkpointing,
            boundaries=where,
            saved_on=tier or "device",
        )

    try:
        if device_limit is None and kept:
            there = min(device_total, host_available) // demand.processes if demand.shared else device_total
            with suppress(MemoryLimitError):  # then layers stream, as far as that fits
                return solved(int(kept * there), boundaries or "device")
        return solved(device_limit, boundaries)
    except MemoryLimitError as error:
        if error.where == "host_memory" and host_limit is None:
            error.where = "memory available on this machine"
        raise
