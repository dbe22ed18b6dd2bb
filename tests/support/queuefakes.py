"""A device with queues that take any course which stream order and events allow, chosen by a seed.

Copies take effect in two halves, so that a read between them shows. Memory is told apart from the
tensors that lie in it: what is queued knows only addresses, as a device does, and what a dropped
tensor lay in is at once somebody else's.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

NAMES = ("compute", "uploads", "returns", "downloads", "gathers")
GARBAGE = 0xDD


class FakeEvent:
    def __init__(self, device: FakeDevice, queue: FakeQueue) -> None:
        self._device = device
        self.queue = queue
        self.done = False

    def wait(self) -> None:
        if not self.done:
            self._device.host_waits += 1
            self._device.waiting_threads.add(threading.current_thread())
            self._device.run_until(self)

    def happened(self) -> bool:
        self._device.some_steps()
        return self.done


class FakeQueue:
    def __init__(self, device: FakeDevice, name: str) -> None:
        self.device = device
        self.name = name
        self.work: deque[Callable[[], None] | FakeEvent] = deque()  # an event: to be waited for

    def record(self) -> FakeEvent:
        event = FakeEvent(self.device, self)

        def happen() -> None:
            event.done = True

        self.do(happen)
        return event

    def wait(self, event: Any) -> None:
        assert isinstance(event, FakeEvent)
        self._append(event)

    def copy(self, target: Tensor, source: Tensor) -> None:
        assert (target.shape, target.dtype, target.stride()) == (
            source.shape,
            source.dtype,
            source.stride(),
        )
        held = (target, source) if self.device.holds_tensors else None
        move(self, target.data_ptr(), source.data_ptr(), source.nbytes, held)

    def do(self, work: Callable[[], None]) -> None:
        self._append(work)

    @contextmanager
    def current(self) -> Iterator[None]:
        before = self.device.compute
        self.device.compute = self
        yield
        self.device.compute = before

    def ready(self) -> bool:
        return bool(self.work) and (not isinstance(self.work[0], FakeEvent) or self.work[0].done)

    def advance(self) -> None:
        work = self.work.popleft()
        if not isinstance(work, FakeEvent):
            work()

    def _append(self, work: Callable[[], None] | FakeEvent) -> None:
        with self.device.lock:
            self.work.append(work)
            self.device.some_steps()


def move(queue: FakeQueue, target: int, source: int, nbytes: int, held: object = None) -> None:
    """Queue a copy from address to address, the second half of it after the first."""
    half = nbytes // 2
    for start, size in ((0, half), (half, nbytes - half)):
        queue.do(
            lambda start=start, size=size, held=held: ctypes.memmove(
                target + start, source + start, size
            )
        )


class FakeDevice:
    """`lema.backend.queues.Queues`.

    Args:
        chance: decides what is done when.
        holds_tensors: keep the ends of a copy alive until it is done, right or wrong.
    """

    def __init__(self, chance: Random, *, holds_tensors: bool = False) -> None:
        self.chance = chance
        self.holds_tensors = holds_tensors
        self.host_waits = 0
        self.waiting_threads = set[threading.Thread]()
        self.lock = threading.RLock()
        self.queues = [FakeQueue(self, name) for name in NAMES]
        self.compute, self.uploads, self.returns, self.downloads, self.gathers = self.queues
        self._speeds = {queue.name: chance.choice((1, 1, 20)) for queue in self.queues}
        self._eager = chance.choice((0.0, 0.0, 0.3, 0.9))
        self._lazy = chance.random() < 0.5
        self._memory: list[np.ndarray] = []

    def some_steps(self) -> None:
        """Go on for a while, as a device does while its host does something else."""
        with self.lock:
            while self.chance.random() < self._eager and self.step():
                pass

    def step(self) -> bool:
        ready = [queue for queue in self.queues if queue.ready()]
        if ready:
            self.chance.choices(ready, [self._speeds[queue.name] for queue in ready])[0].advance()
        return bool(ready)

    def run_until(self, event: FakeEvent) -> None:
        with self.lock:
            while not event.done:
                if self._lazy:
                    self._only_what_is_needed(event)
                else:
                    assert self.step(), "an event is waited for that never happens"

    def run_all(self) -> None:
        with self.lock:
            while self.step():
                pass
            assert not any(queue.work for queue in self.queues), "queues wait for each other"

    def _only_what_is_needed(self, event: FakeEvent) -> None:
        """Do no more than what the event comes behind: everything else is as late as can be."""
        while not event.done:
            head = event.queue.work[0]
            if isinstance(head, FakeEvent):
                self._only_what_is_needed(head)
            event.queue.advance()

    def memory(self, nbytes: int, returned: Callable[[np.ndarray], object]) -> Tensor:
        """Return memory; `returned` is given it when the last tensor in it is dropped."""
        whole = np.full(nbytes, GARBAGE, dtype=np.uint8)
        self._memory.append(whole)  # addresses that are queued stay good
        link = whole.view()
        weakref.finalize(link, returned, whole).atexit = False
        return torch.from_numpy(link)
