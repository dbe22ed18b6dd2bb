"""A random course of uploads, leases, downloads and gatherings, and what every byte that is read
must be.
"""

from __future__ import annotations

import ctypes
from collections import deque
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
from queuefakes import GARBAGE, FakeDevice, FakeQueue, move
from torch import Tensor

NBYTES = 8
ACTIONS = 60


@dataclass
class Ring:
    slots: Any
    free: deque[int]


@dataclass(eq=False)
class Held:
    """An upload, and what its slot holds for as long as nothing else is uploaded to it."""

    upload: Any
    ring: Ring
    slot: int
    value: int
    source: Tensor | None
    leased: Tensor | None = None
    released: bool = False
    refilled: bool = False


@dataclass(eq=False)
class Down:
    download: Any
    source: Tensor | None  # None: it was dropped
    value: int
    target: Tensor | None  # None: it was overwritten since


@dataclass
class Scenario:
    """Runs `code`: `Copies`, `Slots`, `CopyDown`, `QueuedReplicas`."""

    code: SimpleNamespace
    seed: int
    reads: list[tuple[str, int, bytearray]] = field(default_factory=list)

    def run(self) -> None:
        """Take random actions; assert that everything read was what had to be read."""
        self.chance = Random(self.seed)
        self.device = FakeDevice(self.chance)
        self.copies = self.code.Copies(self.device)
        self.replicas = self.code.QueuedReplicas(Sender(self.device), self.device)
        self.rings: list[Ring] = []
        self.held: list[Held] = []
        self.buffers: list[Tensor] = []  # host memory that nothing reads
        self.downloads: list[Down] = []
        self.brought: list[tuple[Tensor, int]] = []  # host memory that a download was begun to
        # without the memory: it was dropped
        self.gatherings: list[tuple[Any, Tensor | None, int]] = []
        self.number = self.blocked = 0
        self.wholes = [self.device_memory() for _ in range(2)]
        actions = [
            *[self.upload] * 5, *[self.lease] * 5, *[self.release] * 5, self.lease_again, self.lease_again,
            self.drain, self.drain, self.drop_source, self.make_ring, self.drop_ring, *[self.download] * 3,
            self.end_download, self.end_download, self.land, self.upload_what_was_brought,
            self.upload_what_was_brought, self.gather, self.gather, self.end_gather, self.end_gather,
        ]  # fmt: skip
        for _ in range(2):
            self.make_ring()
        for _ in range(ACTIONS):
            self.chance.choice(actions)()
        self.device.run_all()
        assert self.device.host_waits <= self.blocked, "the training thread was made to wait"
        for what, value, found in self.reads:
            assert bytes(found) == bytes([value]) * len(found), (
                f"{what}: {bytes(found)!r}, not {value}"
            )

    # Memory

    def device_memory(self) -> Tensor:
        """Allocate, as torch does: whoever had the memory before has let it go while work in it
        was still queued.
        """
        memory = self.device.memory(NBYTES, self.next_tenant)
        self.write(self.device.compute, memory.data_ptr(), GARBAGE)
        return memory

    def next_tenant(self, memory: np.ndarray) -> None:
        """Use the memory for something else, in the queue of compute, the moment the last tensor
        in it is dropped.
        """
        compute = self.device.queues[0]
        value = self.fresh()
        self.write(compute, memory.ctypes.data, value)
        self.read(compute, memory.ctypes.data, value, "memory that was given back")

    def host_memory(self) -> Tensor:
        if self.buffers and self.chance.random() < 0.7:
            return self.buffers.pop()
        return self.device.memory(NBYTES, lambda memory: memory.fill(GARBAGE))

    def fresh(self) -> int:
        self.number = self.number % 200 + 1
        return self.number

    def write(self, queue: FakeQueue, address: int, value: int) -> None:
        for start in (0, NBYTES // 2):
            queue.do(lambda start=start: ctypes.memset(address + start, value, NBYTES // 2))

    def read(self, queue: FakeQueue, address: int, value: int, what: str) -> None:
        found = bytearray(NBYTES)
        into = (ctypes.c_uint8 * NBYTES).from_buffer(found)
        move(queue, ctypes.addressof(into), address, NBYTES, into)
        self.reads.append((what, value, found))

    def one_of(self, found: list[Any]) -> Any:
        return self.chance.choice(found) if found else None

    # Uploads

    def make_ring(self) -> None:
        if len(self.rings) < 3:
            count = self.chance.choice((1, 1, 2, 3))
            pieces = [self.device_memory() for _ in range(count)]
            self.rings.append(Ring(self.code.Slots(self.copies, pieces), deque(range(count))))

    def drop_ring(self) -> None:
        if self.chance.random() < 0.3 and self.rings:
            ring = self.rings.pop(self.chance.randrange(len(self.rings)))
            self.held = [one for one in self.held if one.ring is not ring]

    def upload(self) -> None:
        source = self.host_memory()
        value = self.fresh()
        source.fill_(value)
        if not self.begin_upload(source, value):
            self.buffers.append(source)

    def upload_what_was_brought(self) -> None:
        if self.brought and self.begin_upload(*self.brought[-1]):
            self.brought.pop()

    def begin_upload(self, source: Tensor, value: int) -> bool:
        ring = self.one_of([ring for ring in self.rings if ring.free])
        if ring is None:
            return False
        slot = ring.free.popleft()
        for one in self.held:
            one.refilled = one.refilled or (one.ring is ring and one.slot == slot)
        self.held.append(Held(ring.slots.upload(source), ring, slot, value, source))
        return True

    def lease(self) -> None:
        if one := self.one_of([one for one in self.held if not one.released]):
            one.leased = one.upload.wait()
            self.read(self.device.compute, one.leased.data_ptr(), one.value, "a slot on lease")

    def lease_again(self) -> None:
        if one := self.one_of([one for one in self.held if one.released and not one.refilled]):
            one.leased = one.upload.wait()
            one.released = False
            one.ring.free.remove(one.slot)
            self.read(self.device.compute, one.leased.data_ptr(), one.value, "a slot leased again")

    def release(self) -> None:
        if one := self.one_of([one for one in self.held if not one.released]):
            if one.leased is not None:
                self.read(
                    self.device.compute,
                    one.leased.data_ptr(),
                    one.value,
                    "a slot before its release",
                )
            one.upload.release()
            self.after_release(one)

    def after_release(self, one: Held) -> None:
        one.leased = None
        one.released = True
        one.ring.free.append(one.slot)

    def drain(self) -> None:
        if one := self.one_of(
            [one for one in self.held if one.released and one.source is not None]
        ):
            one.upload.drained()
            self.blocked += 1
            one.source.fill_(GARBAGE)
            for down in self.downloads:
                down.target = None if down.target is one.source else down.target
            self.buffers.append(one.source)
            one.source = None

    def drop_source(self) -> None:
        if one := self.one_of([one for one in self.held if one.source is not None]):
            one.source = None

    # Downloads

    def download(self) -> None:
        source = self.device_memory()
        target = self.host_memory()
        value = self.fresh()
        self.write(self.device.compute, source.data_ptr(), value)
        download = self.code.CopyDown(self.copies, source, target)
        self.downloads.append(
            Down(download, source if self.chance.random() < 0.5 else None, value, target)
        )
        if self.chance.random() < 0.5:
            self.brought.append((target, value))

    def end_download(self) -> None:
        if self.downloads:
            down = self.downloads.pop(self.chance.randrange(len(self.downloads)))
            if self.chance.random() < 0.7:
                down.download.release()
                if down.source is not None:
                    self.write(self.device.compute, down.source.data_ptr(), GARBAGE)

    def land(self) -> None:
        if down := self.one_of([down for down in self.downloads if down.target is not None]):
            down.download.landed()
            self.blocked += 1
            self.reads.append(
                ("what has landed", down.value, bytearray(down.target.numpy().tobytes()))
            )

    # Gatherings

    def gather(self) -> None:
        if one := self.one_of([one for one in self.held if not one.released]):
            whole = (
                self.chance.choice(self.wholes)
                if self.chance.random() < 0.7
                else self.device_memory()
            )
            self.gatherings = [found for found in self.gatherings if found[1] is not whole]
            gathering = self.replicas.gather(one.upload, whole)
            self.gatherings.append(
                (gathering, whole if self.chance.random() < 0.7 else None, one.value)
            )
            self.after_release(one)

    def end_gather(self) -> None:
        if self.gatherings:
            gathering, whole, value = self.gatherings.pop()
            if self.chance.random() < 0.7:
                gathering.wait()
                if whole is not None:
                    self.read(
                        self.device.compute, whole.data_ptr(), value, "a layer that was gathered"
                    )


class Sender:
    """A replica alone: what it gathers is its own part. As torch's: queued where work is queued
    now.
    """

    rank = local_rank = 0
    size = local_size = 1

    def __init__(self, device: FakeDevice) -> None:
        self.device = device

    def gather(self, upload: Any, whole: Tensor) -> Any:
        self.device.compute.copy(whole, upload.wait())
        return SimpleNamespace(wait=upload.release)
