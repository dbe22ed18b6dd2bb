"""A training step in virtual time: `LayerStream` itself, in the orders of `lema.stream.schedule`,
on a simulated clock.

The result depends on the given speeds and on nothing else: no byte is read, and nothing sleeps.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from lema.activations.boundaries import NUM_BUFFERS
from lema.backend import Backend
from lema.plan.cost import (
    Allocation,
    Demand,
    Speeds,
    Tier,
    down_seconds,
    group_numbers,
    rows_in_host,
    saved_elsewhere,
)
from lema.plan.memory import device_parts, host_parts
from lema.plan.simulation.virtual import Clock, VirtualDevice, VirtualReader
from lema.stream import LayerStream
from lema.stream.placement import ByteRun, LayerBytes
from lema.stream.schedule import ExpertGroup, in_parts, training_order

__all__ = ["Simulated", "layers_like", "simulate"]


AHEAD = NUM_BUFFERS - 1  # layers whose activations are on their way while one is in use
STEPS = 3  # the first begins with nothing read; the last is what a run is made of


@dataclass(frozen=True)
class Simulated:
    """One step in the middle of a run."""

    seconds: float  # from the end of the step before to its own
    compute: float  # seconds the device computed
    link: float  # seconds the link carried weights or activations to the device
    disk: float  # seconds the disk was read from, or written to
    stall_disk: float  # seconds the device waited for bytes that were not read yet
    stall_upload: float  # seconds it waited for bytes on the link
    stall_boundaries: float  # seconds it waited for activations
    bytes_read: int  # of weights, from disk
    bytes_uploaded: int  # of weights, over the link
    device_peak: int  # bytes of device memory, the most at once
    host_peak: int  # bytes of host memory, the most at once

    @property
    def bottleneck(self) -> str:
        """What is busy longest: `compute`, `link` or `disk`."""
        busy = {"compute": self.compute, "link": self.link, "disk": self.disk}
        return max(busy, key=lambda name: busy[name])


def layers_like(demand: Demand) -> list[LayerBytes]:
    """Return leased parts of the sizes in a demand; nothing else about them is known."""
    read = (
        ByteRun(Path(), 0, demand.total("read_bytes", [number]), 0)
        for number in range(len(demand.leased))
    )
    return [
        LayerBytes((), (run,), (), nbytes)
        for run, (_, nbytes) in zip(read, demand.leased, strict=True)
    ]


def simulate(demand: Demand, allocation: Allocation, speeds: Speeds) -> Simulated:
    """Let a few steps pass in virtual time and return what the last was like; a ScheduleError: a
    buffer was misused.
    """
    clock = Clock()
    # which experts are in a group changes nothing
    groups = {
        layer: [ExpertGroup(number, 0, 1) for number in numbers]
        for layer, numbers in group_numbers(demand.groups).items()
    }
    device = VirtualDevice(clock, speeds)
    stream = LayerStream(
        layers_like(demand),
        cast(Backend, device),
        prefetch_depth=allocation.slots - 1,
        residents=allocation.residents,
        host_cached=allocation.host_cached,
        groups=groups,
        reader=VirtualReader(device),
        clock=clock,
    )
    device.synchronize()
    run = _Run(demand, allocation, stream, device)
    run.announce()
    for _ in range(STEPS - 1):
        run.step()
    before = run.totals()
    run.step()
    spent = {name: total - before[name] for name, total in run.totals().items()}
    stream.close()
    on_device = device_parts(demand, allocation)  # what is not the stream's
    extra_bytes = sum(
        size for part, size in on_device.items() if part not in ("slots", "residents")
    )
    in_host = host_parts(demand, allocation)
    return Simulated(
        **spent,
        device_peak=(
            device.peak["host"] - in_host["cached"] if device.shared else device.peak["device"]
        )
        + extra_bytes,
        host_peak=device.peak["host"]
        + sum(size for part, size in in_host.items() if part not in ("ring", "cached")),
    )


class _Run:
    """Steps one after the other, as `lema.engine.streamed` and the trainer make them."""

    def __init__(
        self, demand: Demand, allocation: Allocation, stream: LayerStream, device: VirtualDevice
    ) -> None:
        self.demand = demand
        self.allocation = allocation
        self.stream = stream
        self.device = device
        self.order = training_order(len(demand.layers), demand.lowest)
        # of each layer what leaves the device, and where to
        self.away: dict[int, tuple[int, Tier]] = {}
        for index in demand.keeping:
            if index not in allocation.saved and allocation.boundaries != "device":
                self.away[index] = demand.boundary_bytes, allocation.boundaries
        for index, nbytes in saved_elsewhere(demand, allocation).items():
            self.away[index] = nbytes, allocation.saved_on
        # chunks of inputs come back to make keys and values again, and to be recomputed
        self.times = 1 if rows_in_host(demand, allocation) is None else 2
        self._fetched: dict[int, float] = {}  # when that is back

    def announce(self) -> None:
        """Say what the next step leases."""
        self.stream.announce(self.stream.training_order(self.demand.lowest))

    def step(self) -> None:
        """Let one step pass, its leases those of `training_order`."""
        demand = self.demand
        device = self.device
        device.compute(demand.outside_seconds)
        for index in self.order[: demand.top]:
            self._visit(index, demand.layers[index].forward)
            if index in self.away:
                self._send_away(*self.away[index])
        top = demand.layers[demand.top]
        self._visit(demand.top, top.forward + top.backward + demand.head_seconds, top=demand.top)
        self._hand_over(demand.top)
        device.synchronize()  # the loss is looked at
        self.announce()
        below = self.order[demand.top + 1 :]
        pending = deque(index for index in below if index in self.away)
        for _ in range(min(AHEAD, len(pending))):
            self._bring_back(pending.popleft())
        for index in below:
            waited = index in self._fetched
            if waited:
                device.wait_for(self._fetched.pop(index))
            self._visit(
                index,
                down_seconds(demand, self.allocation, index) - demand.layers[index].expand,
                down=True,
            )
            self._hand_over(index)
            if waited and pending:
                self._bring_back(pending.popleft())
        device.synchronize()

    def totals(self) -> dict[str, Any]:
        """Return the seconds and the bytes of weights since the beginning."""
        device = self.device
        counters = self.stream.counters
        return {
            "seconds": device.clock.now,
            "compute": device.computed,
            "link": device.link.busy,
            "disk": device.disk.busy,
            "stall_disk": device.stall_disk,
            "stall_upload": device.stall_upload,
            "stall_boundaries": device.stall_boundaries,
            "bytes_read": counters.bytes_read,
            "bytes_uploaded": 0 if device.shared else counters.bytes_uploaded,
        }

    def _visit(
        self, index: int, seconds: float, *, top: int | None = None, down: bool = False
    ) -> None:
        """Lease a layer, and its groups of experts; compute as long with each."""
        expand = self.demand.layers[index].expand
        parts = in_parts([index], self.stream.parts, top_layer=top, down=down)[1:]
        part_seconds = (expand + seconds) / (1 + len(parts)) if parts else expand + seconds
        with self.stream.lease(index) as lease:
            self.device.compute(part_seconds, lease.slot, self.stream.layers[index])
            for number in parts:
                with self.stream.lease(number) as part:
                    self.device.compute(part_seconds, part.slot, self.stream.layers[number])

    def _hand_over(self, index: int) -> None:
        """Write the gradients of weights that train themselves behind the backward, against the
        stream of weights.
        """
        if nbytes := self.demand.layers[index].gradient_bytes:
            self.device.back.do(nbytes, self.device.computed_until)

    def _send_away(self, nbytes: int, tier: Tier) -> None:
        """Write activations behind the forward: over the link's other direction, then to the
        disk.
        """
        _, there = self.device.back.do(nbytes, self.device.computed_until)
        if tier == "disk":
            self.device.disk.do(nbytes, there)

    def _bring_back(self, index: int) -> None:
        """Fetch activations ahead of the backward."""
        nbytes, tier = self.away[index]
        nbytes *= self.times
        device = self.device
        here = self.device.clock.now
        if tier == "disk":
            _, here = device.disk.do(nbytes, here)
        _, self._fetched[index] = device.link.do(nbytes, here)
