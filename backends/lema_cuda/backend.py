"""The `cuda` backend: separate queues copy, events order them, and the host waits for nothing in a step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lema.backend import BackendOptions, DeviceSlots, Download, MemoryStats, Parallel, Replicas, SingleProcess
from lema.backend.queues import Copies, CopyDown, Slots
from lema.backend.torchrun import join
from lema_cuda.device import choose_device
from lema_cuda.driver import CudaDriver
from lema_cuda.hostmemory import HostMemory
from lema_cuda.replicas import QueuedReplicas
from lema_cuda.torchqueues import TorchQueues

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

__all__ = ["CudaBackend"]

CARRIERS = "cpu:gloo,cuda:nccl"  # the libraries that carry tensors between hosts, and between devices


class CudaBackend:
    """One GPU, which becomes torch's current device. Under `torchrun` each process has its own.

    Args:
        device: `"cuda"`, or `"cuda:N"`.
        options: whether host memory is page-locked.

    Raises:
        BackendUnavailable: there is no such device, or the other processes cannot be reached.
    """

    name = "cuda"

    def __init__(self, device: str = "cuda", options: BackendOptions | None = None) -> None:
        (options or BackendOptions()).refuse_parts(self.name)
        self._device = choose_device(device)
        torch.cuda.set_device(self._device)
        self._queues = TorchQueues(self._device)
        self._copies = Copies(self._queues)
        self._host = HostMemory(CudaDriver(self._device), (options or BackendOptions()).page_locked)
        self._parallel = SingleProcess()
        replicas, self._leave = join(CARRIERS)
        self._replicas = QueuedReplicas(replicas, self._queues)

    @property
    def device(self) -> torch.device:
        """The device, with its number."""
        return self._device

    @property
    def parallel(self) -> Parallel:
        """No layer is divided."""
        return self._parallel

    @property
    def replicas(self) -> Replicas:
        """The processes that `torchrun` started, which talk through NCCL."""
        return self._replicas

    def host_buffer(self, nbytes: int, memory: Tensor | None = None) -> Tensor:
        """Return uint8 `[nbytes]`, page-aligned, and page-locked if the options ask for it (`lema_cuda.hostmemory`).

        Raises:
            MemoryLimitError: the options demand page-locked memory, and it cannot be locked.
        """
        return self._host.buffer(nbytes, memory)

    def device_slots(self, nbytes: int, count: int) -> DeviceSlots:
        """Return a ring of `count` slots of `nbytes` bytes, in memory of torch's allocator."""
        pieces = [torch.empty(nbytes, dtype=torch.uint8, device=self._device) for _ in range(count)]
        return Slots(self._copies, pieces)

    def download(self, source: Tensor, target: Tensor) -> Download:
        """Start copying to host memory, after the compute queued so far."""
        return CopyDown(self._copies, source, target)

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[Any]:
        """Autocast to the weights' dtype if that is half precision; full precision needs no autocast."""
        return nullcontext() if dtype == torch.float32 else torch.autocast("cuda", dtype=dtype)

    def fuse(self, model: PreTrainedModel, layers: nn.ModuleList) -> str:
        """Have norms, rotary embeddings and gated MLPs computed by Liger's kernels, if they are installed."""
        from lema_cuda.liger import fuse  # now, because what it needs takes seconds to import

        return fuse(model, layers)

    def rng_state(self) -> Tensor:
        """Return the state of the device's generator, which is in host memory, so nothing waits."""
        return torch.cuda.get_rng_state(self._device)

    def set_rng_state(self, state: Tensor) -> None:
        """Set the state of the device's generator."""
        torch.cuda.set_rng_state(state, self._device)

    def end_step(self) -> None:
        """Do nothing: work goes to the device as soon as it is queued."""

    def synchronize(self) -> None:
        """Block until all queues are empty."""
        torch.cuda.synchronize(self._device)
        self._copies.forget_done()

    def memory(self) -> MemoryStats:
        """Return the bytes of tensors on the device, their peak, and the device's memory."""
        used, peak = torch.cuda.memory_allocated(self._device), torch.cuda.max_memory_allocated(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return MemoryStats(used, peak, total, free=free + torch.cuda.memory_reserved(self._device))

    def close(self) -> None:
        """Wait for queued work, and leave the process group, if this backend joined it."""
        try:
            self.synchronize()
        finally:
            self._leave()
