"""Machines as a plan sees them: memory, speeds of disk and link, and the arithmetic they reach in
practice.

The numbers of a profile are those reached in practice, not those of a data sheet: dense matrix
products of training on that device, and page-locked copies over its bus. Where nothing is
published, `note` says so.
"""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

import psutil

from lema.backend import Backend, Exchange
from lema.backend.hostmemory import memory_available
from lema.backend.registry import resident_fraction, workspace_memory
from lema.config import LemaConfig
from lema.config.units import parse_memory
from lema.errors import ConfigError
from lema.model.partition import open_backend, planned_parallel
from lema.plan.cost import NO_OVERHEAD, Overhead, Speeds

__all__ = [
    "PROFILES",
    "Machine",
    "MachineState",
    "machine_state_of",
    "open_alone",
    "profile",
    "this_machine",
    "unknown_speeds",
]


GB = 10**9
GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """What a plan is made for."""

    name: str  # of the profile, or of the device measured
    device_memory: int  # bytes; of the host where the device computes in its memory
    host_memory: int  # bytes
    speeds: Speeds  # of disk and link
    half: float  # floating-point operations per second with weights of two bytes
    single: float  # with weights of four
    # bytes per second that the device's memory is read and written at, together
    memory: float = math.inf
    launch: float = 0.0  # seconds that handing one layer's work to the device takes, at least
    # bytes per second that each process of a tensor-parallel group sends to another
    exchange: float = math.inf
    latency: float = 0.0  # seconds that a collective takes, however little is sent
    note: str = ""  # what is not known of it
    overhead: Overhead = NO_OVERHEAD  # of its memory; of a profile it is not known

    @property
    def shared(self) -> bool:
        """Whether the device computes in host memory."""
        return math.isinf(self.speeds.link)

    def flops(self, itemsize: int) -> float:
        """Return the operations per second with weights of `itemsize` bytes an element."""
        return self.single if itemsize >= 4 else self.half

    def exchanging(self, work: Exchange) -> float:
        """Return the seconds that collectives take."""
        return work.nbytes / self.exchange + work.count * self.latency


# Half precision, links and disks: what public benchmarks of fine-tuning reach on these. Single
# precision: three quarters of the vendor's figure; memory: half of it. Launch: a decoder layer,
# forward, in eager mode. Of trn1 the 384 GB/s of the links between chips are published; two cores
# of one exchange over their common memory.
TRN1 = "one of two cores; the speeds of its host link and between cores are guesses, not published"
PROFILES = {
    machine.name: machine
    for machine in (
        Machine("t4", 15 * GIB, 32 * GB, Speeds(3e9, 12e9), 25e12, 6e12, 160e9, 1.5e-3),
        Machine("4090", 24 * GIB, 64 * GB, Speeds(7e9, 25e9), 140e12, 62e12, 500e9, 1.5e-3),
        Machine("h100", 80 * GB, 256 * GB, Speeds(14e9, 50e9), 400e12, 50e12, 1.7e12, 1.5e-3),
        Machine("h200", 139 * GIB, 128 * GIB, Speeds(14e9, 50e9), 400e12, 50e12, 2.4e12, 1.5e-3),
        Machine(
            "trn1",
            16 * GIB,
            32 * GIB,
            Speeds(2e9, 12e9),
            65e12,
            16e12,
            200e9,
            1.5e-3,
            50e9,
            50e-6,
            TRN1,
        ),
        Machine("cpu", 24 * GB, 24 * GB, Speeds(1.1e9), 0.4e12, 0.15e12, 5e9),
    )
}


def profile(name: str) -> Machine:
    """Return the profile of that name. ConfigError: there is none."""
    if name in PROFILES:
        return PROFILES[name]
    how = f"give one of {', '.join(PROFILES)}, or leave it out: then this machine is measured"
    raise ConfigError(f"there is no profile {name!r}", where="--profile", how=how)


Memory = int | float | str | None  # a limit as the settings write it


@dataclass(frozen=True)
class MachineState:
    """The machine of a planned run or phase, as far as it is known."""

    machine: Machine  # its memory in bytes and, unless `speeds` is `unknown`, its speeds
    host_available: int  # bytes of host memory that are free
    # `measured`: on this machine, with the model
    speeds: Literal["profile", "measured", "unknown"] = "unknown"
    # the fraction of device memory up to which layers stay there without a limit in the settings
    resident_fraction: float = 0.0
    process_bytes: int = 0  # bytes of host memory that interpreter and libraries take; 0: not known
    device_free: int | None = None  # bytes of device memory that others leave; None: all of it

    def limits(self, device_memory: Memory, host_memory: Memory) -> tuple[int, int]:
        """Return the bytes of device and of host memory that may be used: by the settings, or
        else all.
        """
        device = self.machine.device_memory
        host = self.machine.host_memory
        if device_memory == "auto":
            device = self.free(1)
        return (
            device if device_memory is None else parse_memory(device_memory, device),
            self.host_available if host_memory is None else parse_memory(host_memory, host),
        )

    def free(self, processes: int) -> int:
        """Return the free bytes of device memory for each of the processes; 0: unknown."""
        if self.machine.shared:
            return min(self.machine.device_memory, self.host_available) // processes
        return self.machine.device_memory if self.device_free is None else self.device_free


def machine_state_of(
    config: LemaConfig,
    machine: Machine | None = None,
    *,
    backend: Backend | None = None,
    measured: bool = False,
) -> MachineState:
    """Return the site that a run is planned for: that of a profile, or this machine, whose backend
    may be open already. A planner measures the speeds of this machine if it is to be `measured`;
    else they are not known."""
    if machine is not None:
        return MachineState(
            machine, machine.host_memory, "profile", resident_fraction(config.device)
        )
    if backend is not None:
        return this_machine(backend, measured=measured)
    with closing(open_alone(config) if measured else open_backend(config)) as opened:
        return this_machine(opened, measured=measured)


def this_machine(backend: Backend, *, measured: bool = False) -> MachineState:
    """Return this machine with the least memory that any of the processes has: they must plan
    alike.
    """
    memory = backend.memory()
    free = memory.total if memory.free is None else memory.free
    gathered_memory = backend.replicas.everyone(
        (memory.total, free, psutil.virtual_memory().total, memory_available())
    )
    total, free, host_total, available = map(min, zip(*gathered_memory, strict=True))
    gathered_overhead = backend.replicas.everyone(workspace_memory(backend))
    speeds = unknown_speeds(shared=memory.shared)
    overhead = Overhead(*map(max, zip(*gathered_overhead, strict=True)))
    machine = Machine(backend.name, total, host_total, speeds, 0.0, 0.0, overhead=overhead)
    return MachineState(
        machine,
        available,
        "measured" if measured else "unknown",
        resident_fraction(backend),
        device_free=free,
    )


def open_alone(config: LemaConfig) -> Backend:
    """Open the backend for one process, which measures what each of several would see: they need
    not be there.
    """
    alone = (
        {"tensor_parallel_size": 1, "sequence_parallel": False}
        if planned_parallel(config).size > 1
        else {}
    )
    return open_backend(config.model_copy(update=alone))


def unknown_speeds(*, shared: bool) -> Speeds:
    """Return speeds with which bytes moved are what counts, and those from disk most."""
    return Speeds(1.0) if shared else Speeds(1.0, 10.0)
