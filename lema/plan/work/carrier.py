"""Copies between host memory and a device for tensors without values: what would be on the device
has bytes, and what would be in host memory has none.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lema.backend import DeviceSlots, Download, SlotLayout, Upload

__all__ = ["CarrierWithoutValues"]


class CarrierWithoutValues:
    """A `lema.backend.Carrier` that copies nothing."""

    @property
    def device(self) -> torch.device:
        """Where tensors without values are."""
        return torch.device("cpu")

    def host_buffer(self, nbytes: int) -> Tensor:
        """Return a tensor that stands for host memory."""
        with _disable_current_modes():
            return torch.empty(nbytes, dtype=torch.uint8, device="meta")

    def device_slots(self, nbytes: int, count: int) -> DeviceSlots:  # noqa: ARG002 - the signature is that of `Carrier`
        """Return slots of so many bytes, of which an upload has one of its own."""
        return _Slots(nbytes)

    def download(self, source: Tensor, target: Tensor) -> Download:  # noqa: ARG002 - the same
        """Hold the source until it is released."""
        return _Download(source)


class _Slots:
    """Memory that is taken when an upload begins."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def upload(self, source: Tensor, layout: SlotLayout | None = None) -> Upload:  # noqa: ARG002 - the signature is that of `DeviceSlots`
        return _Upload(torch.empty(self._nbytes, dtype=torch.uint8))


class _Upload:
    """An upload that has ended."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory

    def wait(self) -> Tensor:
        return self._memory

    def release(self) -> None:
        """The memory is the caller's."""

    def drained(self) -> None:
        """Nothing was read."""


class _Download:
    """A download, which holds its source."""

    def __init__(self, source: Tensor) -> None:
        self._source: Tensor | None = source

    def release(self) -> None:
        self._source = None

    def landed(self) -> None:
        """Nothing is written."""
