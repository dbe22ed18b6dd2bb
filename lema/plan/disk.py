"""A disk that only keeps time: the reader that `LayerStream` has when it is simulated."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lema.plan.clock import Clock, ScheduleError
from lema.plan.virtual import VirtualDevice
from lema.stream.placement import LayerBytes
from lema.stream.reader import LayerReader, Ticket

__all__ = ["VirtualReader"]


class VirtualReader(LayerReader):
    """A reader whose reads take as long as the disk needs.

    Args:
        device: whose host buffers it fills.
    """

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
        device, known = self._on, self._on.memory_of(buffer)
        with device.clock.elsewhere():
            if before is not None:
                before()
            begin = device.clock.now
        if known.leased:
            raise ScheduleError("a buffer was refilled while its layer was on lease")
        start, done = device.disk.do(layer.read_bytes, begin)
        if start < known.in_use:
            raise ScheduleError("a buffer was refilled while it was copied or computed with")
        known.content, known.filled = layer, done
        self.bytes_read += layer.read_bytes
        return _Read(device.clock, done)


class _Read(Ticket):
    def __init__(self, clock: Clock, end: float) -> None:
        super().__init__([])
        self._clock, self._end = clock, end

    def done(self) -> bool:
        return self._clock.now >= self._end

    def wait(self) -> None:
        self._clock.wait_until(self._end)

    def settle(self) -> None:
        self._clock.wait_until(self._end)
