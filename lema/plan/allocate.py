"""From settings to an allocation of memory: the limits in bytes, the solver's answer, and advice where nothing fits."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import psutil
from transformers import PreTrainedModel

from lema.backend import Backend, Replicas
from lema.backend.hostmemory import memory_available
from lema.backend.registry import kept_unasked
from lema.backend.torchrun import local_processes
from lema.config import LemaConfig, MemoryStrategy
from lema.config.units import human_bytes, parse_memory
from lema.engine.head.cut import HeadCut
from lema.engine.oom import Shortage
from lema.engine.optim import training_bytes
from lema.errors import ConfigError, LemaError, MemoryLimitError, ModelError
from lema.model.skeleton import find_layers
from lema.plan.budget import solve
from lema.plan.cost import Allocation, Demand, Speeds, Tier, device_parts
from lema.plan.measure import calibrate
from lema.plan.step import StepShape, Timings, demand_of, hiding_tokens, micro_batch_of, step_shape
from lema.plan.trainable_bytes import lowest_trained
from lema.plan.workload import MicroBatch, Workload, measure
from lema.stream.gather import NUM_BUFFERS
from lema.stream.placement import LayerBytes, part_bytes

__all__ = ["PARTS", "OpenModel", "allocated", "of_one_process", "unknown_speeds"]


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


@dataclass(frozen=True)
class OpenModel:
    """A model that is about to train, for which memory is allocated."""

    config: LemaConfig
    skeleton: PreTrainedModel  # adapters attached; the decoder layers' weights on `meta`
    layers: Sequence[LayerBytes]
    outside_bytes: int  # of what lies outside the layers, on the device; beside the head, where that may be cut
    backend: Backend
    head: HeadCut

    def allocate(self, shape: StepShape | None = None) -> Allocation:
        """Return what the memory of a run is to be spent on, or raise a MemoryLimitError: the limits are too small.

        Without limits in the settings it is what streaming needs, and nothing is measured for it; or, with a backend
        on which layers stay unasked, as many of them as its memory holds. Where a device memory limit leaves a choice
        between layers that stay and layers that are not recomputed, disk, link and one layer of each kind are measured,
        which takes a few seconds. Several processes ask for it at once, and get the same: that of the least memory any
        of them has. Where they hold layers together, layers are not timed. Activations count towards the limits where
        the shape of a step is given and they can be told ahead; else weights and what trains alone, with a warning in
        the second case.
        """
        config, backend = self.config, self.backend
        speeds, timings, workload = unknown_speeds(shared=backend.memory().shared), None, None
        kept = kept_unasked(backend) if config.device_memory is None and backend.memory().total else 0.0
        limited = config.device_memory is not None or config.host_memory is not None
        if shape is not None and (limited or kept):
            try:
                workload = self._workload(shape.micro_batch, config.loss_chunk_tokens)
            except ModelError as error:
                kept = 0.0
                instead = "the memory limits are spent on weights alone" if limited else "no layer stays on the device"
                warnings.warn(f"{error.what}: {instead}", stacklevel=2)
        to_choose = config.device_memory is not None and config.gradient_checkpointing
        to_choose = to_choose and backend.parallel.size == 1  # a layer that several run together is not timed alone
        if to_choose and workload is not None and shape is not None:
            speeds, timings = calibrate(self.skeleton, self.layers, workload, shape, backend)
        if self.head.module is None or not self.head.asked:
            try:
                return self._allocated(self.demand(shape, workload, timings), speeds, kept)
            except MemoryLimitError:
                if self.head.module is None:
                    raise  # else it is cut
        return self._allocated(self.demand(shape, workload, timings, in_pieces=True), speeds, kept)

    def hiding_tokens(self) -> int:
        """Return the tokens of a step that hide reading behind computing, measured here; the same in all processes.
        Raises `ConfigError` where layers cannot be timed, `ModelError` where the model's work cannot be told."""
        config, backend = self.config, self.backend
        if backend.parallel.size > 1:
            what = "a layer that several processes run together is not timed"
            raise ConfigError(what, where="tokens_per_step: auto", how="give a number, such as 16k")
        shape = step_shape(config, getattr(self.skeleton.config, "max_position_embeddings", None))
        workload, allocation = self._workload(shape.micro_batch, config.loss_chunk_tokens), self.allocate(shape)
        speeds, timings = calibrate(self.skeleton, self.layers, workload, shape, backend)
        demand = self.demand(shape, workload, timings, in_pieces=allocation.pieces > 0)
        found = hiding_tokens(config, shape, demand, allocation, speeds) * backend.replicas.size
        return int(backend.replicas.everyone(found)[0])

    def _allocated(self, demand: Demand, speeds: Speeds, kept: float) -> Allocation:
        """Return the same allocation in all processes."""
        config, backend = self.config, self.backend
        # What processes measure differs; that they spend memory alike does not depend on it.
        host = psutil.virtual_memory().total, memory_available()
        told = backend.replicas.everyone((demand, speeds, backend.memory().total, *host))
        (demand, speeds, *_), totals = told[0], zip(*(one[2:] for one in told), strict=True)
        demand = of_one_process(demand, backend.replicas, sharded=config.shard_weights)
        of_copies = demand.processes * backend.parallel.size  # which more machines than this one may hold
        demand = replace(demand, processes=min(of_copies, local_processes() or of_copies))
        return allocated(config, demand, speeds, *map(min, totals), kept=kept)

    def advise(self, allocation: Allocation, short: Shortage) -> str:
        """Return which settings would need less device memory, and by how much, in the plan's numbers."""
        config, parts = self.config, self.backend.parallel.size
        allocation, batch = replace(allocation, slots=short.slots), micro_batch_of(config, short.rows, short.length)
        positions = getattr(self.skeleton.config, "max_position_embeddings", None)
        shape = step_shape(config, positions, self.backend.replicas.size, parts)
        if not short.rows:  # it was no micro-batch
            batch = shape.micro_batch

        def demand(batch: MicroBatch, chunk: int) -> Demand:
            step = StepShape(batch, max(shape.num_rows, batch.rows))
            alone = self.demand(step, self._workload(batch, chunk), in_pieces=allocation.pieces > 0)
            return of_one_process(alone, self.backend.replicas, sharded=config.shard_weights)

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
        options = [*_allocations(config, now, allocation), *((what, _peak(one, allocation)) for what, one in others)]
        saving = sorted(((peak - less, setting) for setting, less in options), key=lambda option: -option[0])
        named = [f"{setting} ({human_bytes(less)} less)" for less, setting in saving if less > WORTH_IT * peak]
        largest = sorted(device_parts(now, allocation).items(), key=lambda part: -part[1])[:LARGEST]
        counted = ", ".join(f"{human_bytes(size)} {PARTS[part]}" for part, size in largest if size)
        return (
            f"set {', or '.join(named) or OTHERWISE}; the plan counts {human_bytes(peak)} at the peak, of it {counted}"
        )

    def _workload(self, batch: MicroBatch, chunk_tokens: int) -> Workload:
        return measure(self.skeleton, self.layers, batch, chunk_tokens, (), self.backend.parallel, self.head)

    def demand(
        self,
        shape: StepShape | None,
        workload: Workload | None,
        timings: Timings | None = None,
        in_pieces: bool = False,
    ) -> Demand:
        """Return the bytes and seconds that a step needs, of one process alone; `in_pieces`: the head is."""
        whole = 0 if in_pieces or self.head.module is None else self.head.nbytes
        name, stack = find_layers(self.skeleton)
        return demand_of(
            self.layers,
            workload,
            timings,
            None if workload is None else shape,
            outside_bytes=self.outside_bytes + whole,
            adapter_bytes=training_bytes(self.skeleton, name),
            lowest=lowest_trained(stack),
            shared=self.backend.memory().shared,
            pieces=self.head.pieces(self.layers) if in_pieces else (),
        )


def unknown_speeds(*, shared: bool) -> Speeds:
    """Return speeds with which bytes moved are what counts, and those from disk most."""
    return Speeds(1.0) if shared else Speeds(1.0, 10.0)


def of_one_process(demand: Demand, replicas: Replicas, *, sharded: bool) -> Demand:
    """Return what a step needs of one of several processes, given what it needs of one alone; `sharded`: each has only
    its part of every layer's weights."""
    demand, size = replace(demand, processes=replicas.local_size), replicas.size
    if not sharded or size == 1:
        return demand
    layers = []
    for layer in demand.layers:
        part = part_bytes(layer.slot_bytes, size)
        layers.append(replace(layer, slot_bytes=part, upload_bytes=part, read_bytes=math.ceil(layer.read_bytes / size)))
    largest = max(layer.slot_bytes for layer in layers)
    return replace(demand, layers=tuple(layers), gathered_bytes=NUM_BUFFERS * size * largest)


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
    """Return the best allocation within the limits that the settings set, which may be fractions of the totals.

    Args:
        host_available: bytes of host memory that are free; the limit where the settings have none.
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
