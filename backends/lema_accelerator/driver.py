"""Drivers that have a device reach host memory."""

from __future__ import annotations

import ctypes
import re
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch

__all__ = ["AllMemory", "RuntimeDriver"]

PORTABLE = 1  # cudaHostRegisterPortable: locked for every device of the process
PAGEABLE = 88  # cudaDevAttrPageableMemoryAccess: the device reaches all memory of the process
MAPS = Path("/proc/self/maps")
LIBRARY = re.compile(r"libcudart.*\.so.*|libamdhip64.*\.so.*|cudart.*\.dll|amdhip64.*\.dll")


class RuntimeDriver:
    """`lema.backend.lockedmemory.Driver` through torch's own binding of CUDA's runtime library, or
    HIP's.

    Args:
        device: with its number.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def lock(self, address: int, nbytes: int) -> str | None:
        """Register memory; return why it was refused, if it was."""
        with torch.accelerator.device_index(self._device.index):
            runtime: Any = torch.get_device_module(self._device).cudart()
            result = runtime.cudaHostRegister(address, nbytes, PORTABLE)
            if int(result) == 0:
                return None
            _forget_error(runtime, int(result))
        return f"{runtime.cudaGetErrorString(result)} (CUDA error {int(result)})"

    def unlock(self, address: int) -> None:
        """Unregister memory, from any thread; that waits for the device."""
        with torch.accelerator.device_index(self._device.index):
            runtime: Any = torch.get_device_module(self._device).cudart()
            if (result := int(runtime.cudaHostUnregister(address))) != 0:
                _forget_error(runtime, result)

    def reaches_all(self) -> bool:
        """Return whether the device computes in memory that was not registered."""
        library = _library()
        value = ctypes.c_int(0)
        asked = getattr(library, "cudaDeviceGetAttribute", None)
        return (
            asked is not None
            and not asked(ctypes.byref(value), PAGEABLE, self._device.index)
            and value.value == 1
        )


class AllMemory:
    """`lema.backend.lockedmemory.Driver` of a device that reaches all memory of the process.

    Args:
        device: with its number.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def lock(self, address: int, nbytes: int) -> str | None:  # noqa: ARG002 - of any
        """Do nothing."""
        return None

    def unlock(self, address: int) -> None:  # noqa: ARG002 - of any
        """Wait for the device, which may still compute in memory that goes."""
        torch.accelerator.synchronize(self._device)


def _forget_error(runtime: Any, result: int) -> None:
    """Take back the last error of the runtime, which would otherwise be reported for the next
    kernel.

    Raises:
        RuntimeError: it is another one than that of the call before, and nobody has seen it.
    """
    library = _library()
    if library is None:
        return
    last = getattr(library, "cudaGetLastError", None) or library.hipGetLastError
    if (error := last()) not in (0, result):
        raise RuntimeError(f"CUDA error: {runtime.cudaGetErrorString(runtime.cudaError(error))}")


@cache
def _library() -> ctypes.CDLL | None:
    """Return the runtime library that torch has loaded; None: it is part of another one."""
    try:
        mapped = [
            line.split(maxsplit=5)[-1] for line in MAPS.read_text(encoding="utf-8").splitlines()
        ]
    except OSError:  # not Linux
        mapped = (
            [region.path for region in psutil.Process().memory_maps()]
            if hasattr(psutil.Process, "memory_maps")
            else []
        )
    loaded = next((path for path in mapped if LIBRARY.fullmatch(Path(path).name)), None)
    return None if loaded is None else ctypes.CDLL(loaded)
