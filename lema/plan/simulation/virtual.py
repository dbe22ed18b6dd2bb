"""Virtual time: a clock that only waiting advances, and a link, a device and a disk that only keep
time.

`LayerStream` runs on these when it is simulated. Each does one thing after the other, at a given
speed. Nothing sleeps and no byte has memory: buffers are on `meta`, and only the training thread's
clock advances, when it waits. Whoever uses a buffer too early gets a `ScheduleError`.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lema.backend import Alone, MemoryStats, SlotLayout
from lema.plan.cost import Speeds
from lema.stream.placement import LayerBytes
from lema.stream.reader import LayerReader
from lema.stream.workers import Ticket

__all__ = ["Clock", "ScheduleError", "VirtualDevice", "VirtualReader"]


class ScheduleError(Exception):
    """The schedule broke a promise: a buffer was used before it was filled, or refilled while it
    was in use.
    """


class Clock:
    """Seconds since the beginning, as the training thread sees them."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now

    def wait_until(self, moment: float) -> None:
        """Let time pass, if the moment is not past."""
        self.now = max(self.now, moment)

    def turn_back(self, moment: float) -> None:
        """Be at a moment that is past again, because another thread than this one waited."""
        self.now = moment


class Line:
    """Work that is done one piece after the other, as the disk and the link do it."""

    def __init__(self, speed: float) -> None:
        self.speed = speed
        self.free = 0.0
        self.busy = 0.0

    def do(self, nbytes: int, not_before: float) -> tuple[float, float]:
        """Queue a transfer; return when it begins and ends."""
        start = max(self.free, not_before)
        length = nbytes / self.speed
        self.free = start + length
        self.busy = self.busy + length
        return start, self.free


@dataclass
class BufferState:
    """What is known of one buffer: which layer is in it, from when on, and until when it is in
    use.
    """

    content: LayerBytes | None = None
    filled: float = 0.0
    in_use: float = 0.0  # until then something copies from it, or computes with it
    leased: bool = False

    def fill(self, layer: LayerBytes, moment: float) -> None:
        """Hold a layer from now on, complete at that moment."""
        self.content = layer
        self.filled = moment

    def use(self, until: float) -> None:
        """Be in use until that moment at least."""
        self.in_use = max(self.in_use, until)

    def lease(self) -> None:
        """Begin a lease of the layer."""
        self.leased = True

    def release(self) -> None:
        """End the lease."""
        self.leased = False


class VirtualDevice:
    """As much of a `Backend` as a `LayerStream` asks for; it keeps time. With an infinite link host
    buffers are the slots, and computing keeps the training thread busy; else it is queued."""

    replicas = Alone()

    def __init__(self, clock: Clock, speeds: Speeds) -> None:
        self.clock = clock
        self.shared = speeds.link == float("inf")
        self.disk = Line(speeds.disk)
        self.link = Line(speeds.link)
        self.back = Line(speeds.link)
        # Seconds that the device waited for bytes that were not read yet, for the link, and for
        # boundary activations.
        self.stall_disk = self.stall_upload = self.stall_boundaries = 0.0
        self.computed = self.computed_until = 0.0
        self.device = torch.device("meta")  # where tensors have no bytes
        self._bytes = Counter[str]()
        self.peak = Counter[str]()  # of buffers, on the device and in host memory
        self._buffer_states: dict[int, BufferState] = {}
        self._ready = self._read = 0.0  # when the last upload and the last read were complete

    def memory_of(self, tensor: Tensor) -> BufferState:
        """Return what is known of the buffer that `tensor` is a part of."""
        return self._buffer_states[tensor.untyped_storage()._cdata]

    def memory(self) -> MemoryStats:
        """Say that layers that stay are there when a step begins, as they are in the middle of a
        run.
        """
        return MemoryStats(0, 0, 0)

    def host_buffer(self, nbytes: int, memory: Tensor | None = None) -> Tensor:  # noqa: ARG002 - as in Backend
        """Return a buffer without memory, and count it for as long as it lives."""
        return self._allocate("host", nbytes)

    def device_slots(self, nbytes: int, count: int) -> _Slot:
        """Return a slot without memory, or the source itself where the device computes in host
        memory.
        """
        assert count == 1, "a stream asks for one slot at a time"
        return _Slot(self, None if self.shared else self._allocate("device", nbytes))

    def compute(
        self, seconds: float, lease: Tensor | None = None, layer: LayerBytes | None = None
    ) -> None:
        """Queue computation, with the weights of `layer` in the slot `lease` if they are given."""
        start = max(self.clock.now, self.computed_until)
        if lease is not None:
            state = self.memory_of(lease)
            if state.content is not layer:
                raise ScheduleError("a layer is computed with another layer's weights")
            start = max(start, state.filled)
            self._account(start)
        self.computed += seconds
        self.computed_until = start + seconds
        if lease is not None:
            state.use(self.computed_until)
        if self.shared:
            self.clock.wait_until(self.computed_until)

    def wait_for(self, moment: float) -> None:
        """Let what is computed next wait for boundary activations."""
        start = max(self.clock.now, self.computed_until)
        self.stall_boundaries += max(0.0, moment - start)
        self.computed_until = max(start, moment)
        if self.shared:
            self.clock.wait_until(moment)

    def synchronize(self) -> None:
        """Let the training thread wait until everything queued is done."""
        self.clock.wait_until(max(self.computed_until, self.link.free, self.back.free))

    def uploaded(self, ready: float, read: float) -> None:
        """Note when the layer now leased is on the device, and when it was in host memory."""
        self._ready = ready
        self._read = read

    def _account(self, start: float) -> None:
        """Add the pause before `start` to what caused it: the disk until the bytes were read,
        then the link.
        """
        pause = max(0.0, start - self.computed_until)
        on_disk = min(pause, max(0.0, self._read - self.computed_until))
        self.stall_disk += on_disk
        self.stall_upload += min(pause - on_disk, max(0.0, self._ready - self._read))

    def _allocate(self, where: str, nbytes: int) -> Tensor:
        self._bytes[where] += nbytes
        self.peak[where] = max(self.peak[where], self._bytes[where])
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self._buffer_states[tensor.untyped_storage()._cdata] = BufferState()
        weakref.finalize(tensor, self._bytes.subtract, {where: nbytes})
        return tensor


@dataclass(frozen=True)
class _Slot:
    """A slot of the device; without memory of its own it is the host buffer itself."""

    device: VirtualDevice
    memory: Tensor | None

    def upload(self, source: Tensor, layout: SlotLayout | None = None) -> _Upload:
        """Queue the copy of a source, or of what a layout says of it."""
        device = self.device
        state = self.device.memory_of(source)
        if state.content is None or state.filled > device.clock.now:
            raise ScheduleError("a buffer was uploaded before it was filled")
        if self.memory is None:
            return _Upload(device, source, state, state.filled, state.filled)
        target = device.memory_of(self.memory)
        nbytes = source.numel() if layout is None else layout.copied
        if target.leased:
            raise ScheduleError("more layers are held than there are slots")
        _, done = device.link.do(nbytes, max(device.clock.now, target.in_use))
        state.use(done)
        target.fill(state.content, done)
        target.use(done)
        target.lease()
        return _Upload(device, self.memory, target, state.filled, done)


@dataclass(frozen=True)
class _Upload:
    """A layer in a buffer, which may be leased more than once before it is refilled."""

    device: VirtualDevice
    buffer: Tensor
    state: BufferState  # of the buffer
    read: float  # when the layer was in host memory
    done: float  # when it was on the device

    def wait(self) -> Tensor:
        self.state.lease()
        self.device.uploaded(self.done, self.read)
        return self.buffer

    def release(self) -> None:
        self.state.release()

    def drained(self) -> None:
        self.device.clock.wait_until(self.state.in_use if self.device.shared else self.done)


class VirtualReader(LayerReader):
    """A reader whose reads take as long as the disk needs."""

    def __init__(self, device: VirtualDevice) -> None:
        super().__init__(threads=1)
        self._on = device

    def submit(
        self,
        layer: LayerBytes,
        buffer: Tensor,
        before: Callable[[], None] | None = None,
        *,
        name: str = "weights",  # noqa: ARG002 - as in LayerReader
    ) -> Ticket:
        """Queue the read of a layer."""
        device = self._on
        state = self._on.memory_of(buffer)
        now = device.clock.now
        if before is not None:
            before()  # another thread waits in it: afterwards this one is as late as it was
        begin = device.clock.now
        device.clock.turn_back(now)
        if state.leased:
            raise ScheduleError("a buffer was refilled while its layer was on lease")
        start, done = device.disk.do(layer.read_bytes, begin)
        if start < state.in_use:
            raise ScheduleError("a buffer was refilled while it was copied or computed with")
        state.fill(layer, done)
        self.bytes_read += layer.read_bytes
        return _Read(device.clock, done)


class _Read(Ticket):
    def __init__(self, clock: Clock, end: float) -> None:
        super().__init__([])
        self._clock = clock
        self._end = end

    def done(self) -> bool:
        return self._clock.now >= self._end

    def wait(self) -> None:
        self._clock.wait_until(self._end)

    cancel = wait
