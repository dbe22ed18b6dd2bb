"""Host buffers and device slots as places that layers pass through on their way from disk to compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from lema.backend import DeviceSlots, Upload
from lema.stream.workers import Ticket

__all__ = ["DeviceSlot", "HostBuffer"]


@dataclass
class HostBuffer:
    """A host buffer, and the layer that is in it or on its way into it."""

    memory: Tensor
    layer: int | None = None
    ticket: Ticket | None = None  # None: the layer is whole
    leased: bool = False  # since it was read
    _uploads: dict[int, Upload] = field(default_factory=dict)

    def uploaded(self, slot: int, upload: Upload) -> None:
        """Remember that `upload`, into slot number `slot`, may read from this buffer until it is drained."""
        self._uploads[slot] = upload  # what was copied there before was copied before this

    def forget(self, slot: int) -> None:
        """Let go of a slot that is given up, to which nothing is being copied."""
        self._uploads.pop(slot, None)

    def drain(self) -> Callable[[], None] | None:
        """Return what blocks until the buffer may be overwritten; None: it may."""
        uploads = tuple(self._uploads.values())

        def drained() -> None:
            for upload in uploads:
                upload.drained()

        return drained if uploads else None

    def arrive(self) -> None:
        """Block until the layer is whole; raise what a read raised."""
        if self.ticket is not None:
            self.ticket.wait()
            self.ticket = None
            self._uploads.clear()  # the reads have waited for them

    def empty(self) -> None:
        """Give up the layer, and wait until no read touches the buffer."""
        if self.ticket is not None:
            # The uploads stay: reads that never began have not waited for them.
            self.ticket.settle()
        self.layer = self.ticket = None


@dataclass
class DeviceSlot:
    """A slot on the device, and the layer that was uploaded to it. It holds the layer until it is refilled."""

    ring: DeviceSlots
    layer: int | None = None
    upload: Upload | None = None
    _released: bool = True

    def fill(self, layer: int, source: Tensor) -> Upload:
        """Start copying a layer into the slot, which is not on lease."""
        self.empty()
        self.upload = self.ring.upload(source)
        self.layer, self._released = layer, False
        return self.upload

    def lease(self) -> Tensor:
        """Return the slot with its layer."""
        assert self.upload is not None
        self._released = False
        return self.upload.wait()

    def release(self) -> None:
        """End the lease: from now on the slot may be refilled once the compute queued so far has finished."""
        if not self._released:
            assert self.upload is not None
            self._released = True
            self.upload.release()

    def empty(self) -> None:
        """Give up the layer; an upload that was not waited for is released too."""
        self.release()
        self.layer = None
