"""The plan of a run: its memory, its speed, its limits, and the gain from more memory."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

from lema.config import LemaConfig
from lema.config.units import human_bytes, human_count
from lema.data import Batches, TokenDataset
from lema.data.forms import beyond_positions, num_positions
from lema.data.preference import PreferenceDataset
from lema.engine.head.loss import CHUNK_TOKENS
from lema.engine.packing import Packs, packs_of
from lema.errors import ConfigError, MemoryLimitError
from lema.lora.files import with_adapter
from lema.model.files import ModelFiles, training_rows
from lema.model.skeleton import main_dtype
from lema.model.towers.stacks import uncounted
from lema.plan.cost import Allocation, Demand, crossover, phases, saved_elsewhere
from lema.plan.divided_rows import divided_note
from lema.plan.groups import ExpertSummary, expert_summary
from lema.plan.lengths import LongRows, long_rows
from lema.plan.machine import Machine
from lema.plan.planner import Planner, StepNeeds, planner_of, timed
from lema.plan.simulation.simulator import Simulated
from lema.plan.work.chunk_work import chunks_note
from lema.plan.work.step import StepShape, step_shape
from lema.plan.work.tiles import tiles_note
from lema.plan.work.workload import MicroBatch, Workload, grown
from lema.storage.quantized.formats import LIBRARY
from lema.stream.placement import LayerBytes

__all__ = [
    "MOST_ADAPTERS",
    "Plan",
    "brief",
    "hiding_tokens",
    "make_plan",
    "most_adapters",
    "plan_with",
    "step_curve",
    "verdict_of",
]

Rows: TypeAlias = TokenDataset | PreferenceDataset  # that a run trains on


GB = 10**9
BOTTLENECKS = {"compute": "computing", "link": "the link", "disk": "the disk"}
MOST_TOKENS = 1 << 24  # per step; larger steps are not looked for
MOST_ADAPTERS = 1024  # more are not looked for
CURVE = 33  # points
JSON_FIELDS = (  # of a plan
    *(
        "machine",
        "measured",
        "itemsize",
        "tokens",
        "micro_batch",
        "allocation",
        "memory",
        "step",
        "room",
        "epoch",
    ),
    *("experts", "notes", "tokens_per_second", "long_rows"),
)


@dataclass(frozen=True)
class PlannedMemory:
    """Bytes of memory by part, and how many may be used."""

    device: dict[str, int]  # of device memory
    host: dict[str, int]  # of host memory
    disk: dict[str, int]  # of disk space
    device_limit: int  # of device memory, by the settings or else by the machine
    host_limit: int  # of host memory, by the settings or else by the machine


@dataclass(frozen=True)
class Headroom:
    """What larger steps, or more memory, would give."""

    # tokens per step from which on moving weights is hidden; None: there is nothing to hide
    crossover: float | None
    largest_micro_batch: int  # rows that still fit
    largest_step: int  # tokens per step that still fit
    # seconds that each GB more of device memory, enough for a layer, would save in each step
    gigabyte_on_device: float
    gigabyte_in_host: float  # seconds that each GB more of host memory would save in each step
    adapter_bytes: int  # of device memory: the run's adapter, its gradients and AdamW's moments
    # such adapters that fit at once beside the weights, as a learner has them; 0: the run has none
    adapters: int


@dataclass(frozen=True)
class Epoch:
    """One pass over the training data."""

    rows: int  # of the data
    tokens: int  # of these rows
    steps: int  # optimizer steps
    hours: float  # they take
    cost: float | None  # at the price given; None: none was
    run_steps: int  # optimizer steps of the run, which may be more epochs than one, or less
    # an epoch would take if its rows were packed; None: they are, or cannot be
    packed_hours: float | None

    @property
    def run_hours(self) -> float:
        """Hours that the run takes."""
        return self.hours * self.run_steps / self.steps


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
    epoch: Epoch | None  # of the training data; None: the settings name none
    experts: ExpertSummary | None  # of its model; None: it has none
    notes: tuple[str, ...]  # what a reader should know
    needs: StepNeeds = field(repr=False, compare=False)  # that it was made of

    @cached_property
    def room(self) -> Headroom:
        """What larger steps, or more memory, would give; found out when it is asked for, as by
        two more plans.
        """
        return _headroom(self.needs, self.memory, self.step.seconds)

    @cached_property
    def long_rows(self) -> LongRows | None:
        """What rows take that go through layers in chunks, and how long they may become; None: no
        row does.
        """
        return long_rows(self.needs.planner)

    @property
    def crossover(self) -> float | None:
        """Tokens per step from which on moving weights is hidden; None: there is nothing to
        hide.
        """
        return _crossover(self.needs)

    @property
    def host_peak(self) -> int:
        """Bytes of host memory; with those of the device where it computes in it."""
        memory = self.memory
        # the ring is the slots
        on_device = (self.step.device_peak - memory.device["slots"]) * self.machine.shared
        return sum(memory.host.values()) + on_device

    @property
    def fits(self) -> bool:
        """Whether the machine has the memory that the run takes, on the device and in the host."""
        machine = self.machine
        return (
            self.step.device_peak <= machine.device_memory and self.host_peak <= machine.host_memory
        )

    @property
    def verdict(self) -> str:
        """Say in one sentence whether the run fits, what limits it, and what to change."""
        taken = (
            f"{human_bytes(self.step.device_peak)} of {human_bytes(self.memory.device_limit)} "
            "of device memory"
        )
        if not self.fits:
            how = (
                "lower max_length or batch_size, or set gradient_checkpointing and "
                "device_memory: auto"
            )
            return (
                f"does not fit: it needs {taken} and {human_bytes(self.host_peak)} of host "
                f"memory; {how}"
            )
        if not self.step.seconds:
            return f"fits, with {taken}"
        packed = None if self.epoch is None else self.epoch.packed_hours
        gain = None if self.epoch is None or not packed else self.epoch.hours / packed
        tokens = self.tokens if self.epoch is None else self.epoch.tokens / self.epoch.steps
        return f"fits, with {taken}; " + _limited(
            BOTTLENECKS[self.step.bottleneck], self.crossover, tokens, gain
        )

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens that the run trains on in a second, padding included; None: nothing has been
        timed.
        """
        return self.tokens / self.step.seconds if self.step.seconds else None

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain JSON types; what is infinite or unknown is None."""
        record = {name: getattr(self, name) for name in JSON_FIELDS}
        record |= {"bottleneck": self.step.bottleneck}
        record |= {"device_peak": self.step.device_peak, "host_peak": self.host_peak}
        record |= {"fits": self.fits, "verdict": self.verdict}
        return {key: _plain(value) for key, value in record.items()}


def make_plan(
    config: LemaConfig,
    machine: Machine | None = None,
    *,
    price: float | None = None,
    trust_remote_code: bool = False,
) -> tuple[Plan, Planner]:
    """Plan a run on a machine, or with None on this one, which is measured; `price` is of an hour,
    in any currency. Raises `MemoryLimitError` where the limits of the settings, or the machine's
    memory, are too small; `ConfigError` and `DataError` as training would."""
    planner = planner_of(with_adapter(config), machine, trust_remote_code=trust_remote_code)
    options: dict[str, Any] = {"price": price, "trust_remote_code": trust_remote_code}
    if planner.config.tokens_per_step != "auto":
        try:
            return plan_with(planner, **options), planner
        except MemoryLimitError as error:
            if (rows := long_rows(planner)) is not None:
                fitting = f"rows of up to {rows.longest:,} tokens fit: {rows.reason}"
                error.explain(f"{error.how}; {fitting}")
            raise
    plan = plan_with(planner := _with_tokens(planner), **options)
    note = (
        f"tokens_per_step: auto is {planner.config.tokens_per_step:,}, from which reading is "
        "hidden behind computing"
    )
    return replace(plan, notes=(note, *plan.notes)), planner


def _with_tokens(planner: Planner) -> Planner:
    """Return the planner with steps of as many tokens as hide reading behind computing."""
    config = planner.config.model_copy(update={"tokens_per_step": hiding_tokens(planner)})
    positions = num_positions(planner.blueprint.model.config, config)
    shape = step_shape(config, positions, planner.processes, parts=planner.blueprint.parallel.size)
    return replace(planner, config=config, shape=shape)


def hiding_tokens(planner: Planner) -> int:
    """Return what `tokens_per_step: auto` is: whole micro-batches, somewhat more than hide reading
    behind computing, because no step is quite full; `batch_size` of them where nothing is to be
    hidden. It is the same in all processes. `ConfigError`: layers cannot be timed; `ModelError`:
    the model's work cannot be told."""
    if planner.workload is None:  # because nothing else has made it
        planner = replace(planner, workload=planner.work(planner.shape.micro_batch))
    if (planner := timed(planner)).timings is None and planner.backend is not None:
        what = "LEMA does not time a layer that several processes run together"
        raise ConfigError(what, where="tokens_per_step: auto", how="set a number, such as 16k")
    at_once = planner.shape.micro_batch.tokens
    hidden = _crossover(planner.needs())
    tokens = at_once * (
        planner.config.batch_size if hidden is None else max(1, math.ceil(1.125 * hidden / at_once))
    )
    if planner.backend is None:
        return tokens
    return int(planner.backend.replicas.everyone(tokens * planner.backend.replicas.size)[0])


def plan_with(
    planner: Planner,
    *,
    price: float | None = None,
    trust_remote_code: bool = False,
    data: Rows | None = None,
) -> Plan:
    """Plan a run with what is known of its model and machine, and the `data` if they are read;
    else as `make_plan`.
    """
    needs = planner.needs()
    demand = needs.demand
    allocation = needs.allocation
    step = planner.simulated(demand, allocation)
    memory = _memory(needs)
    experts = None  # where it is not known what the model computes
    if planner.workload is not None:
        shape = planner.shape
        experts = expert_summary(planner.blueprint, shape.micro_batch, shape.tokens)
    return Plan(
        machine=planner.machine_state.machine,
        measured=planner.machine_state.speeds == "measured",
        itemsize=main_dtype(planner.blueprint.model).itemsize,
        tokens=planner.shape.tokens,
        micro_batch=planner.shape.micro_batch,
        allocation=allocation,
        memory=memory,
        step=step,
        epoch=_epoch(needs, price, trust_remote_code, data),
        experts=experts,
        notes=(*_notes(planner), *([] if experts is None else [experts.note])),
        needs=needs,
    )


def verdict_of(planner: Planner, data: Rows) -> str:
    """Say in one sentence how a run goes that fits, of a model that is open, with the rows that
    it trains on.
    """
    needs = planner.needs()
    shape = planner.shape
    at_once = f"{shape.micro_batch.rows} row{'s' * (shape.micro_batch.rows > 1)} at once"
    there = human_bytes(planner.limits[0]) + " of device memory"
    if planner.workload is None:
        return f"fits {'in ' + there if planner.limits[0] else 'as far as can be told'}, {at_once}"
    summary = f"fits, with {human_bytes(sum(needs.device.values()))} of {there}, {at_once}"
    if planner.timings is None or not len(data):
        return summary
    phase = max(
        phases(needs.demand, needs.allocation, planner.machine_state.machine.speeds),
        key=lambda phase: phase.seconds,
    )
    slowest = max(("compute", "link", "disk"), key=lambda part: float(getattr(phase, part)))
    hidden = _crossover(needs)
    row = data.counts.tokens / len(data)
    tokens_per_step = planner.config.tokens_per_step
    tokens = shape.num_rows * min(row, shape.micro_batch.length)
    tokens = tokens_per_step if isinstance(tokens_per_step, int) else tokens
    # Where reading limits a step, a pack of full rows is read for as one row is; where computing
    # does, nothing is won.
    as_packs = not (
        planner.config.packing or planner.config.tokens_per_step or slowest == "compute"
    )
    gain = shape.tokens / tokens if as_packs else None
    return f"{summary}; {_limited(BOTTLENECKS[slowest], hidden, tokens, gain)}"


def brief(planner: Planner) -> dict[str, Any]:
    """Return, as plain JSON types, what a run takes of memory, of activations if it knew them
    already, and where.
    """
    needs = planner.needs()
    machine = planner.machine_state.machine
    report = {
        "memory": asdict(_memory(needs)),
        "activations": planner.workload is not None,
        "shared": machine.shared,
    }
    return {
        name: _plain(section) for name, section in {**report, "machine": asdict(machine)}.items()
    }


def _crossover(needs: StepNeeds) -> float | None:
    return crossover(
        needs.demand,
        needs.allocation,
        needs.planner.machine_state.machine.speeds,
        needs.planner.shape.tokens,
    )


def _limited(by: str, hidden: float | None, tokens: float, gain: float | None) -> str:
    """Say what limits a step of so many tokens, and what to change: reading is hidden from `hidden`
    on, and packing makes it `gain` times faster."""
    message = f"a step is limited by {by}"
    if hidden is not None and tokens < hidden:
        message += (
            f": {human_count(tokens)} tokens a step, and reading is hidden from "
            f"{human_count(hidden)} on: "
        )
        message += "tokens_per_step: auto would cost less time"
    return message + (
        f"; packing: true would take about {gain:.2g} times less"
        if gain is not None and gain > 1.5
        else ""
    )


def _epoch(needs: StepNeeds, price: float | None, trusted: bool, data: Rows | None) -> Epoch | None:
    """Read the training data as training would, and say how long an epoch takes; None: the
    settings name no data.
    """
    planner = needs.planner
    config = needs.planner.config
    length = needs.planner.shape.micro_batch.length
    if not config.train_data:
        return None
    if data is None:
        data = _data(planner, trusted)
    preferences = config.objective != "sft"
    counts = data.counts
    batched_rows: Rows | Packs = data
    if config.packing:
        batched_rows = packs_of(data, length, config)
        counts = replace(counts, rows=len(batched_rows))
    rows = counts.rows
    tokens = counts.tokens
    steps = math.ceil(rows / planner.shape.num_rows)
    all_steps = math.ceil(config.num_train_epochs * steps)
    if config.count_steps_by == "rows":
        all_steps = math.ceil(config.num_train_epochs * rows / planner.shape.num_rows)
    filled = tokens / (rows * length)
    if isinstance(config.tokens_per_step, int):
        options: dict[str, Any] = {
            "tokens": config.tokens_per_step,
            "per_step": config.group_by_length,
        }
        multiple = config.pad_to_multiple_of or 1
        batches = Batches(
            batched_rows, 1, config.seed, config.shuffle, multiple=multiple, **options
        )
        steps = batches.before(1)
        all_steps = batches.num_batches(config.num_train_epochs)
        filled = tokens / (steps * planner.shape.tokens)

    def hours_of(count: int, filled: float) -> float:
        return (
            count * planner.simulated(planner.demand(scale=filled), needs.allocation).seconds / 3600
        )

    hours = hours_of(steps, filled)
    as_packs = not (config.packing or preferences or config.tokens_per_step)
    packed = hours_of(-(-tokens // planner.shape.tokens), 1.0) if as_packs else None
    cost = None if price is None else price * hours
    return Epoch(rows, tokens, steps, hours, cost, config.max_steps or all_steps, packed)


def _data(planner: Planner, trusted: bool) -> Rows:
    """Read the training data as training would, and return the rows that train."""
    config = planner.config
    directory = planner.blueprint.directory
    files = ModelFiles(config, directory=directory, trust_remote_code=trusted)
    return training_rows(config, files)[0]


def _memory(needs: StepNeeds) -> PlannedMemory:
    planner = needs.planner
    demand = needs.demand
    allocation = needs.allocation
    spilled = len(demand.keeping) * demand.boundary_bytes * (allocation.boundaries == "disk")
    saved = sum(saved_elsewhere(demand, allocation).values()) * (allocation.saved_on == "disk")
    model = planner.blueprint.stored_bytes
    checkpoint = planner.blueprint.checkpoint_bytes
    on_disk = {"model": model, "boundaries": spilled, "saved": saved, "checkpoint": checkpoint}
    return PlannedMemory(
        needs.device,
        needs.host | {"process": planner.machine_state.process_bytes},
        on_disk,
        *planner.limits,
    )


def _headroom(needs: StepNeeds, memory: PlannedMemory, seconds: float) -> Headroom:
    planner = needs.planner
    demand = needs.demand
    # less holds not one layer more
    bought = math.ceil(max(layer.nbytes for layer in planner.blueprint.layers) / GB)

    def saved_by(setting: str, used: int) -> float:
        richer = planner.allocation(demand, **{setting: used + bought * GB})
        return max(0.0, seconds - planner.simulated(demand, richer).seconds) / bought

    def step_fits(count: int) -> bool:
        return planner.fits(planner.demand(StepShape(micro, count * micro.rows)))

    config = planner.config
    micro = planner.shape.micro_batch
    adapter = planner.blueprint.adapter_bytes if planner.blueprint.trained is None else 0
    without = replace(demand, adapter_bytes=demand.adapter_bytes - adapter)
    on_device = sum(memory.device.values()) if config.device_memory is None else memory.device_limit
    in_host = sum(needs.host.values()) if config.host_memory is None else memory.host_limit
    return Headroom(
        crossover=_crossover(needs),
        largest_micro_batch=_largest_micro_batch(planner),
        largest_step=_largest(step_fits, MOST_TOKENS // micro.tokens) * micro.tokens,
        gigabyte_on_device=saved_by("device_memory", on_device),
        gigabyte_in_host=saved_by("host_memory", in_host),
        adapter_bytes=adapter,
        adapters=most_adapters(planner, without, adapter),
    )


def most_adapters(planner: Planner, demand: Demand, nbytes: int) -> int:
    """Return how many adapters fit at once beside what a step needs.

    Args:
        planner: of the step.
        demand: what the step needs.
        nbytes: of an adapter, with its gradients and optimizer.

    Returns:
        The number; 0: the adapters take nothing, or not one fits.
    """

    def adapters_fit(count: int) -> bool:
        return planner.fits(replace(demand, adapter_bytes=demand.adapter_bytes + count * nbytes))

    return _largest(adapters_fit, MOST_ADAPTERS) if nbytes else 0


def _largest_micro_batch(planner: Planner) -> int:
    """Return how many rows can be computed at once; the step has as many tokens as before, or
    one micro-batch.
    """
    micro_batch = planner.shape.micro_batch
    # A micro-batch grows evenly with its rows, so that those of one row and of two tell what any
    # takes.
    one_row, two = (planner.work(replace(micro_batch, rows=rows)) for rows in (1, 2))
    at_once = max(1, (planner.config.loss_chunk_tokens or CHUNK_TOKENS) // micro_batch.length)

    def fits(rows: int) -> bool:
        shape = StepShape(replace(micro_batch, rows=rows), max(rows, planner.shape.num_rows))
        return planner.fits(
            planner.demand(shape, _of_rows(one_row, two, rows, at_once), rows / micro_batch.rows)
        )

    return _largest(fits, MOST_TOKENS // micro_batch.length)


def _of_rows(one_row: Workload, two: Workload, rows: int, rows_at_once: int) -> Workload:
    """Return what a micro-batch of `rows` costs in memory: every part grows evenly with them, but
    for the head, whose logits exist for no more than `rows_at_once`."""
    workload: Workload = grown(one_row, two, rows)
    chunk: Workload = grown(one_row, two, min(rows, rows_at_once))
    pieces = workload.pieces
    if pieces is not None and chunk.pieces is not None:
        # What waits grows with all rows, and what works on it with those of a chunk.
        more = pieces.waiting_bytes - chunk.pieces.waiting_bytes
        pieces = replace(pieces, working_bytes=chunk.pieces.working_bytes + more)
    in_host = workload.in_host
    if in_host is not None:
        in_host = replace(in_host, head=chunk.head)
    return replace(workload, head=chunk.head, pieces=pieces, in_host=in_host)


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number up to `most` that fits; 0: not even 1 does."""
    high = 1
    while high <= most and fits(high):
        high *= 2
    left = range(high // 2 + 1, min(high, most + 1))
    return high // 2 + bisect_left(left, True, key=lambda number: not fits(number))


def step_curve(
    planner: Planner, allocation: Allocation, around: float
) -> Iterator[tuple[int, Simulated]]:
    """Yield the tokens of larger and larger steps, on both sides of `around`, and each step with
    one allocation.
    """
    micro = planner.shape.micro_batch
    for point in range(CURVE):
        rows = max(1, round(around / micro.length * 2 ** (6 * point / (CURVE - 1) - 3)))
        shape = StepShape(replace(micro, rows=min(micro.rows, rows)), rows)
        times = StepShape(micro, rows)  # a part of a micro-batch takes a part of its time
        yield shape.tokens, planner.simulated(planner.demand(times), allocation)


def _notes(planner: Planner) -> tuple[str, ...]:
    notes = [planner.machine_state.machine.note] * bool(planner.machine_state.machine.note)
    notes += _of_published_weights(planner.blueprint.layers)
    notes += planner.blueprint.notes
    notes += uncounted(planner.config)
    notes += beyond_positions(planner.blueprint.model.config, planner.config)
    itemsize = main_dtype(planner.blueprint.model).itemsize
    if note := divided_note(planner.config, planner.shape.micro_batch, planner.workload, itemsize):
        notes.append(note)
    if note := chunks_note(planner.shape.micro_batch, planner.workload):
        notes.append(note)
    if planner.workload is not None:
        drawn = planner.blueprint
        grouped = drawn.parts is not None
        shape = planner.shape
        kinds = planner.workload.kinds
        if note := tiles_note(drawn.split, kinds, shape.micro_batch, grouped=grouped):
            notes.append(note)
    return tuple(notes)


def _of_published_weights(layers: Sequence[LayerBytes]) -> Iterator[str]:
    """Say what preparing the checkpoint would save."""
    moved = [
        (cast.move, cast.target.dtype)
        for layer in layers
        for cast in layer.casts
        if cast.move is not None
    ]
    pieces = len(moved) + sum(not run.alone for layer in layers for run in layer.runs)
    if pieces:
        aside = human_bytes(sum(move.count * dtype.itemsize for move, dtype in moved))
        yield (
            f"layers are put together from {pieces:,} pieces, {aside} moved on the host: "
            "`lema prepare MODEL FILE.safetensors` does it once"
        )
    published = [
        expansion
        for layer in layers
        for expansion in layer.expansions
        if expansion.library == LIBRARY
    ]
    if published:
        stored = human_bytes(
            sum(part.nbytes for expansion in published for part in expansion.parts.values())
        )
        expanded = human_bytes(sum(expansion.target.nbytes for expansion in published))
        yield (
            f"{stored} of weights are dequantised to {expanded} at each lease: `lema prepare` "
            "writes them so, once"
        )


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, frozenset | set):
        return sorted(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
