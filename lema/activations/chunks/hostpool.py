"""Room in host memory for hidden states, and their gradients, that go through layers in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lema.activations.boundaries import view_like
from lema.activations.chunks.copies import (
    NUM_SLOTS,
    ChunkDownloads,
    ChunkUploads,
    ResidentChunks,
)
from lema.activations.chunks.cuts import ChunkInputs, Cut
from lema.backend import Carrier, DeviceSlots

__all__ = ["HostPool"]


class HostPool:
    """Room in host memory for hidden states, or gradients of them, of which a layer has only a few
    chunks of the sequence on the device. What is given back is used again.

    Args:
        carrier: of the device.
        copies: whether chunks are copied to the device; else it computes in host memory.
    """

    def __init__(self, carrier: Carrier, *, copies: bool = True) -> None:
        self._carrier = carrier
        self._copies = copies
        self._free: list[Tensor] = []
        # what is taken, by numbers that nothing else may get meanwhile
        self._taken: dict[int, StorageWeakRef] = {}
        # by the same numbers: wait until the last copy from there, and the last copy there, ended
        self._in_flight: dict[int, dict[str, Callable[[], None]]] = {}
        self._slots: list[DeviceSlots] = []  # that are free, of one size
        self._slot_bytes = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor in host memory, with any values. The device may still read what was in
        that memory before, so `synchronize` comes before the host itself writes there."""
        like = torch.empty(tuple(shape), dtype=dtype, device="meta")
        fitting = [memory for memory in self._free if len(memory) >= like.nbytes]
        if fitting:
            memory = min(fitting, key=len)
            self._free = [free for free in self._free if free is not memory]
        else:
            # before more is taken, because what is too small would only add up
            self._free.clear()
            memory = self._carrier.host_buffer(like.nbytes)
        self._taken = {
            number: storage for number, storage in self._taken.items() if not storage.expired()
        }
        storage = memory.untyped_storage()
        self._taken[storage._cdata] = StorageWeakRef(storage)
        alive = self._taken.keys() | {free.untyped_storage()._cdata for free in self._free}
        self._in_flight = {
            number: copies for number, copies in self._in_flight.items() if number in alive
        }
        return view_like(memory, like)

    def take_zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor in host memory, of zeros, to which the host may write."""
        tensor = self.take(shape, dtype)
        self.synchronize(tensor)
        return tensor.zero_()

    def give(self, tensor: Tensor) -> None:
        """Take back what `take` has returned, of which no more copies are begun. Other tensors stay
        what they are."""
        storage = tensor.untyped_storage()
        if self._taken.pop(storage._cdata, None) is not None:
            memory = torch.empty(0, dtype=torch.uint8)
            self._free.append(memory.set_(storage))

    def synchronize(self, tensor: Tensor) -> None:
        """Block until no copy from or to a tensor is under way, so that the host may read it and
        write to it."""
        for wait in self._in_flight.pop(tensor.untyped_storage()._cdata, {}).values():
            wait()

    @contextmanager
    def uploads(
        self, state: Tensor, cuts: Sequence[Cut], order: Iterable[int]
    ) -> Iterator[ChunkInputs]:
        """Yield the chunks of a hidden state `[rows, sequence, hidden]`, on the device one after
        the other. If it is none of `take`, it is there already.

        Args:
            state: the hidden state.
            cuts: its chunks.
            order: their numbers, as they will be asked for.
        """
        if not (self._copies and self._holds(state)):
            yield ResidentChunks(state, cuts, self._carrier.device)
            return
        largest = max(cut.like(state).nbytes for cut in cuts)
        slots = self._take_slots(largest)
        slot_bytes = self._slot_bytes
        uploads = ChunkUploads(slots, state, cuts, order, self._noting(state, "upload"))
        try:
            yield uploads
        finally:
            free = uploads.end()
            if slot_bytes == self._slot_bytes:  # else larger ones were needed meanwhile
                self._slots.extend(free)

    @contextmanager
    def downloads(self, state: Tensor) -> Iterator[Callable[[Cut, Tensor], None]]:
        """Yield what puts results of chunks, on the device, into a hidden state of `take`."""
        if not (self._copies and self._holds(state)):
            yield partial(_put, state)
            return
        downloads = ChunkDownloads(self._carrier, state, self._noting(state, "download"))
        try:
            yield downloads.put
        finally:
            downloads.end()

    def _holds(self, state: Tensor) -> bool:
        return state.untyped_storage()._cdata in self._taken

    def _noting(self, state: Tensor, kind: str) -> Callable[[Callable[[], None]], None]:
        number = state.untyped_storage()._cdata

        def note(wait: Callable[[], None]) -> None:
            # copies of a kind end in their order, so the last one is behind the others
            self._in_flight.setdefault(number, {})[kind] = wait

        return note

    def _take_slots(self, nbytes: int) -> list[DeviceSlots]:
        if nbytes > self._slot_bytes:
            self._slots.clear()
            self._slot_bytes = nbytes
        slots = self._slots[:NUM_SLOTS]
        del self._slots[:NUM_SLOTS]
        missing = NUM_SLOTS - len(slots)
        return slots + [self._carrier.device_slots(self._slot_bytes, 1) for _ in range(missing)]


def _put(state: Tensor, cut: Cut, result: Tensor) -> None:
    """Put what was made of a chunk to its place in a hidden state, at once."""
    cut.of(state).copy_(result.detach())
