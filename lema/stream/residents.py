"""Layers that stay on the device, some of them still on their way there."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from lema.backend import Backend, Upload
from lema.stream.counters import StreamMeter
from lema.stream.placement import LayerBytes
from lema.stream.reader import LayerReader
from lema.stream.workers import Ticket

__all__ = ["ArrivingLayer", "ResidentLayers", "begin_reading"]


@dataclass(frozen=True)
class ArrivingLayer:
    """A layer that is being read to where it stays."""

    name: str
    ticket: Ticket
    memory: Tensor


def begin_reading(
    numbers: Iterable[int], layers: Sequence[LayerBytes], backend: Backend, reader: LayerReader
) -> dict[int, ArrivingLayer]:
    """Start reading layers that stay on a device that computes in host memory; return them by
    number.
    """
    # all of the memory before any read
    memory = {number: backend.host_buffer(layers[number].nbytes) for number in numbers}
    arriving = dict[int, ArrivingLayer]()
    for number, buffer in memory.items():
        name = layers[number].called(number)
        ticket = reader.submit(layers[number], buffer, name=name)
        arriving[number] = ArrivingLayer(name, ticket, buffer)
    return arriving


class ResidentLayers:
    """The layers that stay on the device.

    Args:
        arriving: those that are being read.
        uploads: those that are on the device.
        released: whether each lease waits for the layer's upload and releases it, as it does of
            other layers: a lazy device's graphs end there, and other processes are sent the layer.
        backend: the device.
        meter: measures the waits for reads.

    Attributes:
        numbers: all of them.
        slots: what is on the device, by number.
    """

    def __init__(
        self,
        arriving: Mapping[int, ArrivingLayer],
        uploads: Mapping[int, Upload],
        *,
        released: bool,
        backend: Backend,
        meter: StreamMeter,
    ) -> None:
        self.numbers = frozenset(arriving) | frozenset(uploads)
        self.slots = {number: upload.wait() for number, upload in uploads.items()}
        self._arriving = dict(arriving)
        self._uploads = dict(uploads) if released else {}
        self._backend = backend
        self._meter = meter

    def slot(self, number: int) -> Tensor:
        """Return the slot of a layer, once the layer has been read."""
        if number in self._arriving:
            layer = self._arriving[number]
            with self._meter.waiting_for_disk(layer.name):
                layer.ticket.wait()
            memory = layer.memory
            self.slots[number] = self._backend.device_slots(memory.numel(), 1).upload(memory).wait()
            del self._arriving[number]
        return self.slots[number]

    def upload(self, number: int) -> Upload:
        """Return a layer whose leases are released."""
        return self._uploads[number]

    def load(self) -> None:
        """Wait until all are on the device."""
        for number in list(self._arriving):
            self.slot(number)

    def cancel(self) -> None:
        """Stop reading them."""
        for layer in self._arriving.values():
            layer.ticket.cancel()

    def clear(self) -> None:
        """Give the memory up."""
        self.slots.clear()
        self._arriving.clear()
        self._uploads.clear()
