"""How long a processor takes for the products of a layer in half precision, and in fp32.

Processors without instructions for bfloat16 or float16 still compute in them, but some products
then take a path that is some dozen times slower than fp32: on x86-64 with AVX2 alone, the gradient
of a linear layer's input. Which products are slow depends on the processor, on torch and on its
libraries. So where these do not say that they have instructions for the type, the products are
timed. A layer whose weights are stored in a slow type is computed in fp32.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from lema_cpu.threads import one_thread

__all__ = ["MARGIN", "fast_dtype", "has_instructions", "slowness"]

HALF = (torch.bfloat16, torch.float16)
# How many times faster fp32 has to be. With instructions for half precision it took 0.6 of the time
# or more; with those of AVX-512 alone a quarter; with AVX2 alone a thirtieth.
MARGIN = 3.0
ROWS = 32
WIDTH = 512  # of a linear layer
HEADS = 2
TOKENS = 64
HEAD_SIZE = 64  # of attention
ENOUGH = 0.01  # seconds that one product is repeated for
MOST = 5  # repetitions


def fast_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which products of weights of `dtype` are fast here: fp32 where half
    precision is slow.
    """
    slow = dtype in HALF and not has_instructions(dtype) and slowness(dtype) > MARGIN
    return torch.float32 if slow else dtype


def has_instructions(dtype: torch.dtype) -> bool:
    """Return whether processor and libraries say that they compute in half precision by
    instructions for it. oneDNN takes bfloat16 on all processors with AVX-512, some of which have
    none."""
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    # of torch 2.13 and later
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    has_bf16 = any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    return has_bf16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def slowness(dtype: torch.dtype) -> float:
    """Return how many times longer the products of a layer take in `dtype` than in fp32: those of a
    linear layer forward and for the gradient of its input, and attention. They are timed once in a
    process, in 10 to 50 ms."""
    with torch.no_grad(), one_thread():
        pairs = zip(_products(dtype), _products(torch.float32), strict=True)
        half, single = zip(*(_seconds(pair) for pair in pairs), strict=True)
    return float(sum(half) / sum(single))


def _products(dtype: torch.dtype) -> list[Callable[[], Tensor]]:
    weight = _numbers(WIDTH, WIDTH, dtype=dtype)
    states = _numbers(ROWS, WIDTH, dtype=dtype)
    heads = _numbers(1, HEADS, TOKENS, HEAD_SIZE, dtype=dtype)
    return [
        lambda: linear(states, weight),
        lambda: states @ weight,
        lambda: scaled_dot_product_attention(heads, heads, heads, is_causal=True),
    ]


def _numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor of ordinary numbers; no generator is asked for them, because runs go by
    what it draws.
    """
    return torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape).to(dtype)


def _seconds(runs: Sequence[Callable[[], Tensor]]) -> list[float]:
    """Return the least seconds of each of several runs, which take turns. What else the machine
    does can only make one slower, and it slows all of them alike."""
    for run in runs:
        run()  # the first time, libraries make their kernels
    least = [float("inf")] * len(runs)
    began = time.perf_counter()
    for _ in range(MOST):
        for index, run in enumerate(runs):
            before = time.perf_counter()
            run()
            least[index] = min(least[index], time.perf_counter() - before)
        if time.perf_counter() - began > ENOUGH:
            break
    return least
