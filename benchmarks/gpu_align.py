"""What the alignment of weights costs on a card: products whose weights begin at 0, 8 and 2 bytes
past 16.

    python benchmarks/gpu_align.py --out align.jsonl
    python benchmarks/gpu_align.py --device cpu --tiny

A safetensors file pads its header to 8 bytes, so a weight that is used where it lies in its file
may begin at 8 past 16; cuBLAS' kernels for Hopper load by a unit that needs 16, and `grouped_mm`
refuses others. Only torch is needed. Each line is a shape and a place: how fast, or what torch
says.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_device import Device
from gpu_lines import Lines
from torch import Tensor
from torch.nn.functional import grouped_mm, linear

PLACES = (0, 8, 2)  # bytes past 16
PAGE = 256  # which the allocator begins at, or a multiple
# Rows of states, inputs, outputs: of one micro-batch and a layer of 8B's shape, and of few tokens.
PRODUCTS = ((1024, 4096, 4096), (1024, 4096, 14336), (1024, 14336, 4096), (64, 4096, 14336))
TINY = ((16, 64, 64),)
# Experts, inputs, outputs: of Qwen3-30B-A3B's down projection, and of gpt-oss-120b's.
GROUPS = ((128, 768, 2048), (128, 2880, 2880))
TINY_GROUPS = ((4, 64, 64),)
TOKENS = 4096  # that experts are chosen for, together
TINY_TOKENS = 64
SECONDS = 0.3  # of a measurement, about
WARM_UP = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="torch's name for it")
    parser.add_argument(
        "--tiny", action="store_true", help="small shapes, to see that everything runs"
    )
    parser.add_argument("--out", type=Path, help="a file for the lines")
    options = parser.parse_args()
    lines = Lines(options.out)
    device = Device(options.device)
    products, groups = (TINY, TINY_GROUPS) if options.tiny else (PRODUCTS, GROUPS)
    for place in PLACES:  # the last may break the device for this process
        for rows, inputs, outputs in products:
            _products(device, lines, place, rows, inputs, outputs)
        for experts, inputs, outputs in groups:
            _grouped(
                device,
                lines,
                place,
                experts,
                inputs,
                outputs,
                TINY_TOKENS if options.tiny else TOKENS,
            )


def _products(
    device: Device, lines: Lines, place: int, rows: int, inputs: int, outputs: int
) -> None:
    """Measure a linear layer, and the gradient of its inputs."""
    states = _at(device, 0, rows, inputs)
    gradient = _at(device, 0, rows, outputs)
    weight = _at(device, place, outputs, inputs)
    calls = {"linear": lambda: linear(states, weight), "its gradient": lambda: gradient @ weight}
    for name, call in calls.items():
        speed = _speed(device, call, 2 * rows * inputs * outputs)
        lines.write(what=name, rows=rows, inputs=inputs, outputs=outputs, past_16=place, **speed)


def _grouped(
    device: Device, lines: Lines, place: int, experts: int, inputs: int, outputs: int, tokens: int
) -> None:
    """Measure the products of experts, among which tokens are divided evenly."""
    states = _at(device, 0, tokens, inputs)
    ends = torch.arange(1, experts + 1, dtype=torch.int32).mul(tokens // experts).to(device.torch)
    weight = _at(device, place, experts, outputs, inputs).transpose(-2, -1)
    speed = _speed(
        device, lambda: grouped_mm(states, weight, offs=ends), 2 * tokens * inputs * outputs
    )
    lines.write(
        what="grouped_mm", experts=experts, inputs=inputs, outputs=outputs, past_16=place, **speed
    )


def _at(device: Device, place: int, *shape: int) -> Tensor:
    """Return random numbers in bf16 that begin so many bytes past a multiple of 256."""
    values = torch.randn(math.prod(shape) + PAGE, device=device.torch, dtype=torch.float32).to(
        torch.bfloat16
    )
    begin = (-values.data_ptr() % PAGE + place) // values.itemsize
    placed = values[begin : begin + math.prod(shape)].view(shape)
    assert placed.data_ptr() % 16 == place
    return placed


def _speed(
    device: Device, product: Callable[[], Tensor], operations: int
) -> dict[str, float | str]:
    """Return the seconds of a product, and operations per second; or the error that it raises."""
    try:
        for _ in range(WARM_UP):
            product()
        device.synchronize()
        began = time.perf_counter()
        product()
        device.synchronize()
        rounds = max(1, min(1000, int(SECONDS / (time.perf_counter() - began))))
        began = time.perf_counter()
        for _ in range(rounds):
            product()
        device.synchronize()
    except RuntimeError as error:
        return {"error": f"{type(error).__name__}: {error}"[:400]}
    seconds = (time.perf_counter() - began) / rounds
    return {"seconds": seconds, "tflops": operations / seconds / 1e12}


if __name__ == "__main__":
    main()
