"""A training step in virtual time: `LayerStream` itself, in the orders of `lema.stream.schedule`, timed.

What comes out depends on the speeds given and on nothing else: no byte is read, nothing sleeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lema.plan.virtual import Clock, Stalls, VirtualDevice, VirtualReader
from lema.stream.cost import Allocation, Demand, Speeds, device_parts, host_parts
from lema.stream.lease import LayerStream
from lema.stream.placement import LayerBytes
from lema.stream.schedule import training_order

__all__ = ["Simulated", "layers_like", "simulate"]

STEPS = 3  # the first begins with nothing read; the last is what a run is made of


@dataclass(frozen=True)
class Simulated:
    """One step in the middle of a run.

    Attributes:
        seconds: from the end of the step before to its own.
        compute: seconds the device computed.
        link: seconds the link carried weights or boundary activations to the device.
        disk: seconds the disk was read from, or written to.
        stall_disk: seconds the device waited for bytes that were not read yet.
        stall_upload: seconds it waited for bytes on the link.
        stall_boundaries: seconds it waited for boundary activations.
        bytes_read: of weights, from disk.
        bytes_uploaded: of weights, over the link.
        device_peak: bytes of device memory, the most at once.
        host_peak: bytes of host memory, likewise.
    """

    seconds: float
    compute: float
    link: float
    disk: float
    stall_disk: float
    stall_upload: float
    stall_boundaries: float
    bytes_read: int
    bytes_uploaded: int
    device_peak: int
    host_peak: int

    @property
    def bottleneck(self) -> str:
        """What is busy longest: `compute`, `link` or `disk`."""
        busy = {"compute": self.compute, "link": self.link, "disk": self.disk}
        return max(busy, key=lambda name: busy[name])

    @property
    def bound(self) -> float:
        """Seconds below which no schedule could come."""
        return max(self.compute, self.link, self.disk)


def layers_like(demand: Demand) -> list[LayerBytes]:
    """Return layers of the sizes that a demand names, for a simulation without a model."""
    return [_SizesOnly((), (), (), layer.slot_bytes, layer.read_bytes) for layer in demand.layers]


@dataclass(frozen=True)
class _SizesOnly(LayerBytes):
    stored_bytes: int = 0

    @property
    def read_bytes(self) -> int:
        return self.stored_bytes


def simulate(
    demand: Demand, allocation: Allocation, speeds: Speeds, layers: Sequence[LayerBytes] | None = None
) -> Simulated:
    """Let a few steps pass in virtual time and return what the last of them was like.

    Args:
        demand: what a step needs.
        allocation: what memory is spent on.
        speeds: of disk and link.
        layers: those of the model; None: layers of the sizes in `demand`.

    Raises:
        ScheduleError: a buffer was used before it was filled, or refilled while it was in use.
    """
    clock = Clock()
    device = VirtualDevice(clock, speeds)
    reader = VirtualReader(device)
    stream = LayerStream(
        layers_like(demand) if layers is None else layers,
        device,
        prefetch_depth=allocation.slots - 1,
        residents=allocation.residents,
        host_cached=allocation.host_cached,
        reader=reader,
        clock=clock,
    )
    device.synchronize()
    run = _Run(demand, allocation, stream, device)
    stream.announce(training_order(len(demand.layers), demand.lowest))
    for _ in range(STEPS - 1):
        run.step()
    before = _Totals.of(run)
    run.step()
    spent = _Totals.of(run).less(before)
    fixed = {name: nbytes for name, nbytes in device_parts(demand, allocation).items() if name not in _OF_THE_STREAM}
    in_host = host_parts(demand, allocation)["boundaries"]
    held = device.host_peak + sum(fixed.values()) if device.shared else device.device_peak + sum(fixed.values())
    stream.close()
    return Simulated(*spent.numbers(), held, device.host_peak + in_host)


_OF_THE_STREAM = {"slots", "residents"}


@dataclass(frozen=True)
class _Totals:
    """What has passed since the beginning."""

    seconds: float
    compute: float
    link: float
    disk: float
    stall_disk: float
    stall_upload: float
    stall_boundaries: float
    bytes_read: int
    bytes_uploaded: int

    @classmethod
    def of(cls, run: _Run) -> _Totals:
        device, counters = run.device, run.stream.counters
        stalls: Stalls = device.stalls
        return cls(
            device.clock.now,
            device.computed,
            device.link.busy,
            device.disk.busy,
            stalls.disk,
            stalls.upload,
            stalls.boundaries,
            counters.bytes_read,
            0 if device.shared else counters.bytes_uploaded,
        )

    def numbers(self) -> tuple[float, float, float, float, float, float, float, int, int]:
        return (
            self.seconds,
            self.compute,
            self.link,
            self.disk,
            self.stall_disk,
            self.stall_upload,
            self.stall_boundaries,
            self.bytes_read,
            self.bytes_uploaded,
        )

    def less(self, before: _Totals) -> _Totals:
        return _Totals(*(after - earlier for after, earlier in zip(self.numbers(), before.numbers(), strict=True)))  # type: ignore[arg-type] # in the fields' order


class _Run:
    """Steps one after the other, as `lema.streamed` and the trainer make them."""

    def __init__(self, demand: Demand, allocation: Allocation, stream: LayerStream, device: VirtualDevice) -> None:
        self.demand, self.allocation, self.stream, self.device = demand, allocation, stream, device
        self._fetched: dict[int, float] = {}  # when a layer's boundaries are back on the device

    def step(self) -> None:
        demand, device = self.demand, self.device
        device.compute(demand.rest)
        for index in range(demand.top):
            self._visit(index, demand.layers[index].forward)
            if index in demand.visited_twice:
                self._send_away()
        top = demand.layers[demand.top]
        self._visit(demand.top, top.forward + top.backward + demand.turn)
        device.synchronize()  # the loss is looked at
        self.stream.announce(training_order(len(demand.layers), demand.lowest))
        below = list(reversed(demand.visited_twice))
        for index in below[:2]:
            self._bring_back(index)
        for place, index in enumerate(below):
            layer = demand.layers[index]
            if index in self._fetched:
                device.wait_for(self._fetched.pop(index))
            self._visit(index, layer.backward + (index not in self.allocation.saved) * layer.recompute)
            for following in below[place + 2 : place + 3]:
                self._bring_back(following)
        device.synchronize()

    def _visit(self, index: int, seconds: float) -> None:
        with self.stream.lease(index) as lease:
            self.device.compute(seconds, lease.slot, self.stream.layers[index])

    def _send_away(self) -> None:
        """Write boundary activations behind the forward: over the link's other direction, then to the disk."""
        device, nbytes = self.device, self.demand.boundary_bytes
        if self.allocation.boundaries != "device":
            _, there = device.back.do(nbytes, device.computed_until)
            if self.allocation.boundaries == "disk":
                device.disk.do(nbytes, there)

    def _bring_back(self, index: int) -> None:
        """Fetch boundary activations ahead of the backward."""
        device, nbytes = self.device, self.demand.boundary_bytes
        if self.allocation.boundaries != "device":
            here = device.clock.now
            if self.allocation.boundaries == "disk":
                _, here = device.disk.do(nbytes, here)
            _, self._fetched[index] = device.link.do(nbytes, here)
