"""What the steps of a run, or of one of its phases, need: memory, what moves in them, and how long
they take.

A planner knows a model and a machine. It plans runs that train adapters and phases that train
weights of the model: the blueprint knows which.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from lema.backend import Backend
from lema.backend.torchrun import local_processes
from lema.config import LemaConfig
from lema.engine.head.loss import CHUNK_TOKENS
from lema.engine.optim import moments_elsewhere
from lema.errors import MemoryLimitError
from lema.model.outer_weights import buffer_bytes
from lema.plan.allocate import (
    allocated,
    of_one_process,
    surely_fits,
    untimed,
    whether_recomputed,
)
from lema.plan.blueprint import Blueprint
from lema.plan.cost import Allocation, Demand, Traffic, traffic
from lema.plan.groups import with_waiting
from lema.plan.machine import MachineState, Memory, unknown_speeds
from lema.plan.memory import device_parts, host_parts
from lema.plan.simulation.simulator import Simulated, simulate
from lema.plan.work.chunk_work import in_chunks
from lema.plan.work.long_rows import lengthened, run_length
from lema.plan.work.step import StepShape, Timings, demand_of
from lema.plan.work.trainable_bytes import training_of
from lema.plan.work.workload import MicroBatch, Workload, long_head_in_pieces, measure

__all__ = ["Planner", "StepNeeds"]


@dataclass(frozen=True)
class Planner:
    """A model and a machine, for which steps of any shape can be planned."""

    config: LemaConfig  # the settings of the run or of the phase
    blueprint: Blueprint  # its model, and what of it trains
    machine_state: MachineState  # the machine
    # what one micro-batch of `shape` costs; None: it cannot be told, so weights alone count
    workload: Workload | None
    timings: Timings | None  # the seconds of such a micro-batch; None: speeds are not known
    shape: StepShape  # the rows and tokens of a step, of one process
    processes: int = 1  # how many share each batch, all of them on one machine
    # the limit of a phase that trains weights, which has none in `config`
    device_memory: Memory = None
    note: str = ""  # what is not counted, and why; empty: everything is
    # that a model is open on, whose processes plan together; None: it is not open
    backend: Backend | None = None
    # whether the plan has chosen how many tokens go through a layer at once
    chooses_chunk: bool = False
    # whether it has chosen where keys and values wait between chunks
    chooses_keys: bool = False
    # whether it has chosen of how many tokens MLPs run at once
    chooses_tile: bool = False
    # what was looked at already
    workload_cache: dict[tuple[MicroBatch, int, bool], Workload] = field(default_factory=dict)

    @property
    def limits(self) -> tuple[int, int]:
        """Bytes of device and of host memory that may be used."""
        device = self.config.device_memory if self.device_memory is None else self.device_memory
        return self.machine_state.limits(device, self.config.host_memory)

    @property
    def keys_are_open(self) -> bool:
        """Whether the plan chooses where keys and values of the layer at work wait: rows may go
        through it in chunks, on a device with memory of its own."""
        config = self.config
        return (
            config.keys_values == "auto"
            and config.sequence_chunk is not None
            and config.context_parallel_size is None
            and not self.machine_state.machine.shared
            and (config.sequence_chunk == "auto" or self.shape.micro_batch.is_cut)
        )

    @property
    def surely_fits(self) -> bool:
        """Whether the device holds the run by a guess that is far too high."""
        return surely_fits(self.blueprint, self.shape, self.limits[0])

    def demand(
        self, shape: StepShape | None = None, workload: Workload | None = None, scale: float = 1.0
    ) -> Demand:
        """Return the bytes of memory and the seconds of computing that one optimizer step needs,
        layer by layer. Its shape and the workload of a micro-batch are the run's where there is
        None; such a micro-batch computes `scale` times as long as one of the run's."""
        workload = workload or self.workload
        step_demand = demand_of(
            self.blueprint.layers,
            workload,
            None if self.timings is None else self.timings.times(scale),
            None if workload is None else shape or self.shape,
            outside_bytes=self.blueprint.outside_bytes,
            adapter_bytes=self.blueprint.adapter_bytes
            + self.blueprint.reference_bytes
            - self._elsewhere(),
            lowest=self.blueprint.lowest_adapted,
            shared=self.machine_state.machine.shared,
            trained=self.blueprint.trained,
            pieces=self.blueprint.pieces,
            groups=self.blueprint.group_bytes,
        )
        rows = self.blueprint.tables.row_bytes * (shape or self.shape).tokens
        if not step_demand.shared:
            step_demand = replace(step_demand, buffer_bytes=buffer_bytes(self.blueprint.model))
        overhead = self.machine_state.machine.overhead
        step_demand = replace(
            step_demand,
            row_bytes=rows,
            expanded_bytes=self.blueprint.expanded_bytes,
            overhead=overhead,
        )
        parts = self.blueprint.parallel.size
        if self.backend is None:
            return replace(step_demand, processes=self.processes * parts)
        step_demand = of_one_process(
            step_demand, self.backend.replicas, sharded=self.config.shard_weights
        )
        copies = step_demand.processes * parts  # which more machines than this one may hold
        return replace(step_demand, processes=min(copies, local_processes() or copies))

    def _elsewhere(self) -> int:
        """Return the bytes of the adapter's optimizer that other processes hold."""
        count = self.processes if self.backend is None else self.backend.replicas.size
        adapts = self.config.shard_optimizer and self.blueprint.trained is None
        return moments_elsewhere(self.blueprint.model, count) if adapts and count > 1 else 0

    def work(self, batch: MicroBatch, chunk_tokens: int | None = None) -> Workload:
        """Return the bytes and operations of one micro-batch, or raise a ModelError: they depend
        on values.
        """
        chunk = chunk_tokens or self.config.loss_chunk_tokens or CHUNK_TOKENS
        drawn = self.blueprint
        if drawn.parts is not None:  # layers with experts in groups run without tiles
            batch = replace(batch, tile=None)
        key = (batch, chunk, bool(drawn.pieces))
        if key not in self.workload_cache:
            uncut = replace(batch, chunk=None, host_keys=False)
            self.workload_cache[key] = (
                self._cut_work(batch, chunk) if batch.is_cut else self._run(uncut, chunk)
            )
        return with_waiting(self.blueprint, batch, self.workload_cache[key])

    def least_work(self, batch: MicroBatch, chunk_tokens: int | None = None) -> Workload:
        """Return what a micro-batch of whole rows costs by what shorter ones do: its operations,
        and its bytes without those that grow with the square of a row's length."""
        chunk = chunk_tokens or self.config.loss_chunk_tokens or CHUNK_TOKENS
        length = run_length(batch.length, chunk)
        short, double = (
            self._run(
                replace(batch, length=times * length, chunk=None, host_keys=False), chunk, cut=True
            )
            for times in (1, 2)
        )
        return lengthened(short, double, batch.length / length)

    def _cut_work(self, batch: MicroBatch, chunk_tokens: int) -> Workload:
        """Return what a micro-batch costs whose rows go through layers in chunks, from what shorter
        rows and smaller chunks do."""
        drawn = self.blueprint
        config = self.config
        work = self.least_work(batch, chunk_tokens)
        if drawn.pieces:
            pieces = long_head_in_pieces(drawn.split, drawn.layers, batch, chunk_tokens, drawn.head)
            work = replace(work, pieces=pieces)
        on_device = config.cache_frozen_prefix or config.context_parallel_size is not None
        return in_chunks(
            *(work, drawn.split, drawn.layers, batch),
            rows_on_device=on_device,
            processes=config.context_parallel_size or 1,
            runs=drawn.chunk_runs,
        )

    def _run(self, batch: MicroBatch, chunk_tokens: int, *, cut: bool = False) -> Workload:
        """Run a micro-batch of whole rows without values, unless one like it has been run; if it
        stands for rows that are `cut`, pieces of the head are left out."""
        drawn = self.blueprint
        # which takes longest, and most heads fit whole
        head = drawn.head if drawn.pieces and not cut else None
        key = (batch, chunk_tokens, head is not None)
        if key not in self.workload_cache:
            measured = next(
                (
                    work
                    for (measured_batch, *_), work in self.workload_cache.items()
                    if measured_batch == batch
                ),
                None,
            )
            measure_args = drawn.names, drawn.parallel, head, measured, drawn.split
            work = measure(drawn.model, drawn.layers, batch, chunk_tokens, *measure_args)
            self.workload_cache[key] = work
        return self.workload_cache[key]

    def allocation(self, demand: Demand, **changes: Any) -> Allocation:
        """Return which layers, activations and inputs of layers memory is spent on, with some
        settings changed.

        Seconds decide only where a limit of device memory leaves a choice, since a run measures
        only then; else the bytes that move do. Raises `MemoryLimitError` where it does not fit.
        """
        config = self.config.model_copy(update=changes)
        machine = self.machine_state.machine
        speeds = self.machine_state.machine.speeds
        if self.blueprint.parts is not None:  # of whose layers no graph is kept
            config = config.model_copy(update={"gradient_checkpointing": True})
        recompute = whether_recomputed(config)
        if (
            config.device_memory is None
            or recompute is False
            or (recompute and config.device_memory == "auto")
        ):
            demand = untimed(demand)
            speeds = unknown_speeds(shared=machine.shared)
        memory = machine.device_memory, machine.host_memory, self.machine_state.host_available
        # weights that train pass through
        resident_fraction = (
            self.machine_state.resident_fraction if self.blueprint.trained is None else 0.0
        )
        try:
            best = allocated(
                config,
                demand,
                speeds,
                *memory,
                resident_fraction=resident_fraction,
                device_free=self.machine_state.device_free,
            )
            return replace(
                best, experts=self.blueprint.experts, runs_again=self.blueprint.runs_again
            )
        except MemoryLimitError as error:
            # nothing of what the error advises can be set in such a phase
            if self.blueprint.trained is not None:
                error.explain(
                    "allow that much, or train adapters, whose base model streams from disk"
                )
            raise

    def unlimited(self) -> Planner:
        """Return the planner of what streaming needs, whatever memory there is."""
        return replace(self, config=self.config.model_copy(update={"device_memory": None}))

    @property
    def chosen(self) -> dict[str, int | str | None]:
        """The settings of how much is computed at once, with which batches are cut so wherever
        the run goes on.
        """
        rows = self.shape.micro_batch.rows
        settings: dict[str, int | str | None] = {"loss_chunk_tokens": self.config.loss_chunk_tokens}
        if self.chooses_chunk:
            settings["sequence_chunk"] = self.shape.micro_batch.chunk
        if self.chooses_keys:
            settings["keys_values"] = self.config.keys_values
        if self.chooses_tile:
            settings["mlp_tile_tokens"] = self.shape.micro_batch.tile
        is_full = rows * self.config.gradient_accumulation_steps >= self.shape.num_rows
        return (
            settings
            if is_full or self.config.counts_tokens
            else {**settings, "micro_batch_size": rows}
        )

    def needs(self) -> StepNeeds:
        """Return what a step of the run takes of memory, and what memory is spent on, or raise a
        MemoryLimitError.
        """
        demand = self.demand()
        allocation = self.allocation(demand)
        if (trained := self.blueprint.trained) is not None:
            demand = replace(
                demand,
                training=training_of(
                    self.config,
                    trained,
                    demand,
                    allocation,
                    limits=self.limits,
                    rows=self.shape.micro_batch.rows,
                ),
            )
        return StepNeeds(self, demand, allocation)

    def simulated(self, demand: Demand, allocation: Allocation) -> Simulated:
        """Return the seconds and bytes of one step in the middle of a run."""
        return simulate(demand, allocation, self.machine_state.machine.speeds)

    def fits(self, demand: Demand) -> bool:
        """Whether a step fits the limits, those of the settings and those of the machine."""
        try:
            allocation = self.allocation(demand)
        except MemoryLimitError:
            return False
        return (
            sum(device_parts(demand, allocation).values())
            <= self.machine_state.machine.device_memory
        )


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
        """Bytes of host memory at the peak, by part, of all processes, beside those of a device
        that computes in it.
        """
        parts = host_parts(self.demand, self.allocation)
        # each process writes to a copy of its own
        if (trained := self.planner.blueprint.trained) is not None:
            private_bytes = sum(
                layer.slot_bytes
                for layer, names in zip(self.demand.layers, trained.names, strict=True)
                if names
            )
            parts["cached"] += (self.demand.processes - 1) * private_bytes
        return parts

    @property
    def mapped(self) -> int:
        """Bytes in files that are mapped into memory, of all processes."""
        return self.demand.processes * self.demand.training.mapped

    @property
    def seconds(self) -> float | None:
        """Seconds of a step; None: speeds are not known."""
        planner = self.planner
        return (
            None
            if planner.timings is None
            else planner.simulated(self.demand, self.allocation).seconds
        )

    def traffic(self, steps: int) -> Traffic:
        """Return the bytes that so many steps read, upload and download, with those before the
        first of them.
        """
        return traffic(
            self.demand,
            self.allocation,
            steps,
            rewritten=self.planner.blueprint.trained is not None,
        )
