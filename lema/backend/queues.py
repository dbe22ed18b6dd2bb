"""Copies between host memory and a device that works through queues, each after the operations it depends on.

`Queues`, `Queue` and `Event` are all that such a device must offer. Nothing here knows torch's streams, so the order
can be proven on a machine without such a device, with queues that take any course which these protocols allow. `Copies`
is called from one thread at a time: the training thread, or autograd's on its behalf.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

__all__ = ["Copies", "Event", "Queue", "Queues"]


class Event(Protocol):
    """A place in a queue: it has happened when everything queued there before it is done."""

    def wait(self) -> None:
        """Block the calling thread, which may be any, until it has happened."""

    def happened(self) -> bool:
        """Say whether it has happened, at once."""


class Queue(Protocol):
    """Work that is done in the order in which it was queued; nothing is said of the order between two queues."""

    def record(self) -> Event:
        """Return an event behind everything queued so far."""

    def wait(self, event: Event) -> None:
        """Let everything queued from now on begin after `event`. The caller goes on at once."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy between host and device; both have one shape, dtype and strides. The caller goes on at once."""

    def current(self) -> AbstractContextManager[Any]:
        """Return a context in which this queue is `Queues.compute`."""


class Queues(Protocol):
    """The queues of one device."""

    @property
    def compute(self) -> Queue:
        """Where the calling thread's work is queued now."""

    @property
    def uploads(self) -> Queue:
        """Copies of weights to the device."""

    @property
    def returns(self) -> Queue:
        """Copies back to the device of what was downloaded."""

    @property
    def downloads(self) -> Queue:
        """Copies to host memory."""

    @property
    def gathers(self) -> Queue:
        """What the replicas send each other ahead of its use."""


class Copies:
    """All copies that are under way between host and device."""

    def __init__(self, queues: Queues) -> None:
        self.queues = queues
        self._uploads, self._returns = _Lane(queues.uploads), _Lane(queues.returns)
        self._downloads = _Lane(queues.downloads)
        self._landings: dict[int, Event] = {}  # by the address of the host memory: the last download to it

    def upload(self, target: Tensor, source: Tensor, after: Iterable[Event]) -> Event:
        """Queue a copy of host memory to the device, after some events; return when it is done.

        What was downloaded to that memory before has landed before it is read. Such copies have a queue of their own:
        they come in small pieces, soon needed, which shall not stand behind a whole layer of weights; and they wait for
        compute, as their download did, for which weights shall not wait.
        """
        landing = self._landings.get(_place(source))
        if landing is None:
            return self._uploads.copy(target, source, source, after)
        return self._returns.copy(target, source, source, (*after, landing))

    def download(self, target: Tensor, source: Tensor) -> Event:
        """Queue a copy of device memory to the host, after the compute queued so far; return when it is done."""
        done = self._downloads.copy(target, source, target, [self.queues.compute.record()])
        self._landings[_place(target)] = done  # each in its turn: the last is after all others
        return done

    def forget_done(self) -> None:
        """Let go of the memory of copies that are done."""
        for lane in (self._uploads, self._returns, self._downloads):
            lane.forget_done()


class _Lane:
    """A queue for copies, and the host memory of those that are not known to be done."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._under_way: deque[tuple[Event, Tensor]] = deque()

    def copy(self, target: Tensor, source: Tensor, host: Tensor, after: Iterable[Event]) -> Event:
        for event in after:
            self._queue.wait(event)
        self._queue.copy(target, source)
        done = self._queue.record()
        self.forget_done()
        # Host memory is held here, because its owner may drop it before the copy is done. Device memory is not: it goes
        # back to an allocator that queues its next use, and so can be made to wait.
        self._under_way.append((done, host))
        return done

    def forget_done(self) -> None:
        while self._under_way and self._under_way[0][0].happened():
            self._under_way.popleft()


def _place(memory: Tensor) -> int:
    return memory.untyped_storage().data_ptr()
