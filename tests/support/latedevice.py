"""The CUDA backend's slots, downloads and host memory on a machine without such a device.

Torch computes on the CPU, at once; what is copied is copied late, as late as events allow or when
chance will have it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any

import torch
from queuefakes import FakeDevice, FakeEvent
from torch import Tensor

from lema.backend import DeviceSlots, Download, MemoryStats, Replicas
from lema.backend.lockedmemory import HostMemory
from lema.backend.queues import Copies, CopyDown, Slots
from lema.backend.replicas import QueuedReplicas
from lema_cpu import CpuBackend


class AtOnce:
    """A queue whose work is done when it has been queued: what it waits for must be done by
    then.
    """

    def __init__(self, device: FakeDevice) -> None:
        self.device = device

    def record(self) -> FakeEvent:
        event = FakeEvent(self.device, self.device.queues[0])
        event.done = True
        return event

    def wait(self, event: Any) -> None:
        self.device.run_until(event)

    @contextmanager
    def current(self) -> Iterator[None]:
        """What torch computes is done at once, whatever queue it is meant for."""
        yield


class LateDevice(CpuBackend):
    """A backend whose copies come late.

    Args:
        seed: of what is done when; None: everything as late as can be.
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        self.queues = FakeDevice(Random(seed or 0), holds_tensors=True)
        if seed is None:
            self.queues._eager = 0.0
            self.queues._lazy = True
        self.queues.compute = self.queues.gathers = AtOnce(self.queues)  # type: ignore[assignment]
        self.synchronized = 0
        self.slots: list[Tensor] = []  # all there ever were
        self._copies = Copies(self.queues)
        self.driver = FakeDriver()
        self._host = HostMemory(self.driver)
        self._queued_replicas = QueuedReplicas(super().replicas, self.queues)

    @property
    def replicas(self) -> Replicas:
        return self._queued_replicas

    def host_buffer(self, nbytes: int, memory: Tensor | None = None) -> Tensor:
        return self._host.buffer(nbytes, memory)

    def device_slots(self, nbytes: int, count: int) -> DeviceSlots:
        # rubbish, as a device's
        pieces = [torch.full((nbytes,), 0xFF, dtype=torch.uint8) for _ in range(count)]
        self.slots += pieces
        return Slots(self._copies, pieces)

    def download(self, source: Tensor, target: Tensor) -> Download:
        return CopyDown(self._copies, source, target)

    def synchronize(self) -> None:
        self.synchronized += 1
        self.queues.run_all()
        self._copies.forget_done()

    def memory(self) -> MemoryStats:
        return replace(super().memory(), shared=False)


class FakeDriver:
    """Locks up to `limit` bytes, and remembers what is locked."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.locked = dict[int, int]()

    def lock(self, address: int, nbytes: int) -> str | None:
        if self.limit is not None and sum(self.locked.values()) + nbytes > self.limit:
            return "out of memory (CUDA error 2)"
        assert address not in self.locked, "memory was locked twice"
        self.locked[address] = nbytes
        return None

    def unlock(self, address: int) -> None:
        del self.locked[address]
