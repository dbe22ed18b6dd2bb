"""Random courses of uploads, downloads and gatherings on the second device's streams, and
whether a byte was wrong.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lema.backend.lockedmemory import HostMemory
from lema_accelerator.driver import RuntimeDriver

NBYTES = 64
ACTIONS = 60
GARBAGE = 0xDD


@dataclass
class Ring:
    slots: Any
    free: deque[int]  # places of its slots, in the order in which they are taken


@dataclass
class Held:
    """An upload: what it brings, and whether its slot has had another one since."""

    upload: Any
    ring: Ring
    place: int
    value: int
    source: Tensor | None
    released: bool = False
    refilled: bool = False


class Sender:
    """A replica alone: what it gathers is its own part, sent in the stream that is current."""

    rank = local_rank = 0
    size = local_size = 1

    def gather(self, upload: Any, whole: Tensor) -> Any:
        whole.copy_(upload.wait())
        return SimpleNamespace(wait=upload.release)


class Course:
    """One course.

    Args:
        code: `Copies`, `Slots`, `CopyDown`, `QueuedReplicas` and `queues`, which makes the queues
            of a device.
        seed: of what is done.
    """

    def __init__(self, code: SimpleNamespace, seed: int) -> None:
        self.device = torch.device("second", 0)
        self.code = code
        self.chance = Random(seed)
        self.queues = code.queues(self.device)
        self.copies = code.Copies(self.queues)
        self.replicas = code.QueuedReplicas(Sender(), self.queues)
        self.host = HostMemory(RuntimeDriver(self.device), page_locked=True)
        self.rings: list[Ring] = []
        self.held: list[Held] = []
        self.downloads: list[tuple[Any, Tensor | None, Tensor, int]] = []
        self.brought: list[tuple[Tensor, int]] = []  # host memory that a download was begun to
        self.gatherings: list[tuple[Any, Tensor | None, int]] = []
        self.reads: list[tuple[str, int, Tensor]] = []
        self.number = 0

    def run(self) -> None:
        """Take random actions; assert that everything read was what had to be read."""
        actions: list[Callable[[], None]] = [
            *[self.upload] * 5,
            *[self.lease] * 5,
            *[self.release] * 5,
            *[self.lease_again] * 2,
            *[self.drain] * 2,
            self.drop_source,
            self.make_ring,
            self.drop_ring,
            *[self.download] * 3,
            *[self.end_download] * 2,
            self.land,
            *[self.upload_what_was_brought] * 2,
            *[self.gather] * 2,
            *[self.end_gather] * 2,
        ]
        for _ in range(2):
            self.make_ring()
        try:
            for _ in range(ACTIONS):
                self.chance.choice(actions)()
        finally:
            torch.accelerator.synchronize()
        for what, value, read in self.reads:
            content = read.cpu()
            assert bool((content == value).all()), f"{what}: {content[:4].tolist()}, not {value}"

    def fresh(self) -> int:
        self.number = self.number % 200 + 1
        return self.number

    def read(self, memory: Tensor, value: int, what: str) -> None:
        self.reads.append((what, value, memory.clone()))

    def on_device(self, value: int = GARBAGE) -> Tensor:
        return torch.full((NBYTES,), value, dtype=torch.uint8, device=self.device)

    def on_host(self, value: int = GARBAGE) -> Tensor:
        return self.host.buffer(NBYTES).fill_(value)

    def pick(self, entries: list[Any]) -> Any:
        return self.chance.choice(entries) if entries else None

    def make_ring(self) -> None:
        if len(self.rings) < 3:
            count = self.chance.choice((1, 1, 2, 3))
            pieces = [
                torch.empty(NBYTES, dtype=torch.uint8, device=self.device) for _ in range(count)
            ]
            self.rings.append(Ring(self.code.Slots(self.copies, pieces), deque(range(count))))

    def drop_ring(self) -> None:
        if self.chance.random() < 0.4 and self.rings:
            ring = self.rings.pop(self.chance.randrange(len(self.rings)))
            self.held = [entry for entry in self.held if entry.ring is not ring]

    def upload(self) -> None:
        value = self.fresh()
        self.begin(self.on_host(value), value)

    def upload_what_was_brought(self) -> None:
        if self.brought and self.begin(*self.brought[-1]):
            self.brought.pop()

    def begin(self, source: Tensor, value: int) -> bool:
        ring = self.pick([ring for ring in self.rings if ring.free])
        if ring is None:
            return False
        place = ring.free.popleft()
        for entry in self.held:
            entry.refilled = entry.refilled or (entry.ring is ring and entry.place == place)
        self.held.append(Held(ring.slots.upload(source), ring, place, value, source))
        return True

    def lease(self) -> None:
        if entry := self.pick([entry for entry in self.held if not entry.released]):
            self.read(entry.upload.wait(), entry.value, "a slot on lease")

    def lease_again(self) -> None:
        if entry := self.pick(
            [entry for entry in self.held if entry.released and not entry.refilled]
        ):
            memory = entry.upload.wait()
            entry.released = False
            entry.ring.free.remove(entry.place)
            self.read(memory, entry.value, "a slot leased again")

    def release(self) -> None:
        if entry := self.pick([entry for entry in self.held if not entry.released]):
            if self.chance.random() < 0.7:
                self.read(entry.upload.wait(), entry.value, "a slot before its release")
            entry.upload.release()
            self.after_release(entry)

    def after_release(self, entry: Held) -> None:
        entry.released = True
        entry.ring.free.append(entry.place)

    def drain(self) -> None:
        if entry := self.pick([entry for entry in self.held if entry.source is not None]):
            entry.upload.drained()
            if not any(entry.source is target for target, _ in self.brought):
                entry.source.fill_(GARBAGE)
                self.downloads = [down for down in self.downloads if down[2] is not entry.source]
            entry.source = None

    def drop_source(self) -> None:
        if entry := self.pick([entry for entry in self.held if entry.source is not None]):
            entry.source = None

    def download(self) -> None:
        value = self.fresh()
        source = self.on_device(value)
        target = self.on_host()
        download = self.code.CopyDown(self.copies, source, target)
        self.downloads.append(
            (download, source if self.chance.random() < 0.5 else None, target, value)
        )
        if self.chance.random() < 0.5:
            self.brought.append((target, value))

    def end_download(self) -> None:
        if self.downloads:
            download, source, _, _ = self.downloads.pop(self.chance.randrange(len(self.downloads)))
            if self.chance.random() < 0.7:
                download.release()
                if source is not None:
                    source.fill_(GARBAGE)

    def land(self) -> None:
        if entry := self.pick(self.downloads):
            download, _, target, value = entry
            download.landed()
            self.reads.append(("what has landed", value, target.clone()))

    def gather(self) -> None:
        if entry := self.pick([entry for entry in self.held if not entry.released]):
            whole = self.on_device()
            self.read(whole, GARBAGE, "memory before it is gathered to")
            gathering = self.replicas.gather(entry.upload, whole)
            self.gatherings.append(
                (gathering, whole if self.chance.random() < 0.7 else None, entry.value)
            )
            self.after_release(entry)

    def end_gather(self) -> None:
        if self.gatherings:
            gathering, whole, value = self.gatherings.pop()
            if self.chance.random() < 0.7:
                gathering.wait()
                if whole is not None:
                    self.read(whole, value, "a layer that was gathered")


class Faulty:
    """A queue one of whose promises is broken.

    Args:
        queue: the true one.
        fault: `"waits for nothing"`; `"happens early"`: its events come before the last work;
            `"another stream"`: its work is queued on another one than it says.
        other: that stream.
    """

    def __init__(self, queue: Any, fault: str, other: Any) -> None:
        self._queue = queue
        self._fault = fault
        self._other = other
        self._early = queue.record()

    def record(self) -> Any:
        if self._fault != "happens early":
            return self._queue.record()
        before = self._early
        self._early = self._queue.record()
        return before

    def wait(self, event: Any) -> None:
        if self._fault != "waits for nothing":
            self._queue.wait(event)

    def copy(self, target: Tensor, source: Tensor) -> None:
        (self._other if self._fault == "another stream" else self._queue).copy(target, source)

    def current(self) -> AbstractContextManager[Any]:
        return (self._other if self._fault == "another stream" else self._queue).current()
