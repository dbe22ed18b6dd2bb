"""Boundary activations on their way from host memory to the device, some ahead of the one in use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from lema.backend import DeviceSlots, Upload

if TYPE_CHECKING:
    from lema.activations.seams import Carrier

__all__ = ["NUM_BUFFERS", "FetchAhead", "Key", "as_bytes", "placed"]

Key = tuple[int, int]  # layer, micro-batch
NUM_BUFFERS = 3  # boundaries between where they wait and the layer: one in use, two on their way


@dataclass
class _Fetch:
    key: Key
    like: Tensor
    buffer: Tensor
    read: Future[None] | None
    slot: DeviceSlots | None = None
    upload: Upload | None = None


class FetchAhead:
    """Fetches boundaries in an order that is known beforehand.

    Args:
        backend: the device.
        source: given a key, the bytes it has and whether to wait, returns the memory it will be in and the read that
            fills it, if any; None: there is no memory for it yet, and it is not waited for.
        done: takes the memory back, with the upload that must drain before it is filled again.
    """

    def __init__(
        self,
        backend: Carrier,
        source: Callable[[Key, int, bool], tuple[Tensor, Future[None] | None] | None],
        done: Callable[[Tensor, Upload | None], None],
    ) -> None:
        self._backend, self._source, self._done = backend, source, done
        self._order: deque[tuple[Key, Tensor]] = deque()
        self._fetches: deque[_Fetch] = deque()
        self._slots: deque[DeviceSlots] = deque()  # that are free
        self._slot_bytes = self._num_held = 0

    def start(self, order: Sequence[tuple[Key, Tensor]]) -> None:
        """Begin; `order` says of each boundary what it looks like."""
        largest = max((like.nbytes for _, like in order), default=0)
        if largest > self._slot_bytes:
            self._slots = deque(self._backend.device_slots(largest, 1) for _ in range(NUM_BUFFERS))
            self._slot_bytes = largest
        self._order.extend(order)
        self._pump()

    def fetched(self, key: Key) -> Generator[Tensor, None, None]:
        """Yield the next boundary, on the device; what failed on its way is raised."""
        self._pump(wait=not self._fetches)
        fetch = self._fetches.popleft()
        assert fetch.key == key, "boundaries were asked for in another order than the backward's"
        self._num_held += 1
        try:
            if fetch.upload is None:
                self._upload(fetch)
            assert fetch.upload is not None
            self._pump()
            yield placed(fetch.upload.wait(), fetch.like)
        finally:
            self._num_held -= 1
            self._give_back(fetch)
        self._pump()

    def stop(self) -> None:
        """Forget what was to be fetched. Uploads given up may bring what is put there next: nobody looks at them."""
        self._order.clear()
        while self._fetches:
            self._give_back(self._fetches.popleft())

    def _pump(self, wait: bool = False) -> None:
        """Start every read there is a buffer for, one at least where `wait` says so, and every upload whose bytes are
        there."""
        while self._order and len(self._fetches) + self._num_held < NUM_BUFFERS:
            key, like = self._order[0]
            if (taken := self._source(key, like.nbytes, wait)) is None:
                break
            self._order.popleft()
            self._fetches.append(_Fetch(key, like, *taken))
            wait = False
        for fetch in self._fetches:
            if fetch.read is not None and not fetch.read.done():
                break
            if fetch.upload is None:
                self._upload(fetch)

    def _upload(self, fetch: _Fetch) -> None:
        if fetch.read is not None:
            fetch.read.result()
        fetch.slot = self._slots.popleft()
        fetch.upload = fetch.slot.upload(fetch.buffer[: fetch.like.nbytes])

    def _give_back(self, fetch: _Fetch) -> None:
        if fetch.upload is not None and fetch.slot is not None:
            fetch.upload.release()
            self._slots.append(fetch.slot)
        self._done(fetch.buffer, fetch.upload)


def placed(memory: Tensor, like: Tensor) -> Tensor:
    """Return the tensor that looks like `like` in the first bytes of `memory`."""
    flat = memory[: like.nbytes].view(like.dtype)
    return flat.as_strided(like.shape, like.stride(), flat.storage_offset())


def as_bytes(memory: Tensor) -> memoryview:
    """Return host memory as files are read into it and written from it."""
    return memoryview(memory.numpy())  # type: ignore[arg-type] # numpy's stubs lack the buffer protocol before 3.12
