"""One NeuronCore as a device of torch: separate streams copy, and events order them.

The order is that of `lema.backend.queues`, with torch's streams and events from
`lema.backend.torchstreams`. Host memory is ordinary, because the runtime can copy from it without
locking.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lema.backend import DeviceSlots, Download, MemoryStats
from lema.backend.hostmemory import anonymous
from lema.backend.torchstreams import TorchCarrier

__all__ = ["NativeDevice"]

KIND = "neuron"  # torch's name of the device


class NativeDevice:
    """This process's device; a `lema_neuron.runtimes.computing.Computing`.

    Args:
        module: `torch.neuron`.

    Attributes:
        device: torch's device, with its number.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self.device = torch.device(KIND, module.current_device())
        self._streams = TorchCarrier(self.device, at_once=False)

    def host_buffer(self, nbytes: int, memory: Tensor | None = None) -> Tensor:
        """Return uint8 `[nbytes]` of ordinary memory at a page boundary."""
        return anonymous(nbytes) if memory is None else memory

    def device_slots(self, nbytes: int, count: int) -> DeviceSlots:
        """Return a ring of `count` slots, whose memory stays the same."""
        return self._streams.device_slots(nbytes, count)

    def download(self, source: Tensor, target: Tensor) -> Download:
        """Start copying to host memory, after the compute queued so far."""
        return self._streams.download(source, target)

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[Any]:
        """Autocast to the weights' dtype if that is half precision; full precision needs no
        autocast.
        """
        return (
            nullcontext()
            if dtype == torch.float32
            else torch.autocast(self.device.type, dtype=dtype)
        )

    def rng_state(self) -> Tensor:
        """Return the state of the device's generator."""
        state: Tensor = self._module.get_rng_state(self.device)
        return state

    def set_rng_state(self, state: Tensor) -> None:
        """Restore the generator's state."""
        self._module.set_rng_state(state, self.device)

    def end_step(self) -> None:
        """Do nothing: work goes to the device as soon as it is queued."""

    def synchronize(self) -> None:
        """Block until all streams are empty."""
        self._module.synchronize()

    def memory(self) -> MemoryStats:
        """Return the bytes of tensors on the device, their peak, and the device's memory."""
        used = self._module.memory_allocated(self.device)
        peak = self._module.max_memory_allocated(self.device)
        return MemoryStats(used, peak, self._module.mem_get_info(self.device)[1])

    def close(self) -> None:
        """Wait for work in progress."""
        self.synchronize()
