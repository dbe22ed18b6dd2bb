"""The device that is measured, as torch sees it: waiting for it, and what its allocator counts.
LEMA is not needed.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

__all__ = ["Device"]

# the environment variable with the module that makes torch know another device
MODULE = "LEMA_DEVICE_MODULE"


def _announce() -> None:
    """Make torch know a device of another package, if the environment names a module with `install`
    for it.

    LEMA's backend does so when it is opened; a rehearsal asks for the device before, and also
    without LEMA.
    """
    if name := os.environ.get(MODULE):
        import_module(name).install()


class Device:
    """The device's memory as torch's allocator counts it; on a device without one of its own, the
    process's.

    Args:
        name: LEMA's name for it, such as `cuda` or `cuda:1`.
    """

    def __init__(self, name: str) -> None:
        _announce()
        self.torch = torch.device(name)
        self.accelerated = self.torch.type != "cpu"
        self._module: Any = torch.get_device_module(self.torch) if self.accelerated else None
        self._before = _anonymous()

    @property
    def name(self) -> str:
        """The card's name, or the device's where its module has none."""
        named = getattr(self._module, "get_device_name", None)
        return str(named(self.torch)) if named else self.torch.type

    def cap(self, nbytes: int | None) -> bool:
        """Have the allocator refuse more than `nbytes`; return whether it will."""
        limited = getattr(self._module, "set_per_process_memory_fraction", None)
        if limited is None:
            return False
        total = self._module.get_device_properties(self.torch).total_memory
        limited(1.0 if nbytes is None else min(1.0, nbytes / total))
        return nbytes is not None

    def synchronize(self) -> None:
        """Wait for all queued work."""
        if self.accelerated:
            self._module.synchronize()

    def empty_cache(self) -> None:
        """Give back what the allocator holds and nothing uses."""
        if self.accelerated:
            self._module.empty_cache()

    def forget_peak(self) -> None:
        """Count the most memory from here on."""
        if self.accelerated:
            self.empty_cache()
            self._module.reset_peak_memory_stats()

    def peak(self) -> dict[str, int]:
        """Return the most bytes allocated, and reserved, since `forget_peak`, and how often the
        allocator refused.

        Without an allocator of its own, what the process has more than before stands for both, and
        no plan is for it.
        """
        if not self.accelerated:
            taken = _anonymous() - self._before
            return {"allocated": taken, "reserved": taken}
        allocated = self._module.max_memory_allocated()
        if not hasattr(self._module, "memory_stats"):  # it has no cache
            return {"allocated": allocated, "reserved": allocated, "refused": 0}
        refused = self._module.memory_stats().get("num_ooms", 0)
        return {
            "allocated": allocated,
            "reserved": self._module.max_memory_reserved(),
            "refused": refused,
        }


def _anonymous() -> int:
    """Return the bytes of this process's memory that are in no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) * 1024
