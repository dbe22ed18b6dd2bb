"""Any accelerator that torch knows: streams copy, events order them, and the host waits for nothing
in a step.

A device with memory of its own has slots, to which layers are copied. One that computes in host
memory, as a graphics unit on the processor's own chip does, has none: a layer is computed where the
reader put it.
"""

from __future__ import annotations

import mmap
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from lema.backend import (
    BackendOptions,
    DeviceSlots,
    Download,
    MemoryStats,
    Parallel,
    Replicas,
    SingleProcess,
)
from lema.backend.hostmemory import relabelled
from lema.backend.lockedmemory import HostMemory
from lema.backend.queues import MappedSlots
from lema.backend.replicas import QueuedReplicas
from lema.backend.torchrun import carriers, join
from lema.backend.torchstreams import TorchCarrier, device_memory, has_streams, unified_memory
from lema_accelerator.device import choose_device, identity
from lema_accelerator.driver import AllMemory, RuntimeDriver
from lema_accelerator.kinds import PROVEN

__all__ = ["AcceleratorBackend"]


class AcceleratorBackend:
    """One device, which becomes torch's current one. Under `torchrun` each process has its own.

    Args:
        device: a name of `lema_accelerator.kinds`, or torch's name of the device; `"name:1"` is the
            second one.
        options: whether host memory is page-locked.
        unified: whether the device computes in host memory; None: torch is asked.

    Attributes:
        proven: by the name of a backend, where it has run.

    Raises:
        BackendUnavailable: there is no such device, or the other processes cannot be reached.
    """

    proven: ClassVar = PROVEN

    def __init__(
        self, device: str, options: BackendOptions | None = None, *, unified: bool | None = None
    ) -> None:
        self.name = device.partition(":")[0]
        options = options or BackendOptions()
        options.refuse_parts(self.name)
        self._device = choose_device(device)
        self._module: Any = torch.get_device_module(self._device)
        torch.accelerator.set_device_index(self._device.index)
        self._carrier = TorchCarrier(self._device, at_once=not has_streams(self._device))
        driver = RuntimeDriver(self._device) if hasattr(self._module, "cudart") else None
        # Without streams nothing copies beside the compute, for which memory would have to be
        # locked.
        locked = False if self._carrier.at_once else options.page_locked
        self._host = HostMemory(driver, locked)
        self._unified = not self._carrier.at_once and (
            self._integrated() if unified is None else unified
        )
        if self._unified and (driver is None or driver.reaches_all()):
            self._host = HostMemory(AllMemory(self._device))
        if self._unified and not self._maps():
            self._unified = False
            self._host = HostMemory(driver, locked)
        self._parallel = SingleProcess()
        replicas, self._leave = join(carriers(self._device.type), partial(identity, self._device))
        self._replicas = QueuedReplicas(replicas, self._carrier.copies.queues)

    @property
    def device(self) -> torch.device:
        """The device, with its number."""
        return self._device

    @property
    def parallel(self) -> Parallel:
        """No layer is divided."""
        return self._parallel

    @property
    def replicas(self) -> Replicas:
        """The processes that `torchrun` started, which talk through the library that torch has
        for the device.
        """
        return self._replicas

    def host_buffer(self, nbytes: int, memory: Tensor | None = None) -> Tensor:
        """Return uint8 `[nbytes]`, page-aligned, and page-locked if the options ask for it, or for
        the device to compute in (`lema.backend.lockedmemory`).

        Raises:
            MemoryLimitError: the options demand page-locked memory, and it cannot be locked.
        """
        return self._host.buffer(nbytes, memory)

    def device_slots(self, nbytes: int, count: int) -> DeviceSlots:
        """Return a ring of `count` slots of `nbytes` bytes, in torch's memory, or with host
        buffers as slots.
        """
        if self._unified:
            return MappedSlots(
                self._carrier.copies, self._seen, partial(self._carrier.device_slots, nbytes, count)
            )
        return self._carrier.device_slots(nbytes, count)

    def download(self, source: Tensor, target: Tensor) -> Download:
        """Start copying to host memory, after the compute queued so far."""
        return self._carrier.download(source, target)

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[Any]:
        """Autocast to the weights' dtype if that is half precision; full precision needs no
        autocast.
        """
        return (
            nullcontext()
            if dtype == torch.float32
            else torch.autocast(self._device.type, dtype=dtype)
        )

    def rng_state(self) -> Tensor:
        """Return the state of the device's generator, which is in host memory, so nothing waits."""
        state: Tensor = self._module.get_rng_state(self._device)
        return state

    def set_rng_state(self, state: Tensor) -> None:
        """Set the state of the device's generator."""
        self._module.set_rng_state(state, self._device)

    def end_step(self) -> None:
        """Do nothing: work goes to the device as soon as it is queued."""

    def synchronize(self) -> None:
        """Block until all queues are empty."""
        torch.accelerator.synchronize(self._device)
        self._carrier.copies.forget_done()

    def memory(self) -> MemoryStats:
        """Return the bytes of tensors on the device, their peak, and the device's memory, or of all
        that is the host's if the device computes there."""
        return unified_memory(self._device) if self._unified else device_memory(self._device)

    def close(self) -> None:
        """Wait for queued work, and leave the process group, if this backend joined it."""
        try:
            self.synchronize()
        finally:
            self._leave()

    def _integrated(self) -> bool:
        """Return whether torch says that the device has no memory of its own."""
        asked = getattr(self._module, "get_device_properties", None)
        properties = None if asked is None else asked(self._device)
        return any(getattr(properties, name, False) for name in ("is_integrated", "integrated"))

    def _seen(self, memory: Tensor) -> Tensor | None:
        """Return host memory as the device has it; None: the device does not reach it."""
        return relabelled(memory, self._device) if self._host.reached(memory) else None

    def _maps(self) -> bool:
        """Return whether torch takes host memory for the device's."""
        try:
            return self._seen(self._host.buffer(mmap.PAGESIZE)) is not None
        except RuntimeError:
            return False
