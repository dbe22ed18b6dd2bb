"""What gpu.py runs, the most important first, and what a run needs of the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from common import Shape

__all__ = ["CAPS", "CONTEXT", "PLAN", "TINY_CAPS", "Run", "host_bytes", "operations", "peft_bytes"]

CAPS = {gib: gib << 30 for gib in (4, 8, 24)}
TINY_CAPS = {4: 5 << 20, 8: 8 << 20, 24: 24 << 20}
# bytes of the device that two processes' contexts take, which no allocator counts
CONTEXT = 1 << 30
COPIES = {"lema": 1.2, "roundpipe": 1.1}  # of the weights in host memory, boundaries among them


@dataclass(frozen=True)
class Run:
    """One arm under one cap, with several numbers of micro-batches; a cap of None is the whole
    device.
    """

    model: str
    arm: str
    cap_gib: int | None
    micro_batches: tuple[int, ...]
    strategy: str | None = None

    @property
    def name(self) -> str:
        """Model, arm and cap."""
        return f"{self.model}/{self.arm}@{self.cap_gib or '-'}"


# In the order of importance: a call that ends early has measured what comes first.
PLAN = (
    Run("8B", "lema", 4, (16, 4, 1), "resident"),
    Run("8B", "lema", 8, (16, 4), "resident"),
    Run("32B", "lema", 24, (16,), "resident"),
    Run("8B", "roundpipe", 8, (16, 4)),
    Run("8B", "fsdp2", 8, (16, 4)),
    Run("8B", "deepspeed", 8, (16, 4)),
    Run("8B", "lema", 24, (16, 4, 1), "resident"),
    Run("32B", "lema", 24, (4, 1), "resident"),
    Run("32B", "roundpipe", 24, (16, 4)),
    Run("32B", "fsdp2", 24, (16, 4)),
    Run("32B", "deepspeed", 24, (16, 4)),
    Run("8B", "lema", 8, (1,), "resident"),
    Run("32B", "lema", 8, (16, 4, 1), "resident"),
    Run("32B", "lema", 4, (16, 4, 1), "resident"),
    Run("8B", "lema", 24, (16,), "streaming"),
)


def host_bytes(run: Run, shape: Shape) -> int:
    """Return about how much host memory a run needs beside its files.

    FSDP2 and DeepSpeed lock each tensor by itself, in blocks whose sizes are powers of two.
    """
    if run.arm == "peft" or run.strategy == "streaming":
        return 0
    if run.arm in COPIES:
        return int(COPIES[run.arm] * shape.weight_bytes)
    width = getattr(torch, shape.dtype).itemsize
    layer = sum(_rounded(rows * columns * width) for rows, columns in shape.matrices.values())
    return shape.layers * layer + 2 * _rounded(shape.vocabulary * shape.hidden * width)


def peft_bytes(shape: Shape, tokens: int) -> int:
    """Return about how much device memory PEFT needs, with the whole model there and one
    micro-batch of `tokens`.

    Beside the weights that is 3 % of them (adapters, gradients, moments), four copies of the logits
    in fp32, the inputs of all layers, and what one layer keeps when it is recomputed: about 16
    times its hidden and intermediate states.
    """
    width = getattr(torch, shape.dtype).itemsize
    inputs = shape.layers * tokens * shape.hidden * width
    layer = 16 * tokens * (shape.hidden + shape.intermediate) * width
    return int(1.03 * shape.weight_bytes) + 4 * 4 * tokens * shape.vocabulary + inputs + layer


def _rounded(nbytes: int) -> int:
    return 1 << (nbytes - 1).bit_length()


def operations(shape: Shape, tokens: int) -> float:
    """Return the floating-point operations of one token in a row of `tokens`."""
    layers = 6 * shape.layers * shape.layer_parameters
    return layers + 9 * shape.layers * tokens * shape.hidden + 4 * shape.vocabulary * shape.hidden
