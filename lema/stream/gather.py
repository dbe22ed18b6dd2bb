"""Layers gathered on the device from the shards that the processes hold: one on lease, the next one
under way.

Every process gathers the same layers in the same order, or all would wait for ever. So what is
gathered, and when, follows from the leases and the announced orders, never from how far a read or a
copy has come. A layer that was on lease or gathered last is still there, as at each turn of a
training pass. Between two announced orders nothing is under way, because there processes send each
other gradients, and one may have announced the next order earlier than another.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from lema.backend import Backend, Gathering, Upload
from lema.stream.counters import StreamMeter
from lema.stream.lease import NAN_BYTE

__all__ = ["NUM_BUFFERS", "GatheredBuffers", "gathered_bytes"]

NUM_BUFFERS = 2  # one on lease, one being filled


@dataclass
class _Buffer:
    """Memory on the device, and the layer that is in it or on its way into it."""

    memory: Tensor
    layer: int | None = None
    gathering: Gathering | None = None  # None: the layer is whole

    def assign(self, layer: int, gathering: Gathering) -> None:
        """Hold a layer from now on, which is being gathered."""
        self.layer = layer
        self.gathering = gathering

    def empty(self) -> None:
        """Give up the layer."""
        self.layer = None

    def take_gathering(self) -> Gathering | None:
        """Return what gathers the layer, to be waited for; None: the layer is whole."""
        gathering = self.gathering
        self.gathering = None
        return gathering


class GatheredBuffers:
    """The layers that are whole on the device, and the leases to come; one layer is on lease at a
    time. `parts` are the bytes of each layer's part, in every process; `take` brings this process's
    to the device as gathering begins."""

    def __init__(
        self,
        parts: Sequence[int],
        backend: Backend,
        take: Callable[[int], Upload],
        meter: StreamMeter,
    ) -> None:
        self._parts = tuple(parts)
        self._replicas = backend.replicas
        self._take = take
        self._meter = meter
        self._poison = bool(getattr(backend, "poison", False))  # a backend for tests
        nbytes = self._replicas.size * max(self._parts, default=0)
        # the one used longest ago first
        self._buffers = [
            _Buffer(torch.empty(nbytes, dtype=torch.uint8, device=backend.device))
            for _ in range(NUM_BUFFERS)
        ]
        self._ahead: deque[tuple[int, bool]] = deque()  # layers, and whether an order begins there
        self._expected: list[int | None] = self._there()

    @property
    def announced(self) -> int:
        """How many announced leases are still to come."""
        return len(self._ahead)

    @property
    def in_flight(self) -> set[int]:
        """The layers whose parts may not be overwritten: they are being sent."""
        return {
            buffer.layer
            for buffer in self._buffers
            if buffer.gathering is not None and buffer.layer is not None
        }

    def announce(self, layers: Iterable[int]) -> list[int]:
        """Say which layers will be leased next; return those that will be gathered for it, in
        their order.
        """
        to_gather = []
        for index, layer in enumerate(layers):
            self._ahead.append((layer, index == 0))
            if layer in self._expected:
                self._expected.remove(layer)
            else:
                self._expected.pop(0)
                to_gather.append(layer)
            self._expected.append(layer)
        return to_gather

    def begin(self, layer: int) -> bool:
        """Count the first announced lease as begun; False: it is another layer's, so none has
        begun.
        """
        if not self._ahead or self._ahead[0][0] != layer:
            return False
        self._ahead.popleft()
        return True

    def cancel(self) -> None:
        """Forget announced leases. Running gathers continue, because the other processes take
        part in them.
        """
        self._ahead.clear()
        self._expected = self._there()

    @contextmanager
    def lease(self, layer: int) -> Iterator[Tensor]:
        """Hold a layer's whole slot, uint8, for the length of a `with` block; begin to gather
        the next layer.
        """
        buffer = self._of(layer) or self._start(layer)
        self._finish(buffer)
        self._used(buffer)
        following, starts_order = self._ahead[0] if self._ahead else (layer, True)
        if not starts_order and self._of(following) is None:
            self._start(following)
        slot = buffer.memory[: self._replicas.size * self._parts[layer]]
        if not self._poison:
            yield slot
            return
        leased = slot.clone()
        try:
            yield leased
        finally:
            leased.fill_(NAN_BYTE)  # and never used again: what reads it still reads NaN for ever

    def close(self) -> None:
        """Wait for what is being gathered, and give the memory up."""
        self._ahead.clear()
        for buffer in self._buffers:
            # from a process that has ended; the user of the layer got the error
            with suppress(RuntimeError):
                self._finish(buffer)
        self._buffers.clear()

    def _start(self, layer: int) -> _Buffer:
        """Begin to gather a layer, into the buffer that was used longest ago."""
        for pending in self._buffers:
            # in one order, and one at a time: the part of each is in a slot until it was sent
            self._finish(pending)
        upload = self._take(layer)
        buffer = self._buffers[0]
        buffer.empty()
        slot = buffer.memory[: self._replicas.size * self._parts[layer]]
        with self._meter.trace.span("gather", f"layer {layer}", nbytes=slot.numel()):
            buffer.assign(layer, self._replicas.gather(upload, slot))
        self._meter.counters.count_gathered(slot.numel() - self._parts[layer])
        self._used(buffer)
        return buffer

    def _finish(self, buffer: _Buffer) -> None:
        """Let compute queued from now on see the buffer's layer."""
        gathering = buffer.take_gathering()
        if gathering is None:
            return
        try:
            with self._meter.waiting_for_gather(f"layer {buffer.layer}"):
                gathering.wait()
        except BaseException:
            buffer.empty()
            raise

    def _of(self, layer: int) -> _Buffer | None:
        return next((buffer for buffer in self._buffers if buffer.layer == layer), None)

    def _used(self, buffer: _Buffer) -> None:
        self._buffers.sort(key=lambda candidate: candidate is buffer)

    def _there(self) -> list[int | None]:
        return [buffer.layer for buffer in self._buffers]


def gathered_bytes(parts: Sequence[int], processes: int) -> int:
    """Return the bytes of the buffers on the device, as a plan counts them.

    Args:
        parts: bytes of each layer's part in one process.
        processes: how many have such a part.
    """
    return NUM_BUFFERS * processes * max(parts, default=0)
