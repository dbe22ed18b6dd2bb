"""The `cuda` backend: an accelerator of torch, and what only NVIDIA's devices have."""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from lema.backend import BackendOptions
from lema.errors import BackendUnavailable
from lema_accelerator import AcceleratorBackend
from lema_cuda.attention import switch_off
from lema_cuda.libraries import BLOCK, VARIABLE, make_deterministic, workspace_bytes

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

__all__ = ["CudaBackend"]


class CudaBackend(AcceleratorBackend):
    """One NVIDIA GPU, which becomes torch's current device. Under `torchrun` each process has its
    own.

    Args:
        device: `"cuda"`, or `"cuda:N"`.
        options: whether host memory is page-locked, and whether cuBLAS computes the same bits each
            time.

    Attributes:
        allocation_granularity: the bytes of which memory for larger tensors is a multiple, for
            plans.

    Raises:
        BackendUnavailable: there is no such device, or the other processes cannot be reached.
    """

    allocation_granularity = BLOCK

    def __init__(self, device: str = "cuda", options: BackendOptions | None = None) -> None:
        # First, because cuBLAS looks at it once, when it is first used.
        self._restore_products = (
            make_deterministic() if options is not None and options.deterministic else _nothing
        )
        with ExitStack() as unusable:
            unusable.callback(self._restore_products)
            super().__init__(device, options)
            unusable.callback(super().close)
            _check_kernels(self.device)
            unusable.pop_all()
        self._restore_attention = switch_off(self.device)

    def fuse(self, model: PreTrainedModel, layers: nn.ModuleList) -> str:
        """Have norms, rotary embeddings and gated MLPs computed by Liger's kernels, if they are
        installed.
        """
        from lema_cuda.liger import fuse  # now, because what it needs takes seconds to import

        return fuse(model, layers)

    def workspace_bytes(self) -> int:
        """Return the bytes of device memory that cuBLAS takes for itself at the first product."""
        return workspace_bytes(
            torch.cuda.get_device_capability(self.device), os.environ.get(VARIABLE, "")
        )

    def close(self) -> None:
        """Wait for queued work, leave the process group, if this backend joined it, and have
        attention and products as before."""
        try:
            super().close()
        finally:
            self._restore_attention()
            self._restore_products()


def _nothing() -> None:
    """Restore nothing."""


def _check_kernels(device: torch.device) -> None:
    """Refuse a device older than any that this torch has kernels for."""
    names = (re.match(r"sm_(\d+)", name) for name in torch.cuda.get_arch_list())
    built_for = [divmod(int(name[1]), 10) for name in names if name]
    capability = torch.cuda.get_device_capability(device)
    if built_for and capability < (oldest := min(built_for)):
        raise BackendUnavailable(
            f"{torch.cuda.get_device_name(device)} has compute capability "
            f"{capability[0]}.{capability[1]}, and this "
            f"torch ({torch.__version__}) has kernels from {oldest[0]}.{oldest[1]} on",
            where=f"device: {device}",
            how="install a torch that was built for it (an older CUDA's), or use another device",
        )
