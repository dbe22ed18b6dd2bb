"""A model trains in less memory than half of its weights, and its depth costs nothing but what the
plan says.

    python benchmarks/memory.py
    python benchmarks/memory.py --against 1,16 --layers 24 --hidden 1024 --intermediate 2816 --vocabulary 16000

1. A model of more than 2 GB of weights trains in a child process inside a memory cgroup of less
   than half of that, the whole process included (interpreter, torch, page cache). Where no cgroup
   can be made, anonymous memory is measured against the same limit.
2. The same model at half the depth: anonymous memory is compared, less what depth does cost:
   boundary activations, and adapters with their gradients and optimizer state. These children run
   with malloc told to give freed memory back (RETURNING below): by default glibc keeps what it
   likes of it, and that differs by some 5% from run to run.

With `--against` neither is done: one model trains with each of these numbers of micro-batches
instead, and anonymous memory less boundary activations is compared with that at the first number.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from common import PeakAnonymous, Shape, memory_kinds, report, write_model
from limits_group import Group, memory_group
from rich.console import Console
from rich.table import Table

RETURNING = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
ADAPTER_BYTES = 16  # per parameter: fp32 value, gradient, two moments of AdamW


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--intermediate", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=56)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument(
        "--fraction", type=float, default=0.45, help="of the weights, for the cgroup's limit"
    )
    parser.add_argument("--tokens", type=int, default=256, help="per micro-batch")
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument(
        "--against", type=_numbers, metavar="N,N", help="compare these numbers of micro-batches"
    )
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--repeats", type=int, default=2, help="children per depth; the median is compared"
    )
    parser.add_argument(
        "--default-malloc", action="store_true", help="compare the depths under glibc's defaults"
    )
    parser.add_argument(
        "--directory", type=Path, help="where to write the models (a disk, not memory)"
    )
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(_train(arguments)))
        return
    whole = Shape(arguments.hidden, arguments.intermediate, arguments.layers, arguments.vocabulary)
    if arguments.against:
        _compare_micro_batches(arguments, whole)
        return
    half = Shape(
        arguments.hidden, arguments.intermediate, arguments.layers // 2, arguments.vocabulary
    )
    rows = []
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directories = {shape: Path(name) / str(shape.layers) for shape in (half, whole)}
        for shape, directory in directories.items():
            write_model(directory, shape)
        limits = [None] * arguments.repeats
        order = [(shape, limit) for limit in limits for shape in (half, whole)]
        for shape, limit in [*order, (whole, int(arguments.fraction * whole.weight_bytes))]:
            row = _run(directories[shape], limit, {} if arguments.default_malloc else RETURNING)
            row["rest"] = row["peak_anonymous"] - row["adapters"] - row["boundaries"]
            rows.append({"layers": shape.layers, "weight_bytes": shape.weight_bytes, **row})
    _show(rows)
    report("memory", rows, whole)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _compare_micro_batches(arguments: argparse.Namespace, shape: Shape) -> None:
    """Train one model with each number of micro-batches, and print what memory they took beyond
    boundaries.
    """
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        write_model(Path(name), shape)
        for micro_batches in arguments.against * arguments.repeats:
            how = {} if arguments.default_malloc else RETURNING
            row = _run(Path(name), None, how, "--micro-batches", str(micro_batches))
            rows.append(
                {
                    "micro_batches": micro_batches,
                    **row,
                    "rest": row["peak_anonymous"] - row["boundaries"],
                }
            )
    table = Table(title="memory of one process, MB")
    for column in ("micro-batches", "anonymous", "boundaries", "rest", "ratio"):
        table.add_column(column, justify="right")
    rest = {
        n: statistics.median(row["rest"] for row in rows if row["micro_batches"] == n)
        for n in arguments.against
    }
    for n in arguments.against:
        taken = [row for row in rows if row["micro_batches"] == n]
        median = statistics.median(row["peak_anonymous"] for row in taken)
        numbers = [f"{number / 1e6:,.0f}" for number in (median, taken[0]["boundaries"], rest[n])]
        table.add_row(str(n), *numbers, f"{rest[n] / rest[arguments.against[0]]:.2f}")
    Console(width=110).print(table)
    report("memory-micro-batches", rows, shape)


def _run(
    directory: Path, limit: int | None, malloc: Mapping[str, str], *more: str
) -> dict[str, Any]:
    """Train in a child process: in a cgroup of `limit` bytes where one is asked for and can be
    made, else with `malloc` in its environment. `more` are arguments of this one alone."""
    command = [sys.executable, __file__, *sys.argv[1:], *more, "--child", str(directory)]
    if limit is None:
        return {"limit": None, **_child(command, environment=malloc)}
    with ExitStack() as stack:
        try:
            group = stack.enter_context(memory_group(limit))
        except OSError:  # none can be made here
            row = _child(command)
            return {
                "limit": limit,
                "cgroup": False,
                "within": row["peak_anonymous"] <= limit,
                **row,
            }
        row = _child(command, group)
        return {
            "limit": limit,
            "cgroup": True,
            "within": True,
            "cgroup_peak": group.counters()["peak"],
            **row,
        }


def _child(
    command: list[str], group: Group | None = None, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run a child, inside `group` from before its first instruction, and read its last line."""
    join = None if group is None else group.join
    env = {**os.environ, **(environment or {})}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, preexec_fn=join, env=env
    )
    if done.returncode:
        raise SystemExit(f"the child ended with {done.returncode}\n{done.stderr[-2000:]}")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def _train(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train a few steps in this process and say what memory they took."""
    import torch

    from lema import LemaConfig, LemaModel
    from lema.engine.head.loss import split_batch
    from lema.stream.schedule import fetched, training_order

    before = memory_kinds()["anonymous"]
    config = LemaConfig(
        str(arguments.child), device="cpu", gradient_checkpointing=True, save_steps=0
    )
    model = LemaModel(config)
    model.initialize_lora()
    trainer = model.get_trainer()
    ids = torch.randint(0, arguments.vocabulary, (arguments.micro_batches, arguments.tokens))
    micro_batches = split_batch({"input_ids": ids, "labels": ids}, 1)
    losses = [trainer.accumulate(micro_batches).loss]  # allocates the optimizer's state
    with PeakAnonymous() as sampled:
        losses += [trainer.accumulate(micro_batches).loss for _ in range(arguments.steps)]
    layers = len(model.memory.layers)
    counters = model.memory.counters
    reads = len(fetched(training_order(layers) * (arguments.steps + 1), model.memory.num_slots))
    return {
        "anonymous_before_model": before,
        "peak_anonymous": sampled.peak,
        "adapters": ADAPTER_BYTES * sum(p.numel() for p in model.get_trainable_parameters()),
        "boundaries": layers * ids.numel() * arguments.hidden * 2,
        "slots": model.memory.num_slots * model.memory.slot_bytes,
        "outside": model.outer.nbytes,
        "layers_read": counters.layers_read,
        "layers_expected": reads,
        "losses": losses,
    }


def _show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="memory of one process, MB")
    columns = [
        "layers",
        "weights",
        "limit",
        "cgroup peak",
        "anonymous",
        "adapters",
        "boundaries",
        "rest",
        "last loss",
    ]
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        numbers = [row["weight_bytes"], row["limit"], row.get("cgroup_peak"), row["peak_anonymous"]]
        numbers += [row["adapters"], row["boundaries"], row["rest"]]
        cells = ["-" if number is None else f"{number / 1e6:,.0f}" for number in numbers]
        table.add_row(str(row["layers"]), *cells, f"{row['losses'][-1]:.4f}")
    console = Console(width=110)
    console.print(table)
    *unlimited, limited = rows
    half = statistics.median(row["rest"] for row in unlimited if row["layers"] < limited["layers"])
    whole = statistics.median(
        row["rest"] for row in unlimited if row["layers"] == limited["layers"]
    )
    console.print(
        f"twice the layers: {100 * (whole / half - 1):+.1f}% of anonymous memory beyond "
        "adapters and boundaries; "
        f"limit {limited['limit'] / limited['weight_bytes']:.2f} of the weights"
    )


if __name__ == "__main__":
    main()
