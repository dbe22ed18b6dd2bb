"""What training weights themselves takes in host memory, and what of it goes to files: arithmetic alone.

With the weights in fp32 12 bytes a parameter: the weights as they stream, which are the masters, and AdamW's two
moments. In half precision 14: masters in fp32 and moments, and the 2 of the copy that streams. Where the gradients'
norm has to be known before the first step (clipping), they wait in host memory too, in the type of the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lema.errors import MemoryLimitError

__all__ = ["MASTER_BYTES", "MOMENT_BYTES", "FullBytes", "full_bytes", "place_masters"]

MASTER_BYTES = 4  # fp32
MOMENT_BYTES = 8  # two of AdamW, each in fp32
WEIGHT_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class FullBytes:
    """Bytes in host memory of parameters that train.

    Args:
        streamed: the weights that cross to the device.
        masters: in fp32; 0 where the streamed ones are the masters.
        moments: of the optimizer.
        gradients: that wait until their norm is known; 0 without clipping.
    """

    streamed: int
    masters: int
    moments: int
    gradients: int

    @property
    def movable(self) -> int:
        """Those that may lie in a file: all but what streams."""
        return self.masters + self.moments + self.gradients


def full_bytes(param_counts: Mapping[int, int], dtype: str, *, clipped: bool = False) -> dict[int, FullBytes]:
    """Return what each layer takes in host memory.

    Args:
        param_counts: of each layer, how many of its parameters train.
        dtype: of the weights: "float32" or "bfloat16".
        clipped: whether gradients are clipped to a norm.
    """
    width = WEIGHT_BYTES[dtype]
    return {
        layer: FullBytes(
            streamed=width * count,
            masters=0 if width == MASTER_BYTES else MASTER_BYTES * count,
            moments=MOMENT_BYTES * count,
            gradients=width * count if clipped else 0,
        )
        for layer, count in param_counts.items()
    }


def place_masters(layer_bytes: Mapping[int, int], outside_bytes: int, host_memory: int) -> frozenset[int]:
    """Return the layers whose masters, moments and waiting gradients have to lie in files: as few as will do.

    The backward goes down, and steps layers as it goes: when a step has ended, what is used next is that of the top.
    So the lowest layers go to files first.

    Args:
        layer_bytes: of each layer that trains, what may go to a file.
        outside_bytes: what is in host memory in any case.
        host_memory: the limit.

    Raises:
        MemoryLimitError: the limit does not hold what is in host memory in any case.
    """
    left = host_memory - outside_bytes
    if left < 0:
        raise MemoryLimitError(
            f"training weights needs {outside_bytes:,} bytes of host memory beside what can lie in files, and "
            f"{host_memory:,} are allowed",
            where="host_memory",
            how="allow that much, or train fewer weights",
        )
    in_memory = set()
    for layer in sorted(layer_bytes, reverse=True):
        left -= layer_bytes[layer]
        if left < 0:
            break
        in_memory.add(layer)
    return frozenset(layer_bytes.keys() - in_memory)
