"""Device slots for a device that works through queues: each is guarded by two events, filled and free.

The queue of uploads overwrites a slot after it is free; compute reads it after it is filled. No thread waits except one
that asks for a source to be drained. `CopyDown` is the way back: a tensor copied to host memory behind the compute that
makes it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lema.backend.queues import Copies, Event, Queue

__all__ = ["CopyDown", "SlotUpload", "Slots"]


@dataclass(eq=False)
class _Slot:
    memory: Tensor  # uint8 `[nbytes]`
    free: Event  # when nothing queued so far needs the bytes any more
    filled: Event | None = None  # when the last upload to it is done; None: there was none
    uploads: int = 0  # how many there were


class Slots:
    """A ring of slots: `lema.backend.DeviceSlots` on a device that works through queues.

    The memory is uint8 tensors on the device, one per slot, just allocated on the queue that computes.
    """

    def __init__(self, copies: Copies, memory: Sequence[Tensor]) -> None:
        self._copies, self.queues = copies, copies.queues
        compute = self.queues.compute
        # The memory's former owner may have let it go while work that uses it was still queued.
        free = compute.record()
        slots = [_Slot(piece, free) for piece in memory]
        self.free = deque(slots)
        # The allocator hands the memory to whatever is queued next on the queue it was allocated on, and knows nothing
        # of other queues.
        weakref.finalize(self, _let_go, compute, slots).atexit = False

    def upload(self, source: Tensor) -> SlotUpload:
        """Start copying `source`, uint8 `[n]` with n at most the slot's size, into the slot that was free first."""
        assert self.free, "more uploads are held than there are slots"
        slot = self.free.popleft()
        before = [slot.free] if slot.filled is None else [slot.free, slot.filled]  # the last upload may still run
        slot.filled = self._copies.upload(slot.memory[: len(source)], source, before)
        slot.uploads += 1
        return SlotUpload(self, slot, slot.filled, len(source))


class SlotUpload:
    """`lema.backend.Upload` into one of `Slots`."""

    def __init__(self, slots: Slots, slot: _Slot, filled: Event, nbytes: int) -> None:
        self._slots, self._slot, self._filled, self._nbytes = slots, slot, filled, nbytes
        self._number, self._released = slot.uploads, False

    def wait(self) -> Tensor:
        """Return the slot, uint8 `[nbytes]`; compute queued after this call sees the bytes. The caller goes on."""
        if self._released:
            assert self._slot.uploads == self._number, "a slot was asked for that something else was uploaded to"
            self._slots.free.remove(self._slot)
            # So that the next release is after the last, on whatever queue that was.
            self._slots.queues.compute.wait(self._slot.free)
            self._released = False
        self._slots.queues.compute.wait(self._filled)
        return self._slot.memory[: self._nbytes]

    def release(self) -> None:
        """Give the slot back; it is refilled after the compute queued so far."""
        assert not self._released, "a slot was released twice"
        self._released = True
        self._slot.free = self._slots.queues.compute.record()
        self._slots.free.append(self._slot)

    def drained(self) -> None:
        """Block the calling thread until the source was copied."""
        self._filled.wait()


def _let_go(compute: Queue, slots: Sequence[_Slot]) -> None:
    """Let the next use of the slots' memory begin after what still touches it, in whatever queue."""
    for slot in slots:
        compute.wait(slot.free)  # it may have been released on another queue
        if slot.filled is not None:
            compute.wait(slot.filled)


class CopyDown:
    """`lema.backend.Download` on a device that works through queues.

    The source is held until `release`, so that its memory is not used again meanwhile.
    """

    def __init__(self, copies: Copies, source: Tensor, target: Tensor) -> None:
        source = source.detach()
        self._queues = copies.queues
        self._landed = copies.download(target, source)
        # Where this is dropped without `release`, the memory goes back to its allocator all the same.
        self._forgotten = weakref.finalize(self, _wait_while_held, copies.queues.compute, self._landed, source)
        self._forgotten.atexit = False

    def release(self) -> None:
        """Let compute that is queued from now on begin after the copy; the caller goes on at once."""
        if self._forgotten.alive:
            self._queues.compute.wait(self._landed)
            self._forgotten.detach()  # from here on the memory may be used again

    def landed(self) -> None:
        """Block the calling thread, which may be any, until the bytes are in host memory."""
        self._landed.wait()


def _wait_while_held(compute: Queue, landed: Event, source: Tensor) -> None:  # noqa: ARG001 - held until this was called
    compute.wait(landed)
