"""The attention that is switched off where it gives wrong gradients.

cuDNN's attention may give gradients with NaN for padded rows: on compute capability 9.0, seen with
torch 2.11 to 2.13.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from packaging.version import Version

__all__ = ["SOURCE", "gives_nan", "switch_off"]

SOURCE = "https://github.com/pytorch/pytorch/issues/196678"
FIRST = Version("2.11")
CAPABILITY = (9, 0)


def gives_nan(torch_version: str, capability: tuple[int, int]) -> bool:
    """Return whether cuDNN's attention may give NaN with this torch, on a device of this compute
    capability.
    """
    return Version(torch_version) >= FIRST and capability == CAPABILITY


def switch_off(device: torch.device) -> Callable[[], None]:
    """Have torch choose another attention than cuDNN's where that may give NaN; return what has
    it as before.
    """
    backends = torch.backends.cuda
    if not (
        gives_nan(torch.__version__, torch.cuda.get_device_capability(device))
        and backends.cudnn_sdp_enabled()
    ):
        return lambda: None
    backends.enable_cudnn_sdp(False)
    return lambda: backends.enable_cudnn_sdp(True)
