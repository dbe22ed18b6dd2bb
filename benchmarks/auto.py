"""What is left open against thirty configurations set by hand, under the same limit of device memory.

    OMP_NUM_THREADS=1 python benchmarks/auto.py

`auto` is `device_memory` alone, the rest chosen by the plan. The grid sets rows at once, recomputation, prefetch depth
and the chunk of the loss; those that do not fit are refused, and are told. Each arm takes one step to begin with and
then a few in turn with the others, so that what else the machine does falls on all alike. `best / auto` is the median
step of the fastest of the grid over that of `auto`: 1 or more says that nothing set by hand was faster.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from common import Shape, report, write_model
from torch import Tensor

from lema import LemaConfig, LemaModel
from lema.errors import MemoryLimitError

# Hidden size, layers, and the limit in bytes: wide, deep, and with little room.
MODELS = {"wide": (384, 6, 120_000_000), "deep": (192, 16, 90_000_000), "tight": (256, 8, 45_000_000)}
GRID = {
    "micro_batch_size": [1, 2, 8],
    "gradient_checkpointing": [True, False],
    "prefetch_depth": [1, 2, 4],
    "loss_chunk_tokens": [256, 1024],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--arms", type=int, default=30, help="configurations of the grid")
    parser.add_argument("--steps", type=int, default=3, help="of each arm, in turn with the others")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rows", type=int, default=8, help="of a step")
    arguments = parser.parse_args()
    found = []
    for name in arguments.models:
        hidden, layers, limit = MODELS[name]
        shape = Shape(hidden, 11 * hidden // 4, layers, 4096, dtype="float32")
        with tempfile.TemporaryDirectory() as place:
            write_model(Path(place), shape)
            base = {"device_memory": limit, "max_length": arguments.length, "batch_size": arguments.rows}
            found.append({"model": name, **compared(Path(place), base, arguments.arms, arguments.steps)})
        print(found[-1])
    report("auto", found, shape)


def configurations(count: int) -> Iterator[dict[str, Any]]:
    """Yield so many of the grid, spread over it."""
    whole = [dict(zip(GRID, values, strict=True)) for values in itertools.product(*GRID.values())]
    yield from (whole[index * len(whole) // count] for index in range(min(count, len(whole))))


def compared(model: Path, base: dict[str, Any], count: int, steps: int) -> dict[str, Any]:
    """Time all arms on one model."""
    seconds: dict[str, list[float]] = {}
    arms: dict[str, dict[str, Any]] = {"auto": {}} | {str(one): one for one in configurations(count)}
    refused = []
    for turn in range(steps):
        for arm, settings in list(arms.items()):
            try:
                taken = step_seconds(model, base | settings)
            except MemoryLimitError:
                refused.append(arm)
                del arms[arm]
                continue
            seconds.setdefault(arm, []).append(taken)
        print(f"turn {turn + 1} of {steps}: {len(arms)} arms", flush=True)
    medians = {arm: statistics.median(taken) for arm, taken in seconds.items()}
    own = medians.pop("auto")
    best = min(medians, key=lambda arm: medians[arm])
    return {"arms": len(medians), "refused": len(refused), "auto s": own, "best s": medians[best], "best": best} | {
        "best / auto": medians[best] / own
    }


def step_seconds(model: Path, settings: dict[str, Any]) -> float:
    """Return the seconds of a step of one arm, after one that is not counted."""
    config = LemaConfig(str(model), device="cpu", save_steps=0, **settings)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 4096, (config.batch_size, config.max_length or 1), generator=draw)
    batch: dict[str, Tensor] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with closing(LemaModel(config)) as opened:
        opened.initialize_lora()
        trainer = opened.get_trainer()
        trainer.train_step(batch)
        began = time.perf_counter()
        trainer.train_step(batch)
        return time.perf_counter() - began


if __name__ == "__main__":
    main()
