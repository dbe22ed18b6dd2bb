"""Opens planners: of a model that is only planned for, or of one that is open; each with the choice
that fits and is fastest.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from lema.backend import Backend, SingleProcess
from lema.backend.group import share_of
from lema.config import LemaConfig
from lema.config.types import MemoryStrategy
from lema.data.forms import num_positions
from lema.errors import ModelError
from lema.model.partition import planned_parallel
from lema.model.skeleton import main_dtype
from lema.plan.blueprint import Blueprint, draw_up
from lema.plan.choice import best, seconds_decide, with_work
from lema.plan.divided_rows import in_parts
from lema.plan.groups import active_experts
from lema.plan.machine import (
    Machine,
    MachineState,
    Memory,
    machine_state_of,
    open_alone,
    this_machine,
)
from lema.plan.measure import calibrate, estimate, probe, process_bytes
from lema.plan.needs import Planner, StepNeeds
from lema.plan.work.long_rows import in_proportion, timed_batch
from lema.plan.work.step import StepShape, Timings, by_arithmetic, step_shape
from lema.plan.work.workload import MicroBatch, Workload

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
SIZES = ("sequence_chunk", "mlp_tile_tokens")  # settings that a plan may choose


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
        positions = num_positions(blueprint.model.config, config)
        config = in_parts(config, positions)
        shape = step_shape(config, positions, processes, parts=parallel.size)
        planner = Planner(
            config, blueprint, machine_state, None, None, shape, processes, device_memory
        )
        planner = (
            planner if workload_cache is None else replace(planner, workload_cache=workload_cache)
        )
        try:
            planner = best(with_work(planner))
        except ModelError as error:
            if strict:
                raise
            planner = best(
                replace(planner, note=f"{error.what}: activations and hours are not counted")
            )
        if planner.workload is not None and backend is not None and planner.blueprint.parts is None:
            measured, timings = _probed(planner, planner.workload, backend)
            # The process is looked at with what computing a layer has left behind in it, as it does
            # in training.
            machine_state = replace(machine_state, machine=measured, process_bytes=process_bytes())
            planner = best(replace(planner, timings=timings, machine_state=machine_state))
        elif planner.workload is not None and backend is not None:
            measured, timings = _estimated(planner, planner.workload, backend)
            planner = best(
                replace(
                    planner, timings=timings, machine_state=replace(machine_state, machine=measured)
                )
            )
        elif planner.workload is not None and machine_state.speeds == "profile":
            itemsize = main_dtype(blueprint.model).itemsize
            timings = by_arithmetic(
                planner.workload, blueprint.layers, machine_state.machine, itemsize
            )
            planner = best(replace(planner, timings=timings))
    if not planner.blueprint.pieces:
        blueprint.head.keep_whole(blueprint.tables)
    return planner


def opened_planner(config: LemaConfig, blueprint: Blueprint, backend: Backend) -> Planner:
    """Return the planner of a model that is open on a backend, with the least memory that any
    process has.
    """
    positions = num_positions(blueprint.model.config, config)
    config = in_parts(config, positions)
    _, shares = share_of(backend.replicas, config.context_parallel_size or 1)
    shape = step_shape(config, positions, shares, blueprint.parallel.size)
    return Planner(config, blueprint, this_machine(backend), None, None, shape, backend=backend)


def fitted_planner(planner: Planner, *, trains: bool) -> Planner:
    """Return the planner of a model that is open; if it `trains`, of steps that fit and are
    fastest. Nothing is measured without a limit of memory, or where it holds all there is to choose
    from; else disk, link and one layer of each kind are, in a few seconds; of weights that train
    nothing is. Several processes ask for it at once, and get the same. Activations count where they
    can be told; else weights alone, with a warning where limits are numbers."""
    open_sizes = [name for name in SIZES if getattr(planner.config, name) == "auto"]
    if open_sizes and not trains:  # for rows that are only evaluated
        uncut = planner.config.model_copy(update=dict.fromkeys(open_sizes))
        planner = replace(planner, config=uncut)
    config = planner.config
    machine_state = planner.machine_state
    if planner.blueprint.trained is not None:
        with suppress(ModelError):  # which the plan of the phases tells
            planner = replace(
                planner,
                workload=None if planner.surely_fits else planner.work(planner.shape.micro_batch),
            )
        return best(planner)
    limited = config.device_memory not in (None, "auto") or config.host_memory is not None
    unlimited = planner.unlimited()
    unlimited_memory = config.device_memory is None and not limited
    leaves_open = bool(open_sizes) or planner.keys_are_open
    if not trains or (unlimited_memory and not machine_state.resident_fraction and not leaves_open):
        if (
            trains
            and config.strategy is MemoryStrategy.RESIDENT
            and machine_state.machine.shared
            and not planner.surely_fits
        ):
            with suppress(ModelError):  # then weights and what trains count
                planner = with_work(planner)
        return best(unlimited if config.device_memory == "auto" else planner)
    if not limited and not machine_state.resident_fraction and planner.surely_fits:
        return best(planner)
    try:
        planner = with_work(planner)
    except ModelError as error:
        if limited or machine_state.resident_fraction:
            instead = (
                "the memory limits are spent only on weights"
                if limited
                else "no layer stays on the device"
            )
            warnings.warn(f"{error.what}: {instead}", stacklevel=2)
        return best(
            planner
            if limited
            else replace(unlimited, machine_state=replace(machine_state, resident_fraction=0.0))
        )
    planner = best(planner)
    return best(timed(planner)) if seconds_decide(planner) else planner


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
        timed_shape, timed_work = _timed_step(planner, work)
        measured = calibrate(blueprint, timed_work, timed_shape, backend)
        if timed_work is not work:
            measured = measured[0], in_proportion(measured[1], timed_work, work)
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


def _timed_step(planner: Planner, work: Workload) -> tuple[StepShape, Workload]:
    """Return the step that is timed in the place of a planner's, and what a micro-batch of it
    costs.
    """
    batch = timed_batch(planner.shape.micro_batch)
    if batch == planner.shape.micro_batch:
        return planner.shape, work
    return StepShape(batch, batch.rows), planner.work(batch)


def _probed(planner: Planner, work: Workload, backend: Backend) -> tuple[Machine, Timings]:
    """Measure this machine, and the seconds of a micro-batch."""
    shape, timed_work = _timed_step(planner, work)
    machine, timings = probe(planner.blueprint, timed_work, planner.config, shape, backend)
    if timed_work is work:
        return machine, timings
    return machine, in_proportion(timings, timed_work, work)


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
