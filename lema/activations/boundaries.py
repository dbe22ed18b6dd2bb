"""The three tiers where boundary activations wait between forward and backward: the device, host memory, or the disk.

A boundary activation is one micro-batch's input to one layer, `[batch, sequence, hidden]`. `make_tier` opens a tier. A
tier keeps its memory from step to step: it grows when a step needs more and never shrinks, because the batches of a run
differ in length and what the longest one needed will be needed again. `FetchAhead` brings boundaries back in the order
of the backward, a few of them ahead of the one in use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from lema.backend import DeviceSlots, Download, Upload
from lema.backend.registry import has_addresses
from lema.backend.trace import NO_TRACE, NoTrace
from lema.storage.spillfile import OffloadFile, whole_blocks

if TYPE_CHECKING:
    from lema.backend import Carrier

__all__ = ["NUM_BUFFERS", "FetchAhead", "Key", "Tier", "TierName", "as_bytes", "make_tier", "placed"]


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


TierName = Literal["device", "host", "disk"]
ALIGNMENT = 64  # of a boundary in memory: torch's own


class Tier(Protocol):
    """Boundaries of one step at a time. What a boundary looks like is said by `like`, a tensor without bytes."""

    @property
    def memory_bytes(self) -> int:
        """The bytes of memory held, of whatever kind."""

    def begin(self, likes: Sequence[Tensor]) -> None:
        """Forget the step before; make room for boundaries like these."""

    def keep(self, key: Key, state: Tensor, like: Tensor, to_come: int) -> None:
        """Keep a copy of `state`, which nobody writes into any more: it may be copied later, and is held until then.
        This boundary and those `to_come` after it have no room where they are unlike those that `begin` was told of,
        and room is made."""

    def turn(self, order: Sequence[tuple[Key, Tensor]]) -> None:
        """Begin to fetch, in the order in which boundaries will be asked for."""

    def fetched(self, key: Key) -> Generator[Tensor, None, None]:
        """Yield the boundary, on the device; it may be gone when the generator goes on or is closed."""

    def close(self) -> None:
        """Give everything back."""


def make_tier(name: TierName, backend: Carrier, directory: Path, trace: NoTrace = NO_TRACE) -> Tier:
    """Return an empty tier; `directory` is where one on disk has its file, `trace` records what goes there."""
    if name == "device":
        return _OnDevice(backend) if has_addresses(backend.device) else _AsTheyAre()
    return _InHost(backend) if name == "host" else _OnDisk(backend, directory, trace)


class _Pool:
    """Memory that is handed out from the start again in every step."""

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self._allocate = allocate
        self._chunks: list[Tensor] = []
        self._chunk = self._used = 0

    @property
    def nbytes(self) -> int:
        return sum(len(chunk) for chunk in self._chunks)

    def restart(self, nbytes: int) -> None:
        """Have `nbytes` in one piece, at least."""
        if len(self._chunks) > 1 or self.nbytes < nbytes:
            nbytes = max(nbytes, self.nbytes)
            self._chunks.clear()  # before more is taken: the old and the new shall not add up
            self._chunks.append(self._allocate(nbytes))
        self._chunk = self._used = 0

    def take(self, nbytes: int, to_come: int) -> Tensor:
        """Return the next `nbytes`; where there are none left, take room for as many again for all `to_come`."""
        while self._chunk < len(self._chunks):
            chunk, start = self._chunks[self._chunk], self._used
            if start + nbytes <= len(chunk):
                self._used += _aligned(nbytes)
                return chunk[start : start + nbytes]
            self._chunk, self._used = self._chunk + 1, 0
        self._chunks.append(self._allocate(_aligned(nbytes) * (to_come + 1)))
        return self.take(nbytes, to_come)


class _OnDevice:
    def __init__(self, backend: Carrier) -> None:
        self._pool = _Pool(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device=backend.device))
        self._places: dict[Key, Tensor] = {}

    @property
    def memory_bytes(self) -> int:
        return self._pool.nbytes

    def begin(self, likes: Sequence[Tensor]) -> None:
        self._places.clear()
        self._pool.restart(sum(_aligned(like.nbytes) for like in likes))

    def keep(self, key: Key, state: Tensor, like: Tensor, to_come: int) -> None:
        place = placed(self._pool.take(like.nbytes, to_come), like)
        self._places[key] = place.copy_(state)

    def turn(self, order: Sequence[tuple[Key, Tensor]]) -> None:
        """Everything is where it is needed."""

    def fetched(self, key: Key) -> Generator[Tensor, None, None]:
        yield self._places.pop(key)

    def close(self) -> None:
        self._places.clear()


class _AsTheyAre:
    """Boundaries on a lazy device, whose memory is the runtime's. In memory of ours each would be written to a place of
    its own, and every layer's graph would be another."""

    memory_bytes = 0

    def __init__(self) -> None:
        self._states: dict[Key, Tensor] = {}

    def begin(self, likes: Sequence[Tensor]) -> None:  # noqa: ARG002 - others make room
        self._states.clear()

    def keep(self, key: Key, state: Tensor, like: Tensor, to_come: int) -> None:  # noqa: ARG002
        self._states[key] = state

    def turn(self, order: Sequence[tuple[Key, Tensor]]) -> None:
        """Everything is where it is needed."""

    def fetched(self, key: Key) -> Generator[Tensor, None, None]:
        yield self._states.pop(key)

    def close(self) -> None:
        self._states.clear()


class _Leaving:
    """Downloads under way. The last few keep their boundaries on the device, so that compute need not wait for them."""

    def __init__(self, backend: Carrier) -> None:
        self._backend = backend
        self._held: deque[Download] = deque()

    def begin(self, state: Tensor, target: Tensor) -> Download:
        if len(self._held) == NUM_BUFFERS:
            self._held.popleft().release()
        self._held.append(self._backend.download(state, target))
        return self._held[-1]

    def let_go(self) -> None:
        """Keep none: what comes next needs the room."""
        while self._held:
            self._held.popleft().release()


class _InHost:
    """Copies are queued behind the compute that makes the state, and those back behind them; nobody waits for one."""

    def __init__(self, backend: Carrier) -> None:
        self._leaving = _Leaving(backend)
        self._pool = _Pool(backend.host_buffer)
        self._places: dict[Key, Tensor] = {}
        self._uploads = FetchAhead(backend, self._source, lambda *_: None)

    @property
    def memory_bytes(self) -> int:
        return self._pool.nbytes

    def begin(self, likes: Sequence[Tensor]) -> None:
        self._uploads.stop()
        self._leaving.let_go()
        self._places.clear()
        self._pool.restart(sum(_aligned(like.nbytes) for like in likes))

    def keep(self, key: Key, state: Tensor, like: Tensor, to_come: int) -> None:
        place = self._pool.take(like.nbytes, to_come)
        self._leaving.begin(state, placed(place, like))
        self._places[key] = place

    def turn(self, order: Sequence[tuple[Key, Tensor]]) -> None:
        self._leaving.let_go()
        self._uploads.start(order)

    def fetched(self, key: Key) -> Generator[Tensor, None, None]:
        return self._uploads.fetched(key)

    def close(self) -> None:
        self._uploads.stop()
        self._leaving.let_go()
        self._places.clear()

    def _source(self, key: Key, *_: Any) -> tuple[Tensor, Future[None] | None]:
        return self._places.pop(key), None


class _OnDisk:
    """A few buffers in host memory, through which boundaries go to the disk and come back."""

    def __init__(self, backend: Carrier, directory: Path, trace: NoTrace) -> None:
        self._backend = backend
        self._leaving = _Leaving(backend)
        self._file = OffloadFile(
            directory,
            "boundary activations",
            "free some space, set offload_dir to a directory on another disk, or use boundary_activations: host",
            trace,
        )
        self._buffers: list[Tensor] = []
        self._free: deque[tuple[Tensor, Upload | None]] = deque()  # with what must drain before it is filled again
        self._writing: deque[tuple[Tensor, Future[None]]] = deque()
        self._reading: list[Future[None]] = []
        self._places: dict[Key, tuple[int, Future[None]]] = {}
        self._end = 0
        self._uploads = FetchAhead(backend, self._source, lambda buffer, upload: self._free.append((buffer, upload)))

    @property
    def memory_bytes(self) -> int:
        return sum(len(buffer) for buffer in self._buffers)

    def begin(self, likes: Sequence[Tensor]) -> None:
        self._settle()
        self._file.reserve(sum(whole_blocks(like.nbytes) for like in likes))

    def keep(self, key: Key, state: Tensor, like: Tensor, to_come: int) -> None:
        nbytes = whole_blocks(like.nbytes)
        self._file.reserve(self._end + nbytes * (to_come + 1))
        buffer = self._buffer(nbytes)
        landed = self._leaving.begin(state, placed(buffer, like)).landed
        written = self._file.write(as_bytes(buffer[:nbytes]), self._end, landed)
        self._writing.append((buffer, written))
        self._places[key] = self._end, written
        self._end += nbytes

    def turn(self, order: Sequence[tuple[Key, Tensor]]) -> None:
        self._leaving.let_go()
        self._uploads.start(order)

    def fetched(self, key: Key) -> Generator[Tensor, None, None]:
        return self._uploads.fetched(key)

    def close(self) -> None:
        self._settle()
        self._file.close()
        self._buffers.clear()
        self._free.clear()

    def _settle(self) -> None:
        """Wait until nothing touches the buffers; of a step that was given up, what failed is nobody's any more."""
        self._uploads.stop()
        self._leaving.let_go()
        wait_for(
            [future for future in (*self._reading, *(future for _, future in self._writing)) if not future.cancel()]
        )
        self._reading.clear()
        self._writing.clear()
        self._places.clear()
        self._free = deque((buffer, None) for buffer in self._buffers)
        self._end = 0

    def _buffer(self, nbytes: int) -> Tensor:
        """Return a buffer that the disk and the device are done with; what failed to be written is raised."""
        for _, written in self._writing:
            if written.done():
                written.result()
        if not self._free and len(self._buffers) == NUM_BUFFERS:
            buffer, written = self._writing.popleft()
            written.result()
            self._free.append((buffer, None))
        return self._taken(nbytes)[0]

    def _taken(self, nbytes: int) -> tuple[Tensor, Upload | None]:
        """Return the next free buffer, in place of one that is too small or of none a new one."""
        if self._free:
            buffer, draining = self._free.popleft()
            if len(buffer) >= nbytes:
                return buffer, draining
            self._buffers = [one for one in self._buffers if one is not buffer]
        self._buffers.append(self._backend.host_buffer(nbytes))
        return self._buffers[-1], None

    def _source(self, key: Key, nbytes: int, wait: bool) -> tuple[Tensor, Future[None] | None] | None:
        """Start reading a boundary, if there is a buffer for it, or will be once something is written."""
        while self._writing and (self._writing[0][1].done() or (wait and not self._free)):
            buffer, written = self._writing.popleft()
            written.result()
            self._free.append((buffer, None))
        if not self._free:
            return None
        padded = whole_blocks(nbytes)
        buffer, draining = self._taken(padded)
        offset, kept = self._places.pop(key)

        def before() -> None:
            kept.result()
            if draining is not None:
                draining.drained()

        read = self._file.read(as_bytes(buffer[:padded]), offset, before)
        self._reading = [read, *(other for other in self._reading if not other.done())]
        return buffer, read


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
