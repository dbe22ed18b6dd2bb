"""What cuBLAS is asked for: how much memory it takes for itself, and that it computes the same bits
each time.

cuBLAS works in memory of its own, for each thread and stream that it is used from; LEMA uses it
from one of each. torch allocates it at the first product, as much as NVIDIA recommends, or as
`CUBLAS_WORKSPACE_CONFIG` says. Its results are the same in each run only if that variable is set
before, to one of two values.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable

__all__ = ["BLOCK", "VARIABLE", "make_deterministic", "workspace_bytes"]

MIB = 1 << 20
BLOCK = 2 * MIB  # torch's allocator takes memory for tensors of more than that in multiples of it
VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
# the values with which cuBLAS is: https://docs.nvidia.com/cuda/cublas
DETERMINISTIC = (":4096:8", ":16:8")
HOPPER = (9, 0)


def workspace_bytes(capability: tuple[int, int], config: str) -> int:
    """Return the bytes that cuBLAS and cuBLASLt take together.

    Args:
        capability: the device's compute capability.
        config: `CUBLAS_WORKSPACE_CONFIG`: pairs of a size in KiB and a number, as ":4096:2:16:8";
            empty where not set.
    """
    pairs = re.findall(r":(\d+):(\d+)", config)
    recommended = 32 * MIB if capability >= HOPPER else 4096 * 1024 * 2 + 16 * 1024 * 8
    of_products = (
        sum(1024 * int(size) * int(count) for size, count in pairs) if pairs else recommended
    )
    return of_products + (32 * MIB if capability >= HOPPER else MIB)


def make_deterministic() -> Callable[[], None]:
    """Have cuBLAS compute the same bits each time, if it has not been used in this process;
    return what undoes that.
    """
    before = os.environ.get(VARIABLE)
    if before in DETERMINISTIC:
        return lambda: None
    os.environ[VARIABLE] = DETERMINISTIC[0]

    def undo() -> None:
        if os.environ.get(VARIABLE) != DETERMINISTIC[0]:
            return  # somebody else has set it meanwhile
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before

    return undo
