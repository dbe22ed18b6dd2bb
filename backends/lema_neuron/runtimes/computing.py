"""The interface of a runtime for the backend: `lema.backend.Backend` without the processes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from lema.backend import DeviceSlots, Download, MemoryStats

__all__ = ["Computing"]


class Computing(Protocol):
    """One device; the methods are those of `lema.backend.Backend`."""

    @property
    def device(self) -> torch.device:
        """The device on which tensors are computed."""

    def host_buffer(self, nbytes: int, memory: Tensor | None = None) -> Tensor:
        """Return uint8 `[nbytes]` of host memory at a page boundary."""

    def device_slots(self, nbytes: int, count: int) -> DeviceSlots:
        """Return a ring of slots."""

    def download(self, source: Tensor, target: Tensor) -> Download:
        """Start copying to host memory."""

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[Any]:
        """Return the context in which weights of `dtype` compute."""

    def rng_state(self) -> Tensor:
        """Return the generator's state."""

    def set_rng_state(self, state: Tensor) -> None:
        """Restore the generator's state."""

    def end_step(self) -> None:
        """Mark the end of an optimizer step."""

    def synchronize(self) -> None:
        """Block until all queued work is done."""

    def memory(self) -> MemoryStats:
        """Return the device's memory."""

    def close(self) -> None:
        """Release the device."""
