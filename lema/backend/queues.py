"""Copies between host memory and a device that works through queues, each after the operations it
depends on.

Nothing here knows torch's streams, so the order can be proven on a machine without such a device,
with queues that take any course which these protocols allow. `Copies` is called from one thread at
a time: the training thread, or autograd's on its behalf. Each of the device's `Slots` is guarded by
two events, filled and free: the queue of uploads overwrites it after it is free, compute reads it
after it is filled. No thread waits, but to drain a source.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from torch import Tensor

from lema.backend.protocols import DeviceSlots, SlotLayout, Span, Upload

__all__ = ["Copies", "CopyDown", "Event", "MappedSlots", "Queue", "Queues", "Slots"]


class Event(Protocol):
    """A place in a queue: it has happened when everything queued there before it is done."""

    def wait(self) -> None:
        """Block the calling thread, which may be any, until it has happened."""

    def happened(self) -> bool:
        """Say whether it has happened, at once."""


class Queue(Protocol):
    """Work that is done in the order in which it was queued; nothing is said of the order
    between two queues.
    """

    def record(self) -> Event:
        """Return an event behind everything queued so far."""

    def wait(self, event: Event) -> None:
        """Let everything queued from now on begin after `event`. The caller goes on at once."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy between host and device; both have one shape, dtype and strides. The
        caller goes on at once.
        """

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
        """Copies downloaded tensors back to the device."""

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
        self._uploads = _Lane(queues.uploads)
        self._returns = _Lane(queues.returns)
        self._downloads = _Lane(queues.downloads)
        # by the address of the host memory: the last download to it
        self._landings: dict[int, Event] = {}

    def upload(self, target: Tensor, source: Tensor, after: Iterable[Event]) -> Event:
        """Queue a copy of host memory to the device, after some events; return when it is done.
        What was downloaded to that memory before has landed before it is read. Such copies have a
        queue of their own: they come in small pieces, soon needed, which shall not stand behind a
        whole layer of weights; and they wait for compute, as their download did, for which weights
        shall not wait."""
        landing = self.landing(source)
        if landing is None:
            return self._uploads.copy(target, source, source, after)
        return self._returns.copy(target, source, source, (*after, landing))

    def download(self, target: Tensor, source: Tensor) -> Event:
        """Queue a copy of device memory to the host, after the compute queued so far; return
        when it is done.
        """
        done = self._downloads.copy(target, source, target, [self.queues.compute.record()])
        # they end in order, so the last one is after all others
        self._landings[_address(target)] = done
        return done

    def landing(self, memory: Tensor) -> Event | None:
        """Return when the last download to host memory is done; None: there was none."""
        return self._landings.get(_address(memory))

    def forget_done(self) -> None:
        """Let go of the memory of copies that are done."""
        for lane in (self._uploads, self._returns, self._downloads):
            lane.forget_done()


class _Lane:
    """A queue for copies, and the host memory of those that are not known to be done."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._in_flight: deque[tuple[Event, Tensor]] = deque()

    def copy(self, target: Tensor, source: Tensor, host: Tensor, after: Iterable[Event]) -> Event:
        for event in after:
            self._queue.wait(event)
        self._queue.copy(target, source)
        done = self._queue.record()
        self.forget_done()
        # Host memory is held here, because its owner may drop it before the copy is done. Device
        # memory is not: it goes back to an allocator that queues its next use, and so can be made
        # to wait.
        self._in_flight.append((done, host))
        return done

    def forget_done(self) -> None:
        while self._in_flight and self._in_flight[0][0].happened():
            self._in_flight.popleft()


def _address(memory: Tensor) -> int:
    return memory.untyped_storage().data_ptr()


@dataclass(eq=False)
class _Slot:
    memory: Tensor  # uint8 `[nbytes]`
    free: Event  # when nothing queued so far needs the bytes any more
    filled: Event | None = None  # when the last upload to it is done; None: there was none
    uploads: int = 0  # how many there were


class Slots:
    """A ring of slots: `lema.backend.DeviceSlots` on a device that works through queues. The memory
    is uint8 tensors on the device, one per slot, just allocated on the queue that computes."""

    def __init__(self, copies: Copies, memory: Sequence[Tensor]) -> None:
        self._copies = copies
        self.queues = copies.queues
        compute = self.queues.compute
        # The memory's former owner may have let it go while work that uses it was still queued.
        free = compute.record()
        slots = [_Slot(piece, free) for piece in memory]
        self.free = deque(slots)
        # The allocator gives the memory to what is next on its own queue, because it knows of no
        # others.
        weakref.finalize(self, _let_go, compute, slots).atexit = False

    def upload(self, source: Tensor, layout: SlotLayout | None = None) -> SlotUpload:
        """Start copying `source`, uint8 `[n]` with n at most the slot's size, into the slot that
        was free first; with a `layout`, its spans."""
        assert self.free, "more uploads are held than there are slots"
        layout = layout or SlotLayout(len(source), (Span(0, len(source), 0),))
        slot = self.free.popleft()
        # the last upload may still run
        before = [slot.free] if slot.filled is None else [slot.free, slot.filled]
        # One queue copies all spans, in this order, so the slot is filled when the last is there.
        for span in layout.spans or (Span(0, 0, 0),):
            target = slot.memory[span.slot : span.slot + span.nbytes]
            slot.filled = self._copies.upload(
                target, source[span.start : span.start + span.nbytes], before
            )
            before = []
        assert slot.filled is not None
        slot.uploads += 1
        return SlotUpload(self, slot, slot.filled, layout.nbytes)


class SlotUpload:
    """`lema.backend.Upload` into one of `Slots`."""

    def __init__(self, slots: Slots, slot: _Slot, filled: Event, nbytes: int) -> None:
        self._slots = slots
        self._slot = slot
        self._filled = filled
        self._nbytes = nbytes
        self._number = slot.uploads
        self._released = False

    def wait(self) -> Tensor:
        """Return the slot, uint8 `[nbytes]`; compute queued after this call sees the bytes. The
        caller goes on.
        """
        if self._released:
            assert self._slot.uploads == self._number, (
                "a slot was requested that has another upload already"
            )
            self._slots.free.remove(self._slot)
            # So that the next release is after the last, on whatever queue that was.
            self._slots.queues.compute.wait(self._slot.free)
            self._released = False
        self._slots.queues.compute.wait(self._filled)
        return self._slot.memory[: self._nbytes]

    def release(self) -> None:
        assert not self._released, "a slot was released twice"
        self._released = True
        self._slot.free = self._slots.queues.compute.record()
        self._slots.free.append(self._slot)

    def drained(self) -> None:
        self._filled.wait()


class MappedSlots:
    """`lema.backend.DeviceSlots` on a device that computes in host memory: a host buffer is the
    slot, and nothing is copied. `seen` returns a source as the device has it; None: it is not where
    the device computes. Such a source is copied, to a ring that `ring` makes when the first comes.
    """

    def __init__(
        self,
        copies: Copies,
        seen: Callable[[Tensor], Tensor | None],
        ring: Callable[[], DeviceSlots],
    ) -> None:
        self._copies = copies
        self._seen = seen
        self._ring = cache(ring)

    def upload(self, source: Tensor, layout: SlotLayout | None = None) -> Upload:
        """Have the device compute in `source`, uint8 `[n]`."""
        assert layout is None, "a host buffer that is the slot has the layout that it was read in"
        memory = self._seen(source)
        return (
            self._ring().upload(source)
            if memory is None
            else _MappedUpload(self._copies, source, memory)
        )


class _MappedUpload:
    """`lema.backend.Upload` of memory that is its own slot."""

    def __init__(self, copies: Copies, source: Tensor, memory: Tensor) -> None:
        self._queues = copies.queues
        self._memory = memory
        self._landing = copies.landing(source)
        self._released: Event | None = None

    def wait(self) -> Tensor:
        if self._landing is not None:
            self._queues.compute.wait(self._landing)
        return self._memory

    def release(self) -> None:
        self._released = self._queues.compute.record()

    def drained(self) -> None:
        """Block until nothing computes with the source any more; it is overwritten after its
        release alone.
        """
        if self._released is not None:
            self._released.wait()


def _let_go(compute: Queue, slots: Sequence[_Slot]) -> None:
    """Let the next use of the slots' memory begin after what still touches it, in whatever
    queue.
    """
    for slot in slots:
        compute.wait(slot.free)  # it may have been released on another queue
        if slot.filled is not None:
            compute.wait(slot.filled)


class CopyDown:
    """`lema.backend.Download` on a device that works through queues. The source is held until
    `release`, so that its memory is not used again meanwhile."""

    def __init__(self, copies: Copies, source: Tensor, target: Tensor) -> None:
        source = source.detach()
        self._queues = copies.queues
        self._landed = copies.download(target, source)
        # Where this is dropped without `release`, the memory goes back to its allocator all the
        # same.
        self._forgotten = weakref.finalize(
            self, _wait_before_reuse, copies.queues.compute, self._landed, source
        )
        self._forgotten.atexit = False

    def release(self) -> None:
        """Let compute that is queued from now on begin after the copy; the caller goes on at
        once.
        """
        if self._forgotten.alive:
            self._queues.compute.wait(self._landed)
            self._forgotten.detach()  # from here on the memory may be used again

    def landed(self) -> None:
        self._landed.wait()


def _wait_before_reuse(compute: Queue, landed: Event, source: Tensor) -> None:  # noqa: ARG001 - held until this was called
    compute.wait(landed)
