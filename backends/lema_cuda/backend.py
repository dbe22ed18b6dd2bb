"""The `cuda` backend: an accelerator of torch, and what only NVIDIA's devices have."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from lema.backend import BackendOptions
from lema.errors import BackendUnavailable
from lema_accelerator import AcceleratorBackend
from lema_cuda.attention import switch_off

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

__all__ = ["CudaBackend"]


class CudaBackend(AcceleratorBackend):
    """One NVIDIA GPU, which becomes torch's current device. Under `torchrun` each process has its own.

    Args:
        device: `"cuda"`, or `"cuda:N"`.
        options: whether host memory is page-locked.

    Raises:
        BackendUnavailable: there is no such device, or the other processes cannot be reached.
    """

    def __init__(self, device: str = "cuda", options: BackendOptions | None = None) -> None:
        super().__init__(device, options)
        try:
            _check_kernels(self.device)
        except BackendUnavailable:
            super().close()
            raise
        self._restore_attention = switch_off(self.device)

    def fuse(self, model: PreTrainedModel, layers: nn.ModuleList) -> str:
        """Have norms, rotary embeddings and gated MLPs computed by Liger's kernels, if they are installed."""
        from lema_cuda.liger import fuse  # now, because what it needs takes seconds to import

        return fuse(model, layers)

    def close(self) -> None:
        """Wait for queued work, leave the process group, if this backend joined it, and have attention as before."""
        try:
            super().close()
        finally:
            self._restore_attention()


def _check_kernels(device: torch.device) -> None:
    """Refuse a device older than any that this torch has kernels for."""
    names = (re.match(r"sm_(\d+)", name) for name in torch.cuda.get_arch_list())
    built_for = [divmod(int(name[1]), 10) for name in names if name]
    capability = torch.cuda.get_device_capability(device)
    if built_for and capability < (oldest := min(built_for)):
        raise BackendUnavailable(
            f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}, and this "
            f"torch ({torch.__version__}) has kernels from {oldest[0]}.{oldest[1]} on",
            where=f"device: {device}",
            how="install a torch that was built for it (an older CUDA's), or use another device",
        )
