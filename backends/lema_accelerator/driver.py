"""Locking host memory through the CUDA driver."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

__all__ = ["CudaDriver"]

PORTABLE = 1  # cudaHostRegisterPortable: locked for every device of the process


class CudaDriver:
    """`lema_cuda.hostmemory.Driver` through torch's own binding of the runtime library.

    Args:
        device: a CUDA device with its number.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def lock(self, address: int, nbytes: int) -> str | None:
        """Register memory; return why it was refused, if it was."""
        with torch.cuda.device(self._device):
            runtime: Any = torch.cuda.cudart()
            result = runtime.cudaHostRegister(address, nbytes, PORTABLE)
            if int(result) == 0:
                return None
            self._forget_error()
        return f"{runtime.cudaGetErrorString(result)} (CUDA error {int(result)})"

    def unlock(self, address: int) -> None:
        """Unregister memory, from any thread."""
        with torch.cuda.device(self._device):
            runtime: Any = torch.cuda.cudart()
            if int(runtime.cudaHostUnregister(address)) != 0:
                self._forget_error()

    def _forget_error(self) -> None:
        """Clear the runtime's last error, which would otherwise be reported for the next kernel."""
        with suppress(RuntimeError):
            torch.ones(1, device=self._device)
