"""Machines as a plan sees them: memory, speeds of disk and link, and the arithmetic they reach in practice.

The numbers of a profile are those reached in practice, not those of a data sheet: dense matrix products of training on
that device, and page-locked copies over its bus. Where nothing is published, `note` says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lema.errors import ConfigError
from lema.plan.cost import Speeds

__all__ = ["PROFILES", "Machine", "profile"]


GB, GIB = 10**9, 2**30


@dataclass(frozen=True)
class Machine:
    """What a plan is made for."""

    name: str  # of the profile, or of the device measured
    device_memory: int  # bytes; of the host where the device computes in its memory
    host_memory: int  # bytes
    speeds: Speeds  # of disk and link
    half: float  # floating-point operations per second with weights of two bytes
    single: float  # with weights of four
    memory: float = math.inf  # bytes per second that the device's memory is read and written at, together
    launch: float = 0.0  # seconds that handing one layer's work to the device takes, at least
    note: str = ""  # what is not known of it

    @property
    def shared(self) -> bool:
        """Whether the device computes in host memory."""
        return math.isinf(self.speeds.link)

    def flops(self, itemsize: int) -> float:
        """Return the operations per second with weights of `itemsize` bytes an element."""
        return self.single if itemsize >= 4 else self.half


# Half precision, links and disks: what public benchmarks of fine-tuning reach on these. Single precision: three
# quarters of the vendor's figure; memory: half of it. Launch: a decoder layer, forward, in eager mode.
TRN1 = "one core of two; the speed of its host link is not published, and a guess here: measure it"
PROFILES = {
    machine.name: machine
    for machine in (
        Machine("t4", 15 * GIB, 32 * GB, Speeds(3e9, 12e9), 25e12, 6e12, 160e9, 1.5e-3),
        Machine("4090", 24 * GIB, 64 * GB, Speeds(7e9, 25e9), 140e12, 62e12, 500e9, 1.5e-3),
        Machine("h200", 139 * GIB, 128 * GIB, Speeds(14e9, 50e9), 400e12, 50e12, 2.4e12, 1.5e-3),
        Machine("trn1", 16 * GIB, 32 * GIB, Speeds(2e9, 12e9), 65e12, 16e12, 200e9, 1.5e-3, TRN1),
        Machine("cpu", 24 * GB, 24 * GB, Speeds(1.1e9), 0.4e12, 0.15e12, 5e9),
    )
}


def profile(name: str) -> Machine:
    """Return the profile of that name; a ConfigError: there is none."""
    if name in PROFILES:
        return PROFILES[name]
    how = f"give one of {', '.join(PROFILES)}, or leave it out: then this machine is measured"
    raise ConfigError(f"there is no profile {name!r}", where="--profile", how=how)
