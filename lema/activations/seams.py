"""The parts that offloading is put together from: what to move, where to, and how.

A backend (`lema.backend.Backend`) is a `Carrier` as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from lema.activations.counters import Kept
from lema.backend import DeviceSlots, Download

__all__ = ["Carrier", "Choice", "Place", "Store"]


class Choice(Protocol):
    """What to move."""

    def why_kept(self, tensor: Tensor) -> Kept | None:
        """Return why a tensor that autograd is about to save stays where it is; None: it is to be moved."""


class Carrier(Protocol):
    """How bytes get from one device to host memory and back; the promises are those of `lema.backend.Backend`."""

    @property
    def device(self) -> torch.device:
        """Whose memory it carries from and to."""

    def host_buffer(self, nbytes: int) -> Tensor:
        """Return uint8 `[nbytes]` of host memory of its own, at a page boundary."""

    def device_slots(self, nbytes: int, count: int) -> DeviceSlots:
        """Return `count` slots of `nbytes` bytes on the device."""

    def download(self, source: Tensor, target: Tensor) -> Download:
        """Start copying `source`, on the device, to `target`, in a host buffer, after the compute queued so far."""


class Place(Protocol):
    """Where the bytes of one piece of device memory wait. Its methods are called from one thread at a time, `drop`
    excepted, which any thread may call at any time, a garbage collector among them."""

    def fill(self) -> Tensor:
        """Return uint8 `[nbytes]` of host memory, to be filled; called once, first."""

    def filled(self, landed: Callable[[], None]) -> None:
        """Take what `fill` returned: a copy to it is on its way; `landed` blocks, in any thread, until it is there."""

    def expect(self) -> None:
        """Start bringing the bytes to host memory, if they are elsewhere and there is room. Never blocks."""

    def ready(self) -> bool:
        """Say whether `memory` would return at once."""

    def memory(self) -> Tensor:
        """Return uint8 `[nbytes]` of host memory that holds the bytes, or that a copy to it is on its way to.

        It blocks until they have been read, where they are elsewhere. What was returned stays until `used`.

        Raises:
            DiskError, ReadError: they could not be written, or read, or are not what was written.
        """

    def used(self, drained: Callable[[], None]) -> None:
        """Take back what `memory` returned: a copy from there has been queued; `drained` blocks until it has ended.

        `memory` may be asked for again.
        """

    def drop(self) -> None:
        """Nobody wants the bytes any more. May be called twice, and in any state."""


class Store(Protocol):
    """Where to."""

    def place(self, nbytes: int) -> Place | None:
        """Return room for `nbytes`; None: there is none."""

    def settle(self) -> None:
        """Wait for what is on its way to the disk.

        Raises:
            DiskError: something could not be written.
        """

    def close(self) -> None:
        """Give everything back."""
