"""A lazy device of `torch_xla`: operations are collected, and run as one graph where a lease ends.

A layer's weights come as one flat buffer in one transfer, and are an input of the graph. So layers
of one shape share one compiled graph, and a deeper model compiles no more graphs. This code has run
on the CPU device of `torch_xla`, but never on a NeuronCore.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lema.backend import Download, Downloaded, MemoryStats, SlotLayout, Upload
from lema.backend.hostmemory import anonymous
from lema.errors import ConfigError
from lema_neuron.compiles import Compiles

__all__ = ["LazyDevice"]

SEEDS = 1 << 64
STATE_BYTES = 8  # of the generator's state: a seed


class LazyDevice:
    """This process's device; a `lema_neuron.runtimes.computing.Computing`.

    Args:
        xla: `torch_xla`.
        xm: `torch_xla.core.xla_model`.
        compiled: returns the number of graphs compiled so far.

    Attributes:
        device: torch's device.
        compiles: the number of graphs compiled, for each step.
    """

    def __init__(self, xla: Any, xm: Any, compiled: Callable[[], int]) -> None:
        self._xla = xla
        self._xm = xm
        self.device: torch.device = xla.device()
        self.compiles = Compiles(compiled)
        self._seed: int | None = None  # torch's seed when the device was seeded last

    def host_buffer(self, nbytes: int, memory: Tensor | None = None) -> Tensor:
        """Return uint8 `[nbytes]` of ordinary memory at a page boundary: the runtime can copy
        from it.
        """
        return anonymous(nbytes) if memory is None else memory

    def device_slots(self, nbytes: int, count: int) -> LazySlots:  # noqa: ARG002 - the runtime allocates the memory
        """Return a ring of `count` slots: each upload has new memory, which is freed after its
        last use.
        """
        return LazySlots(self.device, count, self._cut)

    def download(self, source: Tensor, target: Tensor) -> Download:
        """Run the collected graph, and copy."""
        self._cut()
        target.copy_(source.detach())
        return Downloaded()

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
        """Return the seed that the device's next number comes from, uint8 `[8]`; the host knows it
        without waiting. `torch.manual_seed` seeds this device too, but LEMA is not notified, so the
        seeds are compared here."""
        if self._seed != torch.initial_seed():
            self._seed = torch.initial_seed()
            self._xm.set_rng_state(self._seed % SEEDS, str(self.device))
        seed = self._xm.get_rng_state(str(self.device)) % SEEDS
        with _disable_current_modes():  # in such a mode, new tensors may have no values
            return torch.from_numpy(np.array([seed], np.uint64).view(np.uint8))

    def set_rng_state(self, state: Tensor) -> None:
        """Restore a seed.

        Raises:
            ConfigError: the state is that of another kind of device.
        """
        if state.numel() != STATE_BYTES:
            raise ConfigError(
                (
                    f"a generator state of {state.numel()} bytes is not this device's, which "
                    f"has {STATE_BYTES}"
                ),
                how="resume with the neuron_runtime of the run before",
            )
        self._seed = torch.initial_seed()
        with _disable_current_modes():
            seed = int(state.numpy().view(np.uint64)[0])
        self._xm.set_rng_state(seed, str(self.device))

    def end_step(self) -> None:
        """Run the rest of the step, and count the graphs that it has compiled."""
        self._cut()
        self.compiles.step_ended()

    def synchronize(self) -> None:
        """Run the collected graph, and block until it is done."""
        self._xla.sync(wait=True)
        self._xm.wait_device_ops()

    def memory(self) -> MemoryStats:
        """Return the device's memory; 0 if the runtime does not report it."""
        try:
            info = self._xm.get_memory_info(self.device)
        except RuntimeError as error:
            if "UNIMPLEMENTED" not in str(error).upper():
                raise
            return MemoryStats(0, 0, 0)
        used = int(info["bytes_used"])
        return MemoryStats(used, int(info.get("peak_bytes_used", used)), int(info["bytes_limit"]))

    def close(self) -> None:
        """Wait for work in progress."""
        self.synchronize()

    def _cut(self) -> None:
        """Run the collected operations as one graph."""
        with self.compiles.counted():
            self._xla.sync()


class LazySlots:
    """A ring of slots. Each upload has new memory for its slot, so earlier graphs keep their
    inputs.

    Args:
        device: the target of uploads.
        count: the number of slots that can be held at once.
        cut: runs the collected graph.
    """

    def __init__(self, device: torch.device, count: int, cut: Callable[[], None]) -> None:
        self.device = device
        self.free = count
        self.cut = cut
        self.uploads = 0

    def upload(self, source: Tensor, layout: SlotLayout | None = None) -> Upload:
        """Start one transfer of all of `source`, or of what a layout says of it. The core gives
        none to a device whose tensors have no addresses; a device with them, in this one's place,
        gets the bytes put together by the host."""
        if layout is not None:
            packed = torch.empty(layout.nbytes, dtype=torch.uint8)
            for span in layout.spans:
                packed[span.slot : span.slot + span.nbytes] = source[
                    span.start : span.start + span.nbytes
                ]
            source = packed
        assert self.free, "more uploads are held than there are slots"
        self.free -= 1
        self.uploads += 1
        return _LazyUpload(self, source.to(self.device, copy=True))


class _LazyUpload:
    """An upload in progress."""

    def __init__(self, slots: LazySlots, memory: Tensor) -> None:
        self._slots = slots
        self._memory = memory
        self._waited = self._released = False

    def wait(self) -> Tensor:
        """Cut the graph, and return the bytes: the next graph has only the operations of this
        lease.
        """
        self._slots.cut()
        if self._released:
            assert self._slots.free, "a slot was asked for that something else was uploaded to"
            self._slots.free -= 1
            self._released = False
        self._waited = True
        return self._memory

    def release(self) -> None:
        """Cut the graph here: the operations of the lease are one graph, which depends only on
        this layer's shape.
        """
        assert not self._released, "a slot was released twice"
        self._released = True
        self._slots.free += 1
        if self._waited:
            self._slots.cut()

    def drained(self) -> None:
        """Return at once: the copy is not `non_blocking`, so it has read its source when it
        returns.
        """
