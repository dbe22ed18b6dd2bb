"""torch's streams and events as the queues of `lema.backend.queues`, for whichever accelerator torch has.

Queues whose work has ended when it is queued are the reference that the streams are compared with.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from lema.backend.hostmemory import anonymous
from lema.backend.protocols import DeviceSlots, Download
from lema.backend.queues import Copies, CopyDown, Event, Slots

__all__ = ["TorchCarrier", "carrier_for", "has_streams", "pinned"]

# A device finishes each copy that it has begun. So a layer is copied in pieces: activations get in between.
PIECE = 32 << 20


def carrier_for(device: torch.device, *, use_streams: bool = True, pin_memory: bool = True) -> TorchCarrier:
    """Return the carrier of bytes from and to any device that torch knows. Where the device allows it, copies run
    beside the compute if `use_streams`, and from and to page-locked host memory if `pin_memory`."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return TorchCarrier(device, at_once=True)
    return TorchCarrier(device, at_once=not (use_streams and has_streams(device)), pin_memory=pin_memory)


def has_streams(device: torch.device) -> bool:
    """Return whether a device has streams: of the accelerators that torch knows some have one queue for everything, and
    then their module offers no `Stream`."""
    return hasattr(torch.get_device_module(device), "Stream")


def pinned(nbytes: int) -> Tensor:
    """Return uint8 `[nbytes]` of page-locked memory at a page boundary, from torch's allocator for the accelerator. That
    takes a block of the next power of two. `RuntimeError`: the memory cannot be had."""
    memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    if memory.data_ptr() % mmap.PAGESIZE:  # a driver that divides its pages between small requests
        memory = torch.empty(nbytes + mmap.PAGESIZE - 1, dtype=torch.uint8, pin_memory=True)
        memory = memory[-memory.data_ptr() % mmap.PAGESIZE :][:nbytes]
    return memory


class TorchCarrier:
    """A `lema.backend.Carrier` whose copies run during the compute, in torch's streams; no thread waits for them. If
    `at_once`, copies have ended when the call returns, on any device: the reference for the others. Otherwise the
    device is of the kind of torch's current accelerator; without a number, it is the one that is current now. With
    `pin_memory` host buffers are page-locked: a device copies from and to others only while its host waits."""

    def __init__(self, device: torch.device, *, at_once: bool, pin_memory: bool = False) -> None:
        if not at_once:
            index = torch.accelerator.current_device_index() if device.index is None else device.index
            device = torch.device(device.type, index)
        self.device, self.at_once, self._pin_memory = device, at_once, pin_memory
        self.copies = Copies(_Done() if at_once else _Queues(device))

    def host_buffer(self, nbytes: int) -> Tensor:
        return pinned(nbytes) if self._pin_memory else anonymous(nbytes)

    def device_slots(self, nbytes: int, count: int) -> DeviceSlots:
        """Return a ring of `count` slots, in memory that belongs to the stream that computes now."""
        memory = [torch.empty(nbytes, dtype=torch.uint8, device=self.device) for _ in range(count)]
        return Slots(self.copies, memory)

    def download(self, source: Tensor, target: Tensor) -> Download:
        return CopyDown(self.copies, source, target)


class _Event:
    """A torch event behind what a stream has to do so far."""

    def __init__(self, stream: torch.Stream, event: torch.Event) -> None:
        self._index, self.event = stream.device_index, event
        event.record(stream)

    def wait(self) -> None:
        with torch.accelerator.device_index(self._index):  # a thread that never chose one would wake up the first
            self.event.synchronize()

    def happened(self) -> bool:
        with torch.accelerator.device_index(self._index):
            return bool(self.event.query())


class _Queue:
    """A torch stream, and what makes its events."""

    def __init__(self, stream: torch.Stream, new_event: Callable[[], torch.Event]) -> None:
        self._stream, self._new_event = stream, new_event

    def record(self) -> Event:
        return _Event(self._stream, self._new_event())

    def wait(self, event: Event) -> None:
        assert isinstance(event, _Event)
        self._stream.wait_event(event.event)

    def copy(self, target: Tensor, source: Tensor) -> None:
        pieces: Iterable[tuple[Tensor, Tensor]] = [(target, source)]
        if source.dim() == 1 and source.nbytes > PIECE:
            count = PIECE // source.element_size()
            pieces = zip(target.split(count), source.split(count), strict=True)
        with self._stream:
            for into, piece in pieces:
                into.copy_(piece, non_blocking=True)

    def current(self) -> AbstractContextManager[Any]:
        return self._stream


class _Queues:
    """`lema.backend.queues.Queues` of one device: four streams besides the one that computes.

    A thread that waits for a `torch.Event` may spin. Where the device's own events let it sleep they are used, with the
    device's own streams, because the two kinds do not mix.
    """

    def __init__(self, device: torch.device) -> None:
        self._index = device.index
        module: Any = torch.get_device_module(device)
        sleeps = hasattr(module, "Event") and "blocking" in signature(module.Event).parameters
        new_stream: Callable[[], torch.Stream] = partial(module.Stream if sleeps else torch.Stream, device=device)
        self._new_event: Callable[[], torch.Event] = (
            partial(module.Event, blocking=True) if sleeps else partial(torch.Event, device)
        )
        self._current_stream: Callable[[int], torch.Stream] = (module if sleeps else torch.accelerator).current_stream
        self.uploads, self.returns, self.downloads, self.gathers = (
            _Queue(new_stream(), self._new_event) for _ in range(4)
        )

    @property
    def compute(self) -> _Queue:
        """The stream that is current in the calling thread, now; in a backward, autograd makes it the forward's."""
        return _Queue(self._current_stream(self._index), self._new_event)


class _Done:
    """A queue of a device whose work has ended when it is queued, each of its events, and all its `Queues`."""

    def __init__(self) -> None:
        self.compute = self.uploads = self.returns = self.downloads = self.gathers = self

    def record(self) -> Event:
        return self

    def wait(self, event: Event | None = None) -> None:
        """Nothing is under way."""

    def happened(self) -> bool:
        return True

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def current(self) -> AbstractContextManager[Any]:
        return nullcontext()
