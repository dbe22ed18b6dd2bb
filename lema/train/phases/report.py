"""The forecast of a run of phases, shown before its first step: steps, learning rates, tokens,
memory, bytes, hours.

It is a table on a terminal and lines of tab-separated columns anywhere else.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from lema.backend import Backend
from lema.config import LemaConfig
from lema.config.printing import print_table
from lema.config.units import human_bytes, human_count, human_duration
from lema.errors import MemoryLimitError
from lema.plan import Machine
from lema.plan.cost import Traffic
from lema.plan.planner import MachineState, StepNeeds, machine_state_of, planner_of
from lema.train.phases.paths import PhasePaths
from lema.train.phases.phase import Phase
from lema.train.phases.plan import PhasePlan, TokenSteps
from lema.train.phases.stage import chosen_by, settings_of_phase, tied_note

__all__ = ["PhaseReport", "check_fits", "phase_report", "report_rows", "show_report"]


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes at the peak."""

    device: int  # of device memory; of the host's where the device computes there
    host: int  # of host memory, in addition
    mapped: int  # in files that are mapped into memory, since host memory does not hold them
    # of checkpoints and models when the phase has ended, but for that of the best validation loss
    disk: int
    parts: dict[str, dict[str, int]]  # of device, host and disk, by their purposes


@dataclass(frozen=True)
class PhaseEntry:
    """One phase."""

    name: str
    trains: str
    trainable: int  # parameters that train
    parameters: int  # of the model, adapters not counted
    first_step: int  # its first step in the run, counted from 1
    last_step: int
    # It is trained on, padding included; of rows in epochs the most, 0 where no length limits them.
    tokens: int
    epochs: float | None  # passes over the rows of `train_data`; None: it has a mixture, or steps
    leftover: int  # requested tokens that are less than a step
    tokens_per_source: dict[str, int]
    # learning rates: of its `first` step, the highest (`peak`), and of its `last` step
    rates: dict[str, float]
    moved: Traffic  # bytes read, uploaded and downloaded in the whole phase
    memory: PhaseMemory
    at_once: int  # rows that are computed at once
    hours: float | None  # it takes; None: not known

    @property
    def steps(self) -> int:
        """How many it has."""
        return self.last_step - self.first_step + 1


@dataclass(frozen=True)
class PhaseReport:
    """What is known of a run of phases before it starts."""

    phases: tuple[PhaseEntry, ...]
    warnings: tuple[str, ...]  # what to look at
    machine: str  # it is planned for
    device_memory: int  # bytes of device memory that are allowed, or there
    host_memory: int  # bytes of host memory that are allowed, or there
    # Where hours come from: the machine's `profile`, `measured` on this machine, or `unknown`.
    speeds: Literal["profile", "measured", "unknown"]
    shared: bool  # whether the device computes in host memory
    price: float | None  # of an hour; None: none was given
    steps: int
    tokens: int
    # of all phases, but for validation and what lies between phases; None: not known
    hours: float | None
    cost: float | None  # of these hours; None: not known

    @property
    def verdict(self) -> str:
        """Say in one sentence what each phase takes of memory; what does not fit has no report."""
        there = f"{human_bytes(self.device_memory)} of device memory"
        parts = []
        for phase in self.phases:
            taken = (
                f"{human_bytes(phase.memory.device)} and {human_bytes(phase.memory.host)} of "
                "host memory"
            )
            parts.append(
                f"phase {phase.name} takes {taken}, {phase.at_once} "
                f"row{'s' * (phase.at_once > 1)} at once"
            )
        return f"fits, in {there}: {'; '.join(parts)}; {self.steps:,} steps in all"

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON types."""
        return {**asdict(self), "verdict": self.verdict}


def phase_report(
    config: LemaConfig,
    plan: PhasePlan,
    *,
    machine: Machine | None = None,
    backend: Backend | None = None,
    measure: bool = False,
    price: float | None = None,
    processes: int = 1,
    trust_remote_code: bool = False,
) -> PhaseReport:
    """Report on a run of phases before it starts. No weights are read but to time them. It is
    planned for a `machine`; None: for this one, with its `backend`, if that is open; to `measure`
    it takes seconds for each kind of phase, and otherwise hours are not known. `processes` on it
    share each batch. Raises `MemoryLimitError`, which names the phase that does not fit, or
    `ConfigError` of a phase."""
    machine_state = machine_state_of(config, machine, backend=backend, measured=measure)
    needs = _needs(config, plan, machine_state, processes, trust_remote_code)
    entries = [_entry(config, plan, index, step_needs) for index, step_needs in enumerate(needs)]
    on_device, in_host = machine_state.limits(config.device_memory, config.host_memory)
    known_hours = [entry.hours for entry in entries if entry.hours is not None]
    hours = math.fsum(known_hours) if len(known_hours) == len(entries) else None
    notes = {step_needs.planner.note for step_needs in needs}
    notes |= {
        tied_note(phase, step_needs.planner.blueprint.model)
        for phase, step_needs in zip(plan.phases, needs, strict=True)
    }
    if measure:  # else the phase tells it that begins after this
        notes |= {note for step_needs in needs for note in step_needs.planner.blueprint.unmatched}
    return PhaseReport(
        phases=tuple(entries),
        warnings=(*map(str, plan.warnings()), *sorted(notes - {""})),
        machine=machine_state.machine.name,
        device_memory=on_device,
        host_memory=in_host,
        speeds=machine_state.speeds,
        shared=machine_state.machine.shared,
        price=price,
        steps=plan.num_steps,
        tokens=sum(entry.tokens for entry in entries),
        hours=hours,
        cost=None if hours is None or price is None else hours * price,
    )


def check_fits(
    config: LemaConfig,
    plan: PhasePlan,
    *,
    backend: Backend | None = None,
    processes: int = 1,
    trust_remote_code: bool = False,
) -> None:
    """Refuse a run of phases that does not fit the memory, before its data are read.

    Args:
        config: the settings of the run.
        plan: the phases, whose steps need not be counted.
        backend: the open device; None: it is opened here.
        processes: share each batch.
        trust_remote_code: run the model's own code.

    Raises:
        MemoryLimitError: a phase does not fit; the message names it.
        ConfigError: something is wrong with a phase.
    """
    machine_state = machine_state_of(config, None, backend=backend, measured=False)
    _needs(config, plan, machine_state, processes, trust_remote_code)


def _needs(
    config: LemaConfig, plan: PhasePlan, machine_state: MachineState, processes: int, trusted: bool
) -> list[StepNeeds]:
    """Return what a step of each phase needs; phases that train the same, and alike, need the
    same.
    """
    needs_by_kind: dict[str, StepNeeds] = {}
    kinds = [
        repr(
            [
                phase.trains,
                phase.trainable,
                phase.layers,
                phase.adapters,
                phase.overrides,
                phase.is_of_rows,
            ]
        )
        for phase in plan.phases
    ]
    for kind, phase in zip(kinds, plan.phases, strict=True):
        if kind in needs_by_kind:
            continue
        try:
            needs_by_kind[kind] = planner_of(
                settings_of_phase(config, plan, phase),
                machine_state=machine_state,
                chosen=None if phase.trains == "lora" else partial(chosen_by, phase),
                device_memory=phase.overrides.get("device_memory", config.device_memory),
                processes=processes,
                strict=False,
                trust_remote_code=trusted,
            ).needs()
        except MemoryLimitError as error:
            error.locate(f"phase {phase.name}: {error.where}")
            raise
    return [needs_by_kind[kind] for kind in kinds]


def _entry(config: LemaConfig, plan: PhasePlan, index: int, needs: StepNeeds) -> PhaseEntry:
    phase = plan.phases[index]
    boundary = plan.boundaries()[index]
    size = plan.steps(index)
    risen = min(max(0, phase.spans(size.steps).warmup - phase.schedule_start), size.steps - 1)
    rates = [plan.learning_rate(index, step) for step in (0, risen, size.steps - 1)]
    blueprint = needs.planner.blueprint
    seconds = needs.seconds
    count = math.ceil(size.steps / config.save_steps) if config.save_steps else 1
    num_saved = min(count, config.save_total_limit or count)
    leaves = PhasePaths(Path(config.output_dir), plan).leaves_model
    # What the phase leaves: checkpoints, and the model that the next phase begins with.
    disk = {
        "checkpoints": num_saved * blueprint.checkpoint_bytes,
        "model": leaves(index) * blueprint.model_bytes,
    }
    host = (
        sum(needs.host.values())
        - needs.device["slots"] * (needs.host["ring"] > 0) * needs.demand.shared
    )
    parts = {"device": needs.device, "host": needs.host, "disk": disk}
    return PhaseEntry(
        name=boundary.name,
        trains=phase.trains,
        trainable=blueprint.adapter_parameters,
        parameters=blueprint.parameters,
        first_step=boundary.first_step + 1,
        last_step=boundary.stop_step,
        tokens=_tokens(config, phase, size),
        epochs=phase.epochs,
        leftover=size.leftover,
        tokens_per_source={
            name: count * plan.max_length for name, count in plan.counts(index).items()
        },
        rates={"first": rates[0], "peak": max(rates), "last": rates[-1]},
        moved=needs.traffic(size.steps),
        memory=PhaseMemory(
            sum(needs.device.values()), host, needs.mapped, sum(disk.values()), parts
        ),
        at_once=needs.planner.shape.micro_batch.rows,
        hours=None if seconds is None else size.steps * seconds / 3600,
    )


def _tokens(config: LemaConfig, phase: Phase, size: TokenSteps) -> int:
    """Return the tokens that a phase trains on, or the most that they can be; 0: rows of any length
    count.
    """
    if not phase.is_of_rows:
        return size.tokens
    return size.tokens * config.gradient_accumulation_steps if config.max_length else 0


Row = tuple[str, str, str]
HOURS_FROM = {"profile": "by its profile", "measured": "as measured"}


def report_rows(report: PhaseReport) -> Iterator[Row]:
    """Yield what a report says, as (phase, what, how much)."""
    for phase in report.phases:
        yield from ((phase.name, *row) for row in _phase(phase, report))
    yield "in all", "steps", f"{report.steps:,}"
    yield "in all", "tokens", f"{report.tokens:,}"
    yield "in all", "takes", _duration(report.hours, report)
    if report.cost is not None:
        yield "in all", "costs", f"{report.cost:,.2f}"
    yield from (("note", warning, "") for warning in report.warnings)


def show_report(report: PhaseReport, console: Console) -> None:
    """Print the verdict, then the report; a table has its notes below it, where they may be as
    long as they are.
    """
    console.print(report.verdict, style="bold", soft_wrap=True, markup=False, highlight=False)
    rows = (row for row in report_rows(report) if not (console.is_terminal and row[0] == "note"))
    print_table(([cell for cell in row if cell] for row in rows), console, amounts=True)
    for warning in report.warnings if console.is_terminal else ():
        console.print(f"note: {warning}", soft_wrap=True, markup=False, highlight=False)


def _phase(phase: PhaseEntry, report: PhaseReport) -> Iterator[tuple[str, str]]:
    parts = {"full": "every weight", "lora": "adapters", "selection": "a selection of weights"}
    numbers = (
        f"{human_count(phase.trainable)} parameters, of a model of {human_count(phase.parameters)}"
    )
    yield "trains", f"{parts[phase.trains]}: {numbers}"
    yield "steps", f"{phase.first_step:,} to {phase.last_step:,}"
    if phase.epochs is not None:
        yield "epochs", f"{phase.epochs:g}"
    if phase.tokens_per_source:
        more = f"; {phase.leftover:,} more are less than a step" if phase.leftover else ""
        yield "tokens", f"{phase.tokens:,}{more}"
    elif phase.tokens:
        yield "tokens", f"{phase.tokens:,} at most"
    yield from (
        (f"tokens of {name}", f"{tokens:,}") for name, tokens in phase.tokens_per_source.items()
    )
    yield (
        "learning rate",
        "{first:.3g} at first, {peak:.3g} at its peak, {last:.3g} at last".format(**phase.rates),
    )
    memory = phase.memory
    moved = phase.moved
    yield "rows at once", f"{phase.at_once:,}"
    where = "memory for computing" if report.shared else "device memory"
    yield where, f"{human_bytes(memory.device)} of {human_bytes(report.device_memory)}"
    yield "host memory", f"{human_bytes(memory.host)} of {human_bytes(report.host_memory)}"
    if memory.mapped:
        yield "in files mapped into memory", human_bytes(memory.mapped)
    yield "disk space for its results", human_bytes(memory.disk)
    copied = {"copied to the device": moved.uploaded, "copied from the device": moved.downloaded}
    amounts = {"read from disk": moved.read, **copied}.items()
    yield from ((what, human_bytes(nbytes)) for what, nbytes in amounts if nbytes)
    yield "takes", _duration(phase.hours, report)


def _duration(hours: float | None, report: PhaseReport) -> str:
    if hours is None:
        return "not known; `lema plan` measures it"
    return f"{human_duration(3600 * hours)}, {HOURS_FROM[report.speeds]}"
