"""torch's streams and events as the queues of `lema.backend.queues`, for whichever accelerator torch has.

Queues whose work has ended when it is queued are the reference that the streams are compared with.
"""

from __future__ import annotations

import mmap
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lema.backend.hostmemory import anonymous
from lema.backend.protocols import DeviceSlots, Download
from lema.backend.queues import Copies, CopyDown, Event, Slots

__all__ = ["TorchCarrier", "carrier_for"]


def carrier_for(device: torch.device, *, use_streams: bool = True, pin_memory: bool = True) -> TorchCarrier:
    """Return the carrier of bytes from and to any device that torch knows. Where the device allows it, copies run
    beside the compute if `use_streams`, and from and to page-locked host memory if `pin_memory`."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return TorchCarrier(device, at_once=True)
    # Of the accelerators torch knows some have a single stream, and then their module offers no `Stream`.
    streams = use_streams and hasattr(torch.get_device_module(device), "Stream")
    return TorchCarrier(device, at_once=not streams, pin_memory=pin_memory)


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
        self._copies = Copies(_Done() if at_once else _Queues(device))

    def host_buffer(self, nbytes: int) -> Tensor:
        if not self._pin_memory:
            return anonymous(nbytes)
        memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        if memory.data_ptr() % mmap.PAGESIZE:  # a driver that divides its pages between small requests
            memory = torch.empty(nbytes + mmap.PAGESIZE - 1, dtype=torch.uint8, pin_memory=True)
            memory = memory[-memory.data_ptr() % mmap.PAGESIZE :][:nbytes]
        return memory

    def device_slots(self, nbytes: int, count: int) -> DeviceSlots:
        """Return a ring of `count` slots, in memory that belongs to the stream that computes now."""
        memory = [torch.empty(nbytes, dtype=torch.uint8, device=self.device) for _ in range(count)]
        return Slots(self._copies, memory)

    def download(self, source: Tensor, target: Tensor) -> Download:
        return CopyDown(self._copies, source, target)


class _Event:
    """A `torch.Event`. A torch that can lets the thread that waits for it sleep, others ignore that."""

    def __init__(self, stream: torch.Stream) -> None:
        self._index = stream.device_index
        self.event = torch.Event(stream.device, blocking=True)
        self.event.record(stream)

    def wait(self) -> None:
        with torch.accelerator.device_index(self._index):  # a thread that never chose one would wake up the first
            self.event.synchronize()

    def happened(self) -> bool:
        with torch.accelerator.device_index(self._index):
            return bool(self.event.query())


class _Queue:
    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream

    def record(self) -> Event:
        return _Event(self._stream)

    def wait(self, event: Event) -> None:
        assert isinstance(event, _Event)
        self._stream.wait_event(event.event)

    def copy(self, target: Tensor, source: Tensor) -> None:
        with self._stream:
            target.copy_(source, non_blocking=True)

    def current(self) -> AbstractContextManager[Any]:
        return self._stream


class _Queues:
    """`lema.backend.queues.Queues` of one device: three streams besides the one that computes. It gathers nothing."""

    def __init__(self, device: torch.device) -> None:
        self._index = device.index
        self.uploads, self.returns, self.downloads = (_Queue(torch.Stream(device=device)) for _ in range(3))
        self.gathers = self.uploads

    @property
    def compute(self) -> _Queue:
        """The stream that is current in the calling thread, now; in a backward, autograd makes it the forward's."""
        return _Queue(torch.accelerator.current_stream(self._index))


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
