"""The machine that a file of settings is written for: what `lema init` reads of it."""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from lema.config import LemaConfig
from lema.config.units import human_bytes
from lema.plan.machine import PROFILES, machine_state_of, open_alone
from lema.storage.diskspace import free_bytes

__all__ = ["Here", "here", "rounded"]

GB = 10**9
DEVICE = 0.9  # of the free device memory, as `device_memory: auto` takes
HOST = 0.8  # of the free host memory
SHARED = (0.5, 0.3)  # of the free memory for both, where the device computes in host memory


@dataclass(frozen=True)
class Here:
    """Memory and disk of this machine."""

    device: str  # the backend that a run would have
    shared: bool  # whether it computes in host memory
    device_memory: int  # bytes that a run may take of the device
    host_memory: int  # bytes that a run may take of the host
    host_total: int  # bytes of host memory
    host_free: int  # bytes of it that are free
    disk_free: int | None  # bytes that may be written where the run writes; None: not known

    @property
    def profile(self) -> str | None:
        """The profile whose speeds are nearest; None: that goes by the device's memory."""
        return self.device if self.device in PROFILES else "cpu" if self.shared else None

    @property
    def line(self) -> str:
        """What a user is told of it."""
        disk = "" if self.disk_free is None else f", {human_bytes(self.disk_free)} of disk free"
        memory = f"{human_bytes(self.host_free)} of {human_bytes(self.host_total)} of memory free"
        device = "" if self.shared else f" with {human_bytes(self.device_memory)} for a run"
        return f"this machine: device {self.device}{device}, {memory}{disk}"


def here(output: Path) -> Here:
    """Read the memory of the device and of the host, and the free disk where `output` is written.
    `BackendUnavailable`: no device can run here."""
    config = LemaConfig("model")
    with closing(open_alone(config)) as backend:
        state = machine_state_of(config, backend=backend)
        shared = state.machine.shared
    free = state.free(1)
    device, host = SHARED if shared else (DEVICE, HOST)
    return Here(
        device=state.machine.name,
        shared=shared,
        device_memory=rounded(device * free),
        host_memory=rounded(host * state.host_available),
        host_total=state.machine.host_memory,
        host_free=state.host_available,
        disk_free=free_bytes(output.absolute().parent),
    )


def rounded(nbytes: float) -> int:
    """Return a number of bytes that reads well, rounded down: whole GB from 10 on, else tenths."""
    unit = GB if nbytes >= 10 * GB else GB // 10 if nbytes >= GB else 10**6
    return max(1, int(nbytes // unit)) * unit
