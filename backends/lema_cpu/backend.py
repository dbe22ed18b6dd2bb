"""The `cpu` backend. By default nothing is copied: a layer computes with the buffer that the reader
filled.

With `poison=True` (tests) it behaves like a device with memory of its own: bytes are copied into
private slots, and a released slot is filled with NaN, so that tests notice a use after release.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import psutil
import torch
from torch import Tensor

from lema.backend import (
    BackendOptions,
    DeviceSlots,
    Download,
    Downloaded,
    MemoryStats,
    Parallel,
    Replicas,
    SingleProcess,
    SlotLayout,
    Span,
    Upload,
)
from lema.backend.host.limits import peak_memory
from lema.backend.hostmemory import anonymous
from lema.backend.torchrun import join
from lema.errors import BackendUnavailable
from lema_cpu import products
from lema_cpu.heap import Heap
from lema_cpu.threads import limit_threads

__all__ = ["CpuBackend"]

NAN_BYTE = 0xFF  # in every floating dtype, a word of ones is NaN


class _Alias:
    """An upload that moves nothing: the source is the slot."""

    def __init__(self, source: Tensor) -> None:
        self._source = source

    def wait(self) -> Tensor:
        return self._source

    def release(self) -> None:
        """Nothing is queued on this device: compute has finished when the call returns."""

    def drained(self) -> None:
        """The source is the slot, and the reader gets it only after release."""


class _AliasSlots:
    """Slots that are the host buffers themselves."""

    def upload(self, source: Tensor, layout: SlotLayout | None = None) -> Upload:
        assert layout is None, "a host buffer that is the slot has the layout that it was read in"
        return _Alias(source)


class _PoisonedUpload:
    """A copy of the bytes for each lease. It is NaN once it is released, even if the slot is
    leased again.
    """

    def __init__(self, slots: _PoisonedSlots, clean: Tensor, nbytes: int) -> None:
        self._slots = slots
        self._clean = clean
        self._nbytes = nbytes
        self._number = slots.uploads
        self._leased: Tensor | None = None
        self._released = False

    def wait(self) -> Tensor:
        if self._released:
            assert self._slots.uploads == self._number, (
                "a slot was asked for that something else was uploaded to"
            )
            self._released = False
            self._slots.free -= 1
        if self._leased is None:
            self._leased = self._clean.clone()
        return self._leased[: self._nbytes]

    def release(self) -> None:
        assert not self._released, "a slot was released twice"
        self._released = True
        self._slots.free += 1
        if self._leased is not None:
            self._leased.fill_(NAN_BYTE)
            self._leased = None

    def drained(self) -> None:
        """The copy was finished when `upload` returned."""


class _PoisonedSlots:
    """Private slots whose memory is never used twice: after its lease it stays NaN."""

    def __init__(self, nbytes: int, count: int) -> None:
        self._nbytes = nbytes
        self.free = count
        self.uploads = 0

    def upload(self, source: Tensor, layout: SlotLayout | None = None) -> Upload:
        assert self.free, "more uploads are held than there are slots"
        layout = layout or SlotLayout(source.numel(), (Span(0, source.numel(), 0),))
        clean = torch.full((self._nbytes,), NAN_BYTE, dtype=torch.uint8)
        for span in layout.spans:
            clean[span.slot : span.slot + span.nbytes].copy_(
                source[span.start : span.start + span.nbytes]
            )
        self.free -= 1
        self.uploads += 1
        return _PoisonedUpload(self, clean, layout.nbytes)


class CpuBackend:
    """Host memory as the device.

    Args:
        device: `"cpu"`.
        options: layers are not divided.
        poison: copy into private slots and fill them with NaN on release.
        joined: the other processes, and how to leave them; None: the backend joins those that
            `torchrun` started.

    Raises:
        BackendUnavailable: a device number was given; this backend has one device.
    """

    name = "cpu"
    last_resort = True  # of `device: auto`
    proven: ClassVar = {"cpu": "x86-64, where all tests run"}

    def __init__(
        self,
        device: str = "cpu",
        options: BackendOptions | None = None,
        *,
        poison: bool = False,
        joined: tuple[Replicas, Callable[[], None]] | None = None,
    ) -> None:
        if device != "cpu":
            raise BackendUnavailable(
                "the cpu backend has one device", where=f"device: {device}", how="write device: cpu"
            )
        (options or BackendOptions()).refuse_parts(self.name)
        self._poison = poison
        self._heap = Heap()
        limit_threads()
        self._parallel = SingleProcess()
        self._replicas, self._leave = joined or join("gloo")

    @property
    def device(self) -> torch.device:
        """The only device."""
        return torch.device("cpu")

    @property
    def poison(self) -> bool:
        """Whether released slots are filled with NaN."""
        return self._poison

    @property
    def parallel(self) -> Parallel:
        """One process."""
        return self._parallel

    @property
    def replicas(self) -> Replicas:
        """The processes that `torchrun` started, which talk through gloo."""
        return self._replicas

    def host_buffer(self, nbytes: int, memory: Tensor | None = None) -> Tensor:
        """Return uint8 `[nbytes]`, page-aligned; locking it would gain nothing."""
        return anonymous(nbytes) if memory is None else memory

    def device_slots(self, nbytes: int, count: int) -> DeviceSlots:
        """Return slots that are the sources themselves, or private ones under `poison`."""
        return _PoisonedSlots(nbytes, count) if self._poison else _AliasSlots()

    def download(self, source: Tensor, target: Tensor) -> Download:
        """Copy at once."""
        target.copy_(source)
        return Downloaded()

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[Any]:
        """Autocast to the weights' dtype if that is half precision; full precision needs no
        autocast.
        """
        return nullcontext() if dtype == torch.float32 else _autocast(dtype)

    @staticmethod
    def fast_dtype(dtype: torch.dtype) -> torch.dtype:
        """Return fp32 for half precision that this processor has no instructions for, and that
        is slow.
        """
        return products.fast_dtype(dtype)

    def attention(self) -> str:
        """Return the name by which transformers knows the attention that is fast here; importing
        it takes seconds.
        """
        from lema_cpu.attention import NAME

        return NAME

    def rng_state(self) -> Tensor:
        """Return torch's default generator state."""
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor) -> None:
        """Set torch's default generator state."""
        torch.set_rng_state(state)

    def end_visit(self) -> None:
        """Give freed memory back to the system if little is left."""
        self._heap.check()

    def end_step(self) -> None:
        """Nothing is queued on this device."""

    def synchronize(self) -> None:
        """Nothing is queued on this device."""

    def memory(self) -> MemoryStats:
        """Return this process's resident bytes, their peak, and the machine's memory."""
        peak = peak_memory()
        used: int = psutil.Process().memory_info().rss
        total = psutil.virtual_memory().total
        return MemoryStats(used, max(used, peak), total, shared=not self._poison)

    def close(self) -> None:
        """Leave the process group, if this backend joined it."""
        self._leave()


@contextmanager
def _autocast(dtype: torch.dtype) -> Iterator[None]:
    with torch.autocast("cpu", dtype=dtype):
        yield
