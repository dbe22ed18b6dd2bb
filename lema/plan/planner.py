"""The planner of a run or of one of its phases: what a step needs of memory, what moves in it, and
how long it takes.

It plans runs that train adapters and phases that train weights of the model: the blueprint knows
which.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from transformers import PreTrainedModel

from lema.backend import Backend, SingleProcess
from lema.backend.torchrun import local_processes
from lema.config import LemaConfig
from lema.config.types import MemoryStrategy
from lema.data.forms import num_positions
from lema.engine.head.loss import CHUNK_TOKENS
from lema.engine.optim import moments_elsewhere
from lema.errors import MemoryLimitError, ModelError
from lema.model.outer_weights import buffer_bytes
from lema.model.partition import planned_parallel
from lema.model.skeleton import main_dtype
from lema.plan.allocate import (
    allocated,
    layers_stay,
    of_one_process,
    surely_fits,
    untimed,
    whether_recomputed,
)
from lema.plan.blueprint import Blueprint, draw_up
from lema.plan.cost import Allocation, Demand, Traffic, device_parts, host_parts, seconds, traffic
from lema.plan.groups import active_experts, expert_cuts, with_waiting
from lema.plan.machine import (
    Machine,
    MachineState,
    Memory,
    machine_state_of,
    open_alone,
    this_machine,
    unknown_speeds,
)
from lema.plan.measure import calibrate, estimate, probe, process_bytes
from lema.plan.simulator import Simulated, simulate
from lema.plan.step import (
    StepShape,
    Timings,
    by_arithmetic,
    demand_of,
    rows_each,
    step_shape,
)
from lema.plan.trainable_bytes import training_of
from lema.plan.workload import MicroBatch, Workload, measure

__all__ = [
    "MachineState",
    "Planner",
    "StepNeeds",
    "fitted_planner",
    "machine_state_of",
    "opened_planner",
    "planner_of",
    "timed",
]


Chosen = Callable[[PreTrainedModel], Callable[[str], bool]]
ENOUGH = 512  # tokens of a micro-batch: one of fewer computes slower than its tokens tell
WORTH_IT = 0.98  # of the seconds of a step: less at once has to be that much faster
# tokens of smaller chunks of the loss: the first may make a step faster, both may make it fit
LESS = (256, 64)


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
    # what was looked at already
    workload_cache: dict[tuple[MicroBatch, int, bool], Workload] = field(default_factory=dict)

    @property
    def limits(self) -> tuple[int, int]:
        """Bytes of device and of host memory that may be used."""
        device = self.config.device_memory if self.device_memory is None else self.device_memory
        return self.machine_state.limits(device, self.config.host_memory)

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
        head = drawn.head if drawn.pieces else None  # which takes longest, and most heads fit whole
        if (key := (batch, chunk, head is not None)) not in self.workload_cache:
            measured = next(
                (
                    work
                    for (measured_batch, *_), work in self.workload_cache.items()
                    if measured_batch == batch
                ),
                None,
            )
            measure_args = drawn.names, drawn.parallel, head, measured, drawn.split
            self.workload_cache[key] = measure(
                drawn.model, drawn.layers, batch, chunk, *measure_args
            )
        return with_waiting(self.blueprint, batch, self.workload_cache[key])

    def computing(self, rows: int, chunk_tokens: int | None) -> Planner:
        """Return the planner with so many rows, and logits of so many tokens, at once."""
        micro_batch = self.shape.micro_batch
        if (rows, chunk_tokens) == (micro_batch.rows, self.config.loss_chunk_tokens):
            return self
        batch = replace(micro_batch, rows=rows)
        return replace(
            self,
            config=self.config.model_copy(update={"loss_chunk_tokens": chunk_tokens}),
            workload=None if self.workload is None else self.work(batch, chunk_tokens),
            timings=None if self.timings is None else self.timings.times(rows / micro_batch.rows),
            shape=StepShape(batch, self.shape.num_rows),
        )

    def with_groups(self) -> Iterator[Planner]:
        """Yield the planners with whole layers, and with groups of a layer's experts, as far as
        the settings leave it open. `ConfigError`: as `expert_cuts`."""
        for blueprint in expert_cuts(self.blueprint, self.config, self.backend):
            if blueprint is self.blueprint:
                yield self
                continue
            work = self.workload
            if work is not None:
                work = with_waiting(blueprint, self.shape.micro_batch, work)
            yield replace(self, blueprint=blueprint, workload=work)

    def with_head(self, *, pieces: bool) -> Planner:
        """Return the planner with a head that may be cut in pieces, or whole on the device."""
        blueprint = self.blueprint
        head = self.blueprint.head
        if head.module is None:
            return self
        if pieces:
            cut = replace(self, blueprint=replace(blueprint, pieces=head.pieces(blueprint.leased)))
            return (
                cut
                if self.workload is None
                else replace(cut, workload=cut.work(self.shape.micro_batch))
            )
        return replace(
            self, blueprint=replace(blueprint, outside_bytes=blueprint.outside_bytes + head.nbytes)
        )

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
                error.how = "allow that much, or train adapters, whose base model streams from disk"
            raise

    def smaller(self) -> Iterator[Planner]:
        """Yield this planner, and those with less to compute at once, as far as the settings leave
        it open: with fewer rows, then with fewer logits, and only then with rows of fewer tokens
        than are enough."""
        micro_batch = self.shape.micro_batch
        chunk = self.config.loss_chunk_tokens
        counts = [micro_batch.rows, *self._fewer_rows()]
        enough = max(1, sum(rows * micro_batch.length >= ENOUGH for rows in counts))
        for row_counts in (counts[:enough], *([rows] for rows in counts[enough:])):
            yield from (self.computing(rows, chunk) for rows in row_counts)
            for chunk_tokens in LESS:
                planners = (self.computing(rows, chunk) for rows in row_counts)
                yield from (
                    planner.computing(planner.shape.micro_batch.rows, chunk_tokens)
                    for planner in planners
                    if chunk_tokens in planner._chunks()
                )

    def faster(self) -> Iterator[Planner]:
        """Yield the planners with the next fewer rows, and logits, at once, if both are open and
        compute as fast.
        """
        micro_batch = self.shape.micro_batch
        chunk = self.config.loss_chunk_tokens
        yield from (
            self.computing(rows, chunk)
            for rows in self._fewer_rows()[:1]
            if rows * micro_batch.length >= ENOUGH
        )
        yield from (
            self.computing(micro_batch.rows, chunk_tokens)
            for chunk_tokens in self._chunks()
            if chunk_tokens == LESS[0]
        )

    def _fewer_rows(self) -> list[int]:
        """Return how many rows may be computed at once instead, the most first; none where the
        settings say.
        """
        rows = self.shape.micro_batch.rows
        row_multiple = rows_each(self.config)
        counts = list[int]()
        free = (
            self.workload is not None
            and self.config.micro_batch_size is None
            and not self.config.counts_tokens
        )
        while free and rows > row_multiple:
            counts.append(rows := max(row_multiple, rows // 2 // row_multiple * row_multiple))
        return counts

    def _chunks(self) -> list[int]:
        """Return the smaller chunks of the loss with which less memory is taken; none where the
        settings say.
        """
        work = self.workload if self.config.loss_chunk_tokens is None else None
        # because no layer takes as much
        is_head_largest = work is not None and self.demand().working_bytes > work.most(0)
        return [
            chunk for chunk in LESS if is_head_largest and chunk < self.shape.micro_batch.tokens
        ]

    def unlimited(self) -> Planner:
        """Return the planner of what streaming needs, whatever memory there is."""
        return replace(self, config=self.config.model_copy(update={"device_memory": None}))

    @property
    def chosen(self) -> dict[str, int | None]:
        """The settings of how much is computed at once, with which batches are cut so wherever
        the run goes on.
        """
        rows = self.shape.micro_batch.rows
        settings = {"loss_chunk_tokens": self.config.loss_chunk_tokens}
        is_full = rows * self.config.gradient_accumulation_steps >= self.shape.num_rows
        return (
            settings
            if is_full or self.config.counts_tokens
            else {**settings, "micro_batch_size": rows}
        )

    @property
    def undecided(self) -> bool:
        """Whether a limit of device memory leaves a choice that takes seconds to be known."""
        if (limit := self.config.device_memory) is None or (
            recompute := whether_recomputed(self.config)
        ) is False:
            return False
        if recompute:
            return limit != "auto"
        demand = untimed(self.demand())
        try:
            allocation = self.allocation(demand)
        except MemoryLimitError:
            return False
        stay = layers_stay(self.config, demand, self.machine_state.free(demand.processes))
        return allocation.recompute or (stay and len(allocation.residents) < len(demand.layers))

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


def planner_of(
    config: LemaConfig,
    machine: Machine | None = None,
    *,
    machine_state: MachineState | None = None,
    chosen: Chosen | None = None,
    device_memory: Memory = None,
    processes: int = 1,
    strict: bool = True,
    trust_remote_code: bool = False,
    blueprint: Blueprint | None = None,
    workload_cache: dict[tuple[MicroBatch, int, bool], Workload] | None = None,
) -> Planner:
    """Learn what the model of a run or phase needs, and what the machine gives; weights are read
    only to time them.

    The profile to plan for is `machine`; None: this machine, which is measured, or of which
    `machine_state` is known. `chosen`, given the model, returns what says of a parameter's name
    whether it trains; None: adapters do. `device_memory` is the limit of a phase that trains
    weights, which has none in `config`. The `processes` share each batch, all of them on one
    machine. `strict`: a model whose activations cannot be told is an error; else weights alone are
    counted. Planners of one model and adapter for several machines share its `blueprint` and what
    was looked at, `workload_cache`. Raises `ConfigError` as training would.
    """
    parallel = SingleProcess() if chosen is not None else planned_parallel(config)
    with ExitStack() as stack:
        backend = None
        if machine is not None:
            machine_state = machine_state_of(config, machine)
        if machine_state is None or machine_state.speeds == "measured":
            backend = stack.enter_context(closing(open_alone(config)))
            machine_state = machine_state or this_machine(backend, measured=True)
        drawn: dict[str, Any] = {
            "trust_remote_code": trust_remote_code,
            "chosen": chosen,
            "parallel": parallel,
        }
        drawn["elsewhere"] = machine is not None
        blueprint = blueprint or draw_up(config, backend=backend, **drawn)
        positions = num_positions(blueprint.model.config)
        shape = step_shape(config, positions, processes, parts=parallel.size)
        planner = Planner(
            config, blueprint, machine_state, None, None, shape, processes, device_memory
        )
        planner = (
            planner if workload_cache is None else replace(planner, workload_cache=workload_cache)
        )
        try:
            planner = _fitted(replace(planner, workload=planner.work(shape.micro_batch)))
        except ModelError as error:
            if strict:
                raise
            planner = _fitted(
                replace(planner, note=f"{error.what}: activations and hours are not counted")
            )
        if planner.workload is not None and backend is not None and planner.blueprint.parts is None:
            measured, timings = probe(
                planner.blueprint, planner.workload, planner.config, planner.shape, backend
            )
            # The process is looked at with what computing a layer has left behind in it, as it does
            # in training.
            machine_state = replace(machine_state, machine=measured, process_bytes=process_bytes())
            planner = _fastest(replace(planner, timings=timings, machine_state=machine_state))
        elif planner.workload is not None and backend is not None:
            measured, timings = _estimated(planner, planner.workload, backend)
            planner = _fastest(
                replace(
                    planner, timings=timings, machine_state=replace(machine_state, machine=measured)
                )
            )
        elif planner.workload is not None and machine_state.speeds == "profile":
            itemsize = main_dtype(blueprint.model).itemsize
            timings = by_arithmetic(
                planner.workload, blueprint.layers, machine_state.machine, itemsize
            )
            planner = _fastest(replace(planner, timings=timings))
    if not planner.blueprint.pieces:
        blueprint.head.keep_whole(blueprint.tables)
    return planner


def opened_planner(config: LemaConfig, blueprint: Blueprint, backend: Backend) -> Planner:
    """Return the planner of a model that is open on a backend, with the least memory that any
    process has.
    """
    positions = num_positions(blueprint.model.config)
    shape = step_shape(config, positions, backend.replicas.size, blueprint.parallel.size)
    return Planner(config, blueprint, this_machine(backend), None, None, shape, backend=backend)


def fitted_planner(planner: Planner, *, trains: bool) -> Planner:
    """Return the planner of a model that is open; if it `trains`, of steps that fit and are
    fastest. Nothing is measured without a limit of memory, or where it holds all there is to choose
    from; else disk, link and one layer of each kind are, in a few seconds; of weights that train
    nothing is. Several processes ask for it at once, and get the same. Activations count where they
    can be told; else weights alone, with a warning where limits are numbers."""
    config = planner.config
    machine_state = planner.machine_state
    if planner.blueprint.trained is not None:
        with suppress(ModelError):  # which the plan of the phases tells
            planner = replace(
                planner,
                workload=None if planner.surely_fits else planner.work(planner.shape.micro_batch),
            )
        return _fitted(planner)
    limited = config.device_memory not in (None, "auto") or config.host_memory is not None
    unlimited = planner.unlimited()
    if not trains or (
        config.device_memory is None and not limited and not machine_state.resident_fraction
    ):
        if (
            trains
            and config.strategy is MemoryStrategy.RESIDENT
            and machine_state.machine.shared
            and not planner.surely_fits
        ):
            with suppress(ModelError):  # then weights and what trains count
                planner = replace(planner, workload=planner.work(planner.shape.micro_batch))
        return _fitted(unlimited if config.device_memory == "auto" else planner)
    if not limited and not machine_state.resident_fraction and planner.surely_fits:
        return _fitted(planner)
    try:
        planner = replace(planner, workload=planner.work(planner.shape.micro_batch))
    except ModelError as error:
        if limited or machine_state.resident_fraction:
            instead = (
                "the memory limits are spent only on weights"
                if limited
                else "no layer stays on the device"
            )
            warnings.warn(f"{error.what}: {instead}", stacklevel=2)
        return _fitted(
            planner
            if limited
            else replace(unlimited, machine_state=replace(machine_state, resident_fraction=0.0))
        )
    planner = _fitted(planner)
    return _fastest(timed(planner)) if planner.undecided else planner


def timed(planner: Planner) -> Planner:
    """Return the planner of a model that is open with the seconds that it takes, if they can be
    told and are not known: LEMA does not time a layer that several processes run together alone,
    and small models are not worth it."""
    blueprint = planner.blueprint
    backend = planner.backend
    machine_state = planner.machine_state
    work = planner.workload
    if (
        blueprint.parallel.size > 1
        or work is None
        or planner.timings is not None
        or backend is None
    ):
        return planner
    if blueprint.parts is None:
        measured = calibrate(blueprint, work, planner.shape, backend)
    else:
        machine, timings = _estimated(planner, work, backend)
        measured = machine.speeds, timings
    # What processes measure differs; that they spend memory alike does not depend on it.
    (speeds, timings), *_ = backend.replicas.everyone(measured)
    return replace(
        planner,
        timings=timings,
        machine_state=replace(machine_state, machine=replace(machine_state.machine, speeds=speeds)),
    )


def _estimated(planner: Planner, work: Workload, backend: Backend) -> tuple[Machine, Timings]:
    """Return this machine and the seconds of a micro-batch, of layers that the device may not
    hold whole.
    """
    blueprint = planner.blueprint
    batch = planner.shape.micro_batch
    parts = planner.blueprint.parts
    assert parts is not None
    active = active_experts(blueprint, next(iter(parts.groups)), batch)
    return estimate(blueprint, work, batch, active, backend)


def _fitted(planner: Planner) -> Planner:
    """Return the planner with as much to compute at once as fits, its layers and its head whole
    if that is possible.
    """
    candidate = planner
    head = planner.blueprint.head
    several = (
        (True,)
        if head.module is not None and head.asked
        else (False, True)[: 1 + (head.module is not None)]
    )
    for cut, pieces in ((cut, pieces) for cut in planner.with_groups() for pieces in several):
        for candidate in cut.with_head(pieces=pieces).smaller():
            try:
                candidate.needs()
            except MemoryLimitError as error:
                if "device" not in error.where:
                    break
            else:
                return candidate
    return candidate  # which says why it does not fit, when it is asked


def _fastest(planner: Planner) -> Planner:
    """Return the planner with fewer rows, or fewer logits, at once as long as a step is then
    faster, for what else memory goes to."""
    # Not by seconds that differ from run to run, where sums must not: how many rows they are over
    # groups additions.
    if not planner.undecided or planner.config.deterministic:
        return planner
    best = planner
    least = _seconds(planner)
    while candidates := [
        (taken, candidate)
        for candidate in best.faster()
        if (taken := _seconds(candidate)) < WORTH_IT * least
    ]:
        least, best = min(candidates, key=lambda pair: pair[0])
    return best


def _seconds(planner: Planner) -> float:
    demand = planner.demand()
    return seconds(demand, planner.allocation(demand), planner.machine_state.machine.speeds)
