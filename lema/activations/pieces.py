"""A piece: bytes of one storage that left the device, and every tensor that autograd saved in them.

Bytes that several saved tensors share are copied once, and each tensor comes back with the strides
and the offset it had. A storage is known by its address, by a weak reference that keeps the address
from being used again, and by its version: a storage that was written into since is another piece.

All device memory here belongs to the queue that computes. A source is let go when compute has been
made to wait for its copy; what comes back lies in memory of its own, and compute waits until that
is filled. So whoever else holds a view of either reads and frees it in the order of compute.
"""

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
        self.alive = 0  # packed tensors in it
        self.num_pending = 0  # of these, those that were not requested since it came back
        self.round = 0  # how often it came back
        # the backward in which all of them were requested; None: there was none
        self.spent: int | None = None
        self._left_at = self.version
        self._guard = StorageWeakRef(storage)
        self._waiting_piece = waiting_piece
        self._carrier = carrier
        self._counters = counters
        self._upload: Upload | None = None
        self._waited = False
        self.source: Tensor | None = tensor.detach()
        self._download: Download = carrier.download(self._bytes(tensor), waiting_piece.fill())
        waiting_piece.filled(self._download.landed)
        counters.copies_out += 1
        counters.bytes_out += nbytes
        self._original: Tensor | None = None

    @property
    def here(self) -> bool:
        """Whether the bytes are on the device, or on their way back."""
        return self.source is not None or self._upload is not None

    @property
    def version_copied(self) -> int:
        """The version of the storage at the time of the copy."""
        return self._left_at if self.source is None else self.source._version

    def covers(self, start: int, nbytes: int) -> bool:
        """Whether a range of bytes of the same storage is in it."""
        return self.start <= start and start + nbytes <= self.start + self.nbytes

    def release(self) -> None:
        """Hold the source on the device no longer."""
        if self.source is not None:
            self._download.release()
            self._left_at = self.source._version
            self.source = None

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
        upload = self._carrier.device_slots(self.nbytes, 1).upload(self._waiting_piece.memory())
        self._upload = upload
        self._waited = False
        self._waiting_piece.used(upload.drained)
        self.round += 1
        self.num_pending = self.alive
        self._counters.copies_back += 1
        self._counters.bytes_back += self.nbytes

    def memory(self) -> Tensor:
        """Return what came back, uint8 `[nbytes]`; compute queued after this call sees it."""
        self.fetch()
        assert self._upload is not None, "a piece was requested that was never copied away"
        self._waited = True
        return self._upload.wait()[: self.nbytes]

    def forget(self) -> None:
        """Free the returned copy; it can be brought back again."""
        if self._upload is not None:
            if not self._waited:
                # else its memory, and the host's, could be used again under the copy
                self._upload.wait()
            self._upload = None

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
