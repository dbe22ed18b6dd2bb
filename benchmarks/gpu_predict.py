"""What the plan predicts for LEMA's rows of gpu.py on a machine's profile: no GPU and no weights
are needed.

    python benchmarks/gpu_predict.py --profile h200

These are predictions, from a profile's speeds, not measurements. *Of compute* is what of the speed
of a step that waits for nothing is left: with the whole model on the device nothing is waited for.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import Shape
from gpu_arms import FRUGAL
from gpu_model import MODELS
from gpu_plan import CAPS, PLAN
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig

from lema.config import LemaConfig, MemoryStrategy
from lema.errors import MemoryLimitError
from lema.plan import Machine
from lema.plan.machine import PROFILES
from lema.plan.planner import planner_of

TOKENS = 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", choices=sorted(PROFILES), default="h200")
    parser.add_argument("--rank", type=int, default=16)
    arguments = parser.parse_args()
    table = Table(
        title=f"predicted for {arguments.profile}, weights in host memory, rank {arguments.rank}"
    )
    for column in (
        "model",
        "cap GiB",
        "micro-batches",
        "tok/s",
        "of compute",
        "device GB",
        "settings",
        "spent on",
    ):
        table.add_column(column, overflow="fold")
    with tempfile.TemporaryDirectory() as name:
        models = {key: _hollow(Path(name) / key, shape) for key, shape in MODELS.items()}
        rows = {
            (run.model, run.cap_gib, count)
            for run in PLAN
            for count in run.micro_batches
            if run.arm == "lema" and run.strategy == "resident"
        }
        for model, cap, count in sorted(
            rows, key=lambda row: (row[0] != "8B", row[1] or 0, -row[2])
        ):
            assert cap is not None
            found = _predicted(
                models[model], CAPS[cap], count, arguments.rank, PROFILES[arguments.profile]
            )
            table.add_row(model, str(cap), str(count), *found)
    Console(width=180).print(table)


def _hollow(directory: Path, shape: Shape) -> Path:
    """Write a model of which only the header is on the disk."""
    sys.path.append(str(Path(__file__).parent.parent / "tests" / "support"))
    from hollowmodel import write_hollow

    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=False,
    )
    return write_hollow(directory, config)


def _predicted(model: Path, cap: int, micro_batches: int, rank: int, machine: Machine) -> list[str]:
    """Return the cells of a row: of the first settings that fit, as gpu_arms.py takes them."""
    refused = ""
    for changes in FRUGAL:
        settings: dict[str, Any] = {
            "strategy": MemoryStrategy.RESIDENT,
            "device_memory": cap,
            "gradient_checkpointing": True,
            "batch_size": micro_batches,
            "micro_batch_size": 1,
            "max_length": TOKENS,
            "lora_rank": rank,
            **changes,
        }
        planner = planner_of(LemaConfig(str(model), device="cpu", **settings), machine)
        demand = planner.demand()
        try:
            allocation = planner.allocation(demand)
        except MemoryLimitError as error:
            refused = error.how
            continue
        step = planner.simulated(demand, allocation)
        said = ", ".join(f"{key} {value}" for key, value in changes.items()) or "default"
        speed = f"{micro_batches * TOKENS / step.seconds:,.0f}"
        return [
            speed,
            f"{step.compute / step.seconds:.2f}",
            f"{step.device_peak / 1e9:.2f}",
            said,
            allocation.summary(),
        ]
    return ["-", "-", "-", "does not fit", refused]


if __name__ == "__main__":
    main()
