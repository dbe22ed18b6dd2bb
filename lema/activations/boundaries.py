"""Where boundary activations wait between the forward and the backward: on the device, in host
memory, or on disk.

A tier keeps its memory from step to step. It grows when a step needs more and never shrinks:
batches of a run differ in length, and what the longest needed will be needed again. Off the device
boundaries are pieces in a store, whose order is known beforehand: so a few slots on the device
serve all that come back.
"""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from lema.activations.diskstore import DiskStore
from lema.activations.hoststore import HostPiece, HostPool
from lema.activations.protocols import WaitingPiece
from lema.backend import Carrier, DeviceSlots, Download, Downloaded, Upload
from lema.backend.registry import has_addresses
from lema.backend.trace import NO_TRACE, NoTrace
from lema.storage.spillfile import OffloadFile, whole_blocks

__all__ = [
    "NUM_BUFFERS",
    "Key",
    "Tier",
    "TierName",
    "boundaries_in_host",
    "boundaries_on_device",
    "make_tier",
    "view_like",
]

Key = tuple[int, int, int]  # layer, micro-batch, chunk of its sequence
TierName = Literal["device", "host", "disk"]
NUM_BUFFERS = 3  # boundaries between where they wait and the layer: one in use, two on their way
ALIGNMENT = 64  # of a boundary in memory: torch's own


def make_tier(
    name: TierName, backend: Carrier, directory: Path, trace: NoTrace = NO_TRACE
) -> "Tier":
    """Return an empty tier; `directory` has its file if it is on disk, `trace` records what goes
    there.
    """
    if name == "device":
        return _OnDevice(backend.device)
    return _Away(
        backend,
        _Pool(backend.host_buffer) if name == "host" else _DiskPool(backend, directory, trace),
    )


class _Pool:
    """Memory that is handed out from the start again in every step: one allocation, unless a step
    outgrows it. Not buffers of a `HostPool`, because those would be made again, page-locked,
    whenever batches change in length."""

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self._allocate = allocate
        self._chunks: list[Tensor] = []
        self._chunk = self._used = 0

    @property
    def memory_bytes(self) -> int:
        return sum(len(chunk) for chunk in self._chunks)

    def begin(self, sizes: Sequence[int]) -> None:
        """Have room for pieces of so many bytes in one allocation, at least."""
        nbytes = sum(map(_aligned, sizes))
        if len(self._chunks) > 1 or self.memory_bytes < nbytes:
            nbytes = max(nbytes, self.memory_bytes)
            # before more is taken, because the old and the new shall not add up
            self._chunks.clear()
            self._chunks.append(self._allocate(nbytes))
        self._chunk = self._used = 0

    def take(self, nbytes: int, to_come: int) -> Tensor:
        """Return the next `nbytes`; if the room is used up, allocate more for all boundaries
        `to_come`.
        """
        while self._chunk < len(self._chunks):
            chunk = self._chunks[self._chunk]
            start = self._used
            if start + nbytes <= len(chunk):
                self._used += _aligned(nbytes)
                return chunk[start : start + nbytes]
            self._chunk = self._chunk + 1
            self._used = 0
        self._chunks.append(self._allocate(_aligned(nbytes) * (to_come + 1)))
        return self.take(nbytes, to_come)

    def allocate(self, nbytes: int, to_come: int) -> WaitingPiece:
        return HostPiece(self.take(nbytes, to_come), lambda _: None)

    def close(self) -> None:
        """The memory goes with this object, and with what still waits in it."""


class _OnDevice:
    """Boundaries in one allocation on the device; on a lazy device, whose memory is the runtime's,
    as they are. In memory of ours each would there be written to a place of its own, and every
    layer's graph would be another."""

    def __init__(self, device: torch.device) -> None:
        self._pool = _Pool(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device=device))
        self._copies = has_addresses(device)
        self._states: dict[Key, Tensor] = {}

    @property
    def memory_bytes(self) -> int:
        return self._pool.memory_bytes

    def begin(self, likes: Sequence[Tensor]) -> None:
        self._states.clear()
        if self._copies:
            self._pool.begin([like.nbytes for like in likes])

    def keep(self, key: Key, state: Tensor, like: Tensor, to_come: int) -> None:
        if self._copies:
            state = view_like(self._pool.take(like.nbytes, to_come), like).copy_(state)
        self._states[key] = state

    def keep_chunk(self, key: Key, chunk: Tensor, like: Tensor, to_come: int) -> Download:
        self.keep(key, chunk, like, to_come)
        return Downloaded()

    def end_forward(self, order: Sequence[Key]) -> None:
        """Everything is where it is needed."""

    def fetched(self, key: Key, *, again: bool = False) -> Generator[Tensor, None, None]:
        state = self._states.pop(key)
        yield state
        if again:
            self._states[key] = state

    def close(self) -> None:
        self._states.clear()


class _DiskPool:
    """A file, and a few buffers in host memory through which boundaries go there and come back;
    used as `_Pool` is.
    """

    def __init__(self, backend: Carrier, directory: Path, trace: NoTrace) -> None:
        how = (
            "free some space, set offload_dir to a directory on another disk, or use "
            "boundary_activations: host"
        )
        file = OffloadFile(directory, "boundary activations", how, trace)
        self._store = DiskStore(file, HostPool(backend.host_buffer, num_buffers=NUM_BUFFERS))

    @property
    def memory_bytes(self) -> int:
        return self._store.staging.allocated_bytes

    def begin(self, sizes: Sequence[int]) -> None:
        self._store.reserve(sum(map(whole_blocks, sizes)))

    def allocate(self, nbytes: int, to_come: int) -> WaitingPiece:
        self._store.reserve(whole_blocks(nbytes) * (to_come + 1))
        return self._store.allocate(nbytes)

    def close(self) -> None:
        self._store.close()


@dataclass(eq=False)
class _Fetch:
    key: Key
    like: Tensor
    piece: WaitingPiece
    stays: bool = False  # it is read once more in the same backward
    slot: DeviceSlots | None = None
    upload: Upload | None = None

    def begin(self, slot: DeviceSlots, memory: Tensor) -> None:
        """Begin the copy of the boundary's bytes, which are in `memory`, into a slot."""
        self.slot = slot
        self.upload = slot.upload(memory)


class _Away:
    """Boundaries that leave the device, each as a piece in a store, and come back in an order that
    is known. Copies are queued behind the compute that makes the state, and those back behind them,
    a few ahead; nobody waits."""

    def __init__(self, backend: Carrier, pool: _Pool | _DiskPool) -> None:
        self._backend = backend
        self._pool = pool
        self._waiting: dict[Key, _Fetch] = {}  # until the backward begins
        # the last few, which keep their boundaries on the device
        self._leaving: deque[Download] = deque()
        self._to_fetch: deque[_Fetch] = deque()
        self._fetches: deque[_Fetch] = deque()  # under way
        self._in_use: list[_Fetch] = []
        self._slots: deque[DeviceSlots] = deque()  # that are free
        self._slot_bytes = 0

    @property
    def memory_bytes(self) -> int:
        return self._pool.memory_bytes

    def begin(self, likes: Sequence[Tensor]) -> None:
        """Forget the step before; make room for boundaries like these, tensors without bytes."""
        self._forget()
        self._pool.begin([like.nbytes for like in likes])

    def keep(self, key: Key, state: Tensor, like: Tensor, to_come: int) -> None:
        """Keep a copy of `state`. It must not be written to any more: it may be copied later, and
        is held until then. Where this boundary and those `to_come` are unlike those that `begin`
        was told of, room is made for them."""
        # not at once, because compute need not wait for a copy then
        if len(self._leaving) == NUM_BUFFERS:
            self._leaving.popleft().release()
        self._leaving.append(self.keep_chunk(key, state, like, to_come))

    def keep_chunk(self, key: Key, chunk: Tensor, like: Tensor, to_come: int) -> Download:
        """Begin to keep a copy of a chunk of a boundary; return the copy, which the caller releases
        before the chunk's memory is used again. Other arguments are those of `keep`."""
        piece = self._pool.allocate(like.nbytes, to_come)
        self._waiting[key] = _Fetch(key, like, piece)
        download = self._backend.download(chunk, view_like(piece.fill(), like))
        piece.filled(download.landed)
        return download

    def end_forward(self, order: Sequence[Key]) -> None:
        """Begin to fetch in the order of use. A chunk that is in it twice waits again after its
        first use.
        """
        self._let_go()
        waiting = self._waiting
        self._waiting = {}
        last_use = {key: number for number, key in enumerate(order)}
        assert waiting.keys() == last_use.keys(), "boundaries are read that were not kept"
        largest = max((fetch.like.nbytes for fetch in waiting.values()), default=0)
        if largest > self._slot_bytes:
            self._slots = deque(self._backend.device_slots(largest, 1) for _ in range(NUM_BUFFERS))
            self._slot_bytes = largest
        for number, key in enumerate(order):
            stays = number < last_use[key]
            self._to_fetch.append(_Fetch(key, waiting[key].like, waiting[key].piece, stays))
        self._pump()

    def fetched(self, key: Key, *, again: bool = False) -> Generator[Tensor, None, None]:
        """Yield the boundary, on the device; it may be gone when the generator goes on or is
        closed. `again`: it waits for another backward then, which `end_forward` begins."""
        self._pump()
        fetch = self._fetches.popleft()
        assert fetch.key == key, (
            "boundaries were requested in another order than that of the backward"
        )
        self._in_use.append(fetch)
        try:
            if fetch.upload is None:
                self._upload(fetch)
            assert fetch.upload is not None
            memory = fetch.upload.wait()
            self._pump()
            yield view_like(memory, fetch.like)
        finally:
            self._in_use.remove(fetch)
            self._give_back(fetch, again=again)
        self._pump()

    def close(self) -> None:
        self._forget()
        self._pool.close()

    def _forget(self) -> None:
        """Drop the boundaries of a step that was given up. Uploads of stale bytes may still end;
        no code reads them.
        """
        while fetches := self._to_fetch or self._fetches:
            self._give_back(fetches.popleft())
        self._let_go()
        while self._waiting:
            self._waiting.popitem()[1].piece.drop()

    def _let_go(self) -> None:
        while self._leaving:
            self._leaving.popleft().release()

    def _pump(self) -> None:
        """Have as many pieces read as there are slots, and begin every upload whose bytes are
        there.
        """
        while self._to_fetch and len(self._fetches) + len(self._in_use) < NUM_BUFFERS:
            self._fetches.append(self._to_fetch.popleft())
        lent = {id(fetch.piece) for fetch in self._in_use}
        uploading = True
        for fetch in self._fetches:
            if id(fetch.piece) in lent:
                # because a piece is lent once at a time, and what follows comes after it
                break
            lent.add(id(fetch.piece))
            if fetch.upload is not None:
                continue
            fetch.piece.expect()
            # because compute wants them in this order, and so must the queue of uploads have them
            uploading = uploading and fetch.piece.ready()
            if uploading:
                self._upload(fetch)

    def _upload(self, fetch: _Fetch) -> None:
        memory = fetch.piece.memory()
        fetch.begin(self._slots.popleft(), memory)

    def _give_back(self, fetch: _Fetch, *, again: bool = False) -> None:
        if fetch.upload is not None and fetch.slot is not None:
            fetch.upload.release()
            self._slots.append(fetch.slot)
            # Not before: on a device that computes in host memory the slot is the piece's own
            # buffer.
            fetch.piece.used(fetch.upload.drained)
        if fetch.stays:
            return
        if again:
            self._waiting[fetch.key] = _Fetch(fetch.key, fetch.like, fetch.piece)
        else:
            fetch.piece.drop()


Tier = _OnDevice | _Away


def view_like(memory: Tensor, like: Tensor) -> Tensor:
    """Return the tensor that looks like `like` in the first bytes of `memory`."""
    flat = memory[: like.nbytes].view(like.dtype)
    return flat.as_strided(like.shape, like.stride(), flat.storage_offset())


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def boundaries_on_device(tier: TierName, waiting: int, largest: int) -> int:
    """Return the bytes of boundaries on the device at the peak of a step, as a plan counts them.

    Args:
        tier: where they wait.
        waiting: bytes of all of them.
        largest: bytes of the largest.
    """
    return waiting if tier == "device" else min(waiting, NUM_BUFFERS * largest)


def boundaries_in_host(tier: TierName, waiting: int, largest: int) -> int:
    """Return the bytes of boundaries in host memory, with arguments as `boundaries_on_device`; on
    their way to the disk and back they pass through a few buffers there."""
    return {"device": 0, "host": waiting, "disk": min(waiting, NUM_BUFFERS * largest)}[tier]
