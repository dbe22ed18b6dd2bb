"""torch's streams and events as the queues of `lema.backend.queues`, and memory, of whichever
accelerator torch has.

Queues whose work has ended when it is queued are the reference that the streams are compared with.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from inspect import signature
from typing import Any

import psutil
import torch
from torch import Tensor

from lema.backend.host.limits import peak_memory
from lema.backend.hostmemory import anonymous, memory_available
from lema.backend.protocols import DeviceSlots, Download, MemoryStats
from lema.backend.queues import Copies, CopyDown, Event, Slots

__all__ = [
    "TorchCarrier",
    "carrier_for",
    "device_memory",
    "has_streams",
    "pinned",
    "unified_memory",
]

# A device finishes each copy that it has begun. So a layer is copied in pieces: activations get in
# between.
PIECE = 32 << 20


def carrier_for(
    device: torch.device, *, use_streams: bool = True, pin_memory: bool = True
) -> TorchCarrier:
    """Return the carrier of bytes from and to any device that torch knows. Where the device allows
    it, copies run beside the compute if `use_streams`, and from and to page-locked host memory if
    `pin_memory`."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return TorchCarrier(device, at_once=True)
    return TorchCarrier(
        device, at_once=not (use_streams and has_streams(device)), pin_memory=pin_memory
    )


def has_streams(device: torch.device) -> bool:
    """Return whether a device has streams: of the accelerators that torch knows some have one queue
    for everything, and then their module offers no `Stream`."""
    return hasattr(torch.get_device_module(device), "Stream")


def pinned(nbytes: int) -> Tensor:
    """Return uint8 `[nbytes]` of page-locked memory at a page boundary, of torch's allocator for
    the accelerator, which takes a block of the next power of two. `RuntimeError`: the memory cannot
    be had."""
    memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    if memory.data_ptr() % mmap.PAGESIZE:  # a driver that divides its pages between small requests
        memory = torch.empty(nbytes + mmap.PAGESIZE - 1, dtype=torch.uint8, pin_memory=True)
        memory = memory[-memory.data_ptr() % mmap.PAGESIZE :][:nbytes]
    return memory


def device_memory(device: torch.device) -> MemoryStats:
    """Return the bytes of tensors on a device, their peak, and the device's memory."""
    used = _asked(device, "memory_allocated") or _asked(device, "current_allocated_memory") or 0
    peak = max(used, _asked(device, "max_memory_allocated") or 0)
    info = _asked(device, "get_memory_info") or _asked(device, "mem_get_info")
    if info is None:  # it lies in the host's, of which torch recommends how much to use
        total = _asked(device, "recommended_max_memory") or psutil.virtual_memory().total
        return MemoryStats(used, peak, total, free=min(total, memory_available() + used))
    free, total = info
    return MemoryStats(used, peak, total, free=free + (_asked(device, "memory_reserved") or used))


def unified_memory(device: torch.device) -> MemoryStats:
    """Return the same of a device that computes in host memory: of the process, and of the machine.
    The memory of torch's allocator for the device is the driver's, and so is counted beside the
    process's."""
    tensors = device_memory(device)
    peak = peak_memory()
    used = psutil.Process().memory_info().rss
    return MemoryStats(
        used + tensors.used,
        max(used, peak) + tensors.peak,
        psutil.virtual_memory().total,
        shared=True,
        free=memory_available() + used + tensors.used,
    )


def _asked(device: torch.device, name: str) -> Any:
    """Return what torch says of any accelerator by a name, or else the device's own module;
    None: neither does.
    """
    module = torch.get_device_module(device)
    for function, arguments in (
        (getattr(torch.accelerator, name, None), (device,)),
        (getattr(module, name, None), ()),
    ):
        try:
            if function is not None:
                return function(*arguments)  # the module's is of the current device, which this is
        except (RuntimeError, NotImplementedError):
            continue
    return None


class TorchCarrier:
    """A `lema.backend.Carrier` whose copies run during the compute, in torch's streams; no thread
    waits for them. If `at_once`, copies have ended when the call returns, on any device: the
    reference for the others. Otherwise the device is of the kind of torch's current accelerator;
    without a number, it is the one that is current now. With `pin_memory` host buffers are
    page-locked: a device copies from and to others only while its host waits."""

    def __init__(self, device: torch.device, *, at_once: bool, pin_memory: bool = False) -> None:
        if not at_once:
            index = (
                torch.accelerator.current_device_index() if device.index is None else device.index
            )
            device = torch.device(device.type, index)
        self.device = device
        self.at_once = at_once
        self._pin_memory = pin_memory
        self.copies = Copies(_Done() if at_once else _Queues(device))

    def host_buffer(self, nbytes: int) -> Tensor:
        return pinned(nbytes) if self._pin_memory else anonymous(nbytes)

    def device_slots(self, nbytes: int, count: int) -> DeviceSlots:
        """Return a ring of `count` slots, in memory that belongs to the stream that computes
        now.
        """
        memory = [torch.empty(nbytes, dtype=torch.uint8, device=self.device) for _ in range(count)]
        return Slots(self.copies, memory)

    def download(self, source: Tensor, target: Tensor) -> Download:
        return CopyDown(self.copies, source, target)


class _Event:
    """A torch event behind what a stream has to do so far."""

    def __init__(self, stream: torch.Stream, event: torch.Event) -> None:
        self._index = stream.device_index
        self.event = event
        event.record(stream)

    def wait(self) -> None:
        with torch.accelerator.device_index(
            self._index
        ):  # a thread that never chose one would wake up the first
            self.event.synchronize()

    def happened(self) -> bool:
        with torch.accelerator.device_index(self._index):
            return bool(self.event.query())


class _Queue:
    """A torch stream, and what makes its events."""

    def __init__(self, stream: torch.Stream, new_event: Callable[[], torch.Event]) -> None:
        self._stream = stream
        self._new_event = new_event

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

    A thread that waits for a `torch.Event` may spin. Where the device's own events let it sleep
    they are used, with the device's own streams, because the two kinds do not mix.
    """

    def __init__(self, device: torch.device) -> None:
        self._index = device.index
        module: Any = torch.get_device_module(device)
        sleeps = _lets_sleep(getattr(module, "Event", None))
        new_stream: Callable[[], torch.Stream] = partial(
            module.Stream if sleeps else torch.Stream, device=device
        )
        # which heeds `blocking` one day
        new_event = module.Event if sleeps else partial(torch.Event, device)
        self._new_event: Callable[[], torch.Event] = partial(new_event, blocking=True)
        self._current_stream: Callable[[int], torch.Stream] = (
            module if sleeps else torch.accelerator
        ).current_stream
        self.uploads, self.returns, self.downloads, self.gathers = (
            _Queue(new_stream(), self._new_event) for _ in range(4)
        )

    @property
    def compute(self) -> _Queue:
        """The stream that is current in the calling thread, now; in a backward, autograd makes
        it the forward's.
        """
        return _Queue(self._current_stream(self._index), self._new_event)


def _lets_sleep(kind: object) -> bool:
    """Return whether a device has events of its own kind for which a thread can sleep."""
    try:
        return (
            isinstance(kind, type)
            and kind is not torch.Event
            and "blocking" in signature(kind).parameters
        )
    except ValueError:  # it is written in another language, and does not tell
        return False


class _Done:
    """A queue of a device whose work has ended when it is queued, each of its events, and all
    its `Queues`.
    """

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
