"""Tensors on their way from the device to host memory, behind the compute that makes them."""

from __future__ import annotations

import weakref

from torch import Tensor

from lema.queued.copies import Copies
from lema.queued.queues import Event, Queue

__all__ = ["CopyDown"]


class CopyDown:
    """`lema.backend.Download` on a device that works through queues.

    Args:
        copies: what carries the bytes.
        source: a tensor on the device. It is held until `release`, so that its memory is not used again meanwhile.
        target: a tensor in host memory, of the same shape, dtype and strides.
    """

    def __init__(self, copies: Copies, source: Tensor, target: Tensor) -> None:
        source = source.detach()
        self._queues = copies.queues
        self._landed = copies.download(target, source)
        # Where this is dropped without `release`, the memory goes back to its allocator all the same.
        self._forgotten = weakref.finalize(self, _let_go, copies.queues.compute, self._landed, source)
        self._forgotten.atexit = False

    def release(self) -> None:
        """Let compute that is queued from now on begin after the copy; the caller goes on at once."""
        if self._forgotten.alive:
            self._queues.compute.wait(self._landed)
            self._forgotten.detach()  # from here on the memory may be used again

    def landed(self) -> None:
        """Block the calling thread, which may be any, until the bytes are in host memory."""
        self._landed.wait()


def _let_go(compute: Queue, landed: Event, source: Tensor) -> None:  # noqa: ARG001 - held until this has been called
    compute.wait(landed)
