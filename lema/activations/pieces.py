"""A piece: bytes of one storage that left the device, and every tensor that autograd saved in them.

Bytes that several saved tensors share are copied once, and each tensor comes back with the strides
and the offset it had. A storage is known by its address, by a weak reference that keeps the address
from being used again, and by its version: a storage that was written into since is another piece.

All device memory here belongs to the queue that computes. A source is let go when compute has been
made to wait for its copy; what comes back lies in memory of its own, and compute waits until that
is filled. So whoever else holds a view of either reads and frees it in the order of compute.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lema.activations.protocols import Counters, WaitingPiece
from lema.backend import Carrier, Download, Upload
from lema.errors import LemaError

__all__ = ["ALIGNMENT", "Piece", "span_of", "view"]

# a kernel may choose another algorithm for another alignment of its addresses, so the alignment is
# kept
ALIGNMENT = 64


@dataclass
class PackedTensors:
    """The packed tensors that lie in one piece, and how far a backward has asked for them."""

    alive: int = 0
    num_pending: int = 0  # of these, those that were not requested since the piece came back
    round: int = 0  # how often it came back
    # the backward in which all of them were requested; None: there was none
    spent: int | None = None

    def add(self) -> None:
        """Count a packed tensor that lies in the piece."""
        self.alive += 1

    def lose(self) -> None:
        """Count a packed tensor that has gone."""
        self.alive -= 1

    def expect_requests(self) -> None:
        """Wait for a request of every one, because the piece comes back."""
        self.round += 1
        self.num_pending = self.alive

    def count_request(self) -> None:
        """Count a packed tensor that needs the returned copy no longer."""
        self.num_pending -= 1

    def spend(self, backward: int) -> None:
        """Know that all were requested in this backward."""
        self.spent = backward


class _Source:
    """The storage that a piece leaves. It is held until its copy has been waited for."""

    def __init__(self, tensor: Tensor, download: Download) -> None:
        self.tensor: Tensor | None = tensor.detach()
        self._left_at = tensor._version
        self._download = download

    @property
    def version_copied(self) -> int:
        """The version of the storage at the time of the copy."""
        return self._left_at if self.tensor is None else self.tensor._version

    def release(self) -> None:
        """Hold it on the device no longer."""
        if self.tensor is not None:
            self._download.release()
            self._left_at = self.tensor._version
            self.tensor = None


class _ReturnedCopy:
    """The copy of a piece that comes back to the device, while it is wanted; `nbytes` of it."""

    def __init__(self, waiting_piece: WaitingPiece, carrier: Carrier, nbytes: int) -> None:
        self._waiting_piece = waiting_piece
        self._carrier = carrier
        self._nbytes = nbytes
        self._upload: Upload | None = None
        self._waited = False

    @property
    def here(self) -> bool:
        """Whether it is on the device, or on its way there."""
        return self._upload is not None

    def fetch(self) -> None:
        """Begin the copy."""
        upload = self._carrier.device_slots(self._nbytes, 1).upload(self._waiting_piece.memory())
        self._upload = upload
        self._waited = False
        self._waiting_piece.used(upload.drained)

    def memory(self) -> Tensor:
        """Return it, uint8 `[nbytes]`; compute queued after this call sees it."""
        assert self._upload is not None, "a piece was requested that was never copied away"
        self._waited = True
        return self._upload.wait()[: self._nbytes]

    def forget(self) -> None:
        """Free it."""
        if self._upload is not None:
            if not self._waited:
                # else its memory, and the host's, could be used again under the copy
                self._upload.wait()
            self._upload = None


class Piece:
    """Bytes `start` to `start + nbytes` of a storage; begins to leave when it is made."""

    def __init__(
        self,
        tensor: Tensor,
        start: int,
        nbytes: int,
        waiting_piece: WaitingPiece,
        carrier: Carrier,
        counters: Counters,
    ) -> None:
        storage = tensor.untyped_storage()
        self.start = start
        self.nbytes = nbytes
        self.version = tensor._version
        self.device = tensor.device
        self.key = (storage._cdata, self.version)
        self.tensors = PackedTensors()
        self._guard = StorageWeakRef(storage)
        self._waiting_piece = waiting_piece
        self._counters = counters
        download = carrier.download(self._bytes(tensor), waiting_piece.fill())
        self._source = _Source(tensor, download)
        waiting_piece.filled(download.landed)
        counters.count_copy_out(nbytes)
        self._returned = _ReturnedCopy(waiting_piece, carrier, nbytes)
        self._original: Tensor | None = None

    @property
    def here(self) -> bool:
        """Whether the bytes are on the device, or on their way back."""
        return self.source is not None or self._returned.here

    @property
    def source(self) -> Tensor | None:
        """The tensor that it leaves, as long as that is held; None: it is not."""
        return self._source.tensor

    @property
    def version_copied(self) -> int:
        """The version of the storage at the time of the copy."""
        return self._source.version_copied

    def spend(self, backward: int) -> None:
        """Free the returned copy, because all packed tensors were requested in this backward."""
        self.tensors.spend(backward)
        self.forget()

    def covers(self, start: int, nbytes: int) -> bool:
        """Whether a range of bytes of the same storage is in it."""
        return self.start <= start and start + nbytes <= self.start + self.nbytes

    def release(self) -> None:
        """Hold the source on the device no longer."""
        self._source.release()

    def expect(self, *, fetch: bool) -> bool:
        """Be wanted soon; return whether the bytes are to be fetched now, without waiting for a
        disk. Never blocks.
        """
        if fetch and self._waiting_piece.ready():
            return True
        self._waiting_piece.expect()
        return False

    def fetch(self) -> None:
        """Begin the copy to the device."""
        if self.here:
            return
        self._returned.fetch()
        self.tensors.expect_requests()
        self._counters.count_copy_back(self.nbytes)

    def memory(self) -> Tensor:
        """Return what came back, uint8 `[nbytes]`; compute queued after this call sees it."""
        self.fetch()
        return self._returned.memory()

    def forget(self) -> None:
        """Free the returned copy; it can be brought back again."""
        self._returned.forget()

    def certify(self) -> None:
        """Keep the bytes on the device as well, to be compared with what comes back."""
        assert self.source is not None, "a piece was to be certified that has left"
        self._original = self._bytes(self.source).clone()

    def compare(self) -> None:
        """Compare what came back with what left, where that was kept; a byte that differs is a
        `LemaError`.
        """
        if self._original is not None and not torch.equal(self.memory(), self._original):
            what = f"{self.nbytes:,} bytes of activations changed while they were moved"
            how = (
                "the gradients would be wrong. This is a bug in the device's copies or in "
                "LEMA; please report it"
            )
            raise LemaError(what, where=str(self.device), how=how)

    def _bytes(self, source: Tensor) -> Tensor:
        return view(source, self.start, (self.nbytes,), (1,), torch.uint8)

    def gone(self) -> None:
        """Drop the bytes."""
        self.release()
        self.forget()
        self._waiting_piece.drop()


def span_of(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of the storage that goes with `tensor`, and how many. That is the whole
    storage where the tensor lies in at least half of it, else as much as it lies in."""
    total = tensor.untyped_storage().nbytes()
    width = tensor.element_size()
    last = sum(
        (int(size) - 1) * int(stride)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    first = int(tensor.storage_offset()) * width
    end = first + (last + 1) * width
    if 2 * (end - first) >= total:
        return 0, total
    start = first // ALIGNMENT * ALIGNMENT
    return start, end - start


def view(
    within: Tensor, first: int, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Return a tensor at byte `first` of the storage that another lies in."""
    empty = torch.empty(0, dtype=dtype, device=within.device)
    with torch.no_grad():
        return empty.set_(within.untyped_storage(), first // dtype.itemsize, shape, stride)
