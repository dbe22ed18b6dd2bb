"""Where pieces wait, in the shortest way that is right: in host memory, or behind a few buffers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import wait
from random import Random

import torch
from queuefakes import GARBAGE, FakeDevice
from torch import Tensor

from lema.activations.diskstore import DiskStore
from lema.activations.hoststore import HostPool


class FakeStore:
    """`lema.activations.protocols.Store`. Host memory that nobody has any more is garbage.

    Attributes:
        live: places that were not dropped.
        refused: how often there was no room.
    """

    def __init__(self, device: FakeDevice, chance: Random) -> None:
        self.device = device
        self.chance = chance
        self.live = self.refused = 0
        self.free = list[Tensor]()

    def buffer(self, nbytes: int) -> Tensor:
        """Return memory that was just given back, if there is any of that size."""
        for index, memory in enumerate(self.free):
            if len(memory) == nbytes:
                return self.free.pop(index)
        return self.device.memory(nbytes, lambda memory: memory.fill(GARBAGE))

    def give_back(self, memory: Tensor) -> None:
        if self.chance.random() < 0.8:
            self.free.insert(0, memory)  # else it goes back to the system

    def some_steps(self) -> None:
        """Go on with what goes on by itself."""

    def finish(self) -> None:
        """Bring it to its end: until then it may hold what the copies hold."""

    def close(self) -> None:
        self.free.clear()


class HostOnly(FakeStore):
    """Room in host memory, or none."""

    def allocate(self, nbytes: int) -> Kept | None:
        if self.chance.random() < 0.05:
            self.refused += 1
            return None
        return Kept(self, nbytes)


class Kept:
    def __init__(self, store: FakeStore, nbytes: int) -> None:
        self.store = store
        self.nbytes = nbytes
        self.buffer: Tensor | None = None
        self.dropped = False
        store.live += 1

    def fill(self) -> Tensor:
        self.buffer = self.store.buffer(self.nbytes)
        return self.buffer

    def filled(self, landed: Callable[[], None]) -> None: ...

    def expect(self) -> None: ...

    def ready(self) -> bool:
        return True

    def memory(self) -> Tensor:
        assert self.buffer is not None and not self.dropped
        return self.buffer

    def used(self, drained: Callable[[], None]) -> None: ...

    def drop(self) -> None:
        if not self.dropped:
            self.dropped = True
            self.store.live -= 1
            if self.buffer is not None:
                self.store.give_back(self.buffer)
            self.buffer = None


class ThroughBuffers(FakeStore):
    """A disk, as far as order goes: what has landed is taken out of its buffer, which is used
    again at once.
    """

    def __init__(self, device: FakeDevice, chance: Random) -> None:
        super().__init__(device, chance)
        self.work = deque[Callable[[], None]]()

    def allocate(self, nbytes: int) -> Written:
        return Written(self, nbytes)

    def some_steps(self) -> None:
        while self.work and self.chance.random() < 0.5:
            self.work.popleft()()

    def finish(self) -> None:
        while self.work:
            self.work.popleft()()

    def reuse(self, buffer: Tensor) -> None:
        buffer.fill_(GARBAGE)
        self.give_back(buffer)


class Written:
    def __init__(self, store: ThroughBuffers, nbytes: int) -> None:
        self.store = store
        self.nbytes = nbytes
        self.buffer: Tensor | None = None
        self.on_disk: bytes | None = None
        self.dropped = False
        store.live += 1

    def fill(self) -> Tensor:
        self.buffer = self.store.buffer(self.nbytes)
        return self.buffer

    def filled(self, landed: Callable[[], None]) -> None:
        buffer = self.buffer
        self.buffer = None
        assert buffer is not None

        def write() -> None:
            landed()
            self.on_disk = buffer.numpy().tobytes()
            self.store.reuse(buffer)

        self.store.work.append(write)

    def expect(self) -> None:
        self.store.some_steps()

    def ready(self) -> bool:
        return self.on_disk is not None

    def memory(self) -> Tensor:
        assert not self.dropped
        while self.on_disk is None:
            self.store.work.popleft()()
        self.buffer = self.store.buffer(self.nbytes)
        self.buffer.copy_(torch.frombuffer(bytearray(self.on_disk), dtype=torch.uint8))
        return self.buffer

    def used(self, drained: Callable[[], None]) -> None:
        buffer = self.buffer
        self.buffer = None
        assert buffer is not None

        def drain() -> None:
            drained()
            self.store.reuse(buffer)

        self.store.work.append(drain)

    def drop(self) -> None:
        if not self.dropped:
            self.dropped = True
            self.store.live -= 1


def settle(store: DiskStore) -> None:
    """Wait for what is on its way to the disk; raise what failed."""
    with store._lock:
        wait([transfer.future for transfer in store._in_flight if transfer.kind == "write"])
        store._check()


def taken_bytes(store: DiskStore) -> int:
    """The bytes of the file in which something waits."""
    with store._lock:
        store._poll()
        return store._space.extents.taken_bytes


def used_bytes(pool: HostPool) -> int:
    """The bytes of the buffers that are in use."""
    with pool._lock:
        pool._sort()
        return sum(len(buffer) for buffer, _ in pool._out.values())
