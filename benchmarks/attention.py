"""Attention of one layer and micro-batch on a CPU: torch's fused kernel, transformers' products,
the backend's own.

    OMP_NUM_THREADS=1 python benchmarks/attention.py

Causal, 16 heads of size 64. The arms take turns; what is measured are processor seconds of the
thread that computes, so that other programs on the machine count for little. *Ratio* is the median
of the first arm by that of this one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from common import RESULTS, print_machine
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import eager_attention_forward

from lema_cpu.attention import attend

HEADS = 16
SIZE = 64


class Attending(nn.Module):
    """What transformers hands to an attention function as its module."""

    is_causal = True
    num_key_value_groups = 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    print_machine()
    table = Table("dtype", "tokens", "arm", "forward ms", "backward ms", "ratio")
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        for length in arguments.lengths:
            for row in _measured(dtype, length, arguments.repeats):
                rows.append(row)
                table.add_row(
                    *(f"{one:.2f}" if isinstance(one, float) else str(one) for one in row.values())
                )
    Console(width=100).print(table)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "attention.json").write_text(
        json.dumps({"benchmark": "attention", "rows": rows}, indent=1) + "\n"
    )


def _measured(dtype: torch.dtype, length: int, repeats: int) -> list[dict[str, Any]]:
    given = [
        torch.randn(1, length, HEADS, SIZE).to(dtype).transpose(1, 2).requires_grad_()
        for _ in range(3)
    ]
    lowest = torch.full((length, length), torch.finfo(dtype).min, dtype=dtype).triu(1)[None, None]
    arms = {
        "sdpa": (sdpa_attention_forward, None),
        "eager": (eager_attention_forward, lowest),
        "own": (attend, None),
    }
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    for number in range(repeats + 1):
        for name, (forward, mask) in arms.items():
            taken = _step(forward, given, mask)
            if number:
                seconds[name].append(taken)
    medians = {
        name: [statistics.median(one) * 1e3 for one in zip(*found, strict=True)]
        for name, found in seconds.items()
    }
    first = sum(medians["sdpa"])
    return [
        {
            "dtype": str(dtype)[6:],
            "tokens": length,
            "arm": name,
            "up": up,
            "down": down,
            "ratio": first / (up + down),
        }
        for name, (up, down) in medians.items()
    ]


def _step(forward: Any, given: list[Tensor], mask: Tensor | None) -> tuple[float, float]:
    began = time.thread_time()
    out = forward(Attending(), *given, mask, scaling=SIZE**-0.5)[0]
    turned = time.thread_time()
    torch.autograd.grad(out, given, torch.ones_like(out))
    return turned - began, time.thread_time() - turned


if __name__ == "__main__":
    main()
