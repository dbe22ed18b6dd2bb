"""Tokens per second of streaming from disk against PEFT with gradient checkpointing, in one
process, step about.

    python benchmarks/speed.py --dtype bfloat16 --micro-batches 4
    python benchmarks/speed.py --dtype bfloat16 --micro-batches 4 --memory    # each arm's memory, in its own process

All arms train the same adapters on the same weights and tokens; the arms alternate, and the model's
files are dropped from the page cache before every streamed step. The PEFT arm keeps its weights in
memory: it is the one to equal.

Two LEMA arms may take as much memory as PEFT's weights and boundaries take. They keep there
products and activations that are then not recomputed.

Beside the ratio stands the fraction of the limit: no step can be shorter than its arithmetic at the
speed this machine reaches on the layer's own matmuls, nor than its bytes at the speed a plain
multi-threaded reader reaches on its files.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import (
    Meter,
    PeakAnonymous,
    Shape,
    cpu_seconds,
    forget_pages,
    memory_kinds,
    report,
    write_model,
)
from plainloop import adamw, peft_model, plain_step
from plainreader import PlainReader, Way
from rich.console import Console
from rich.table import Table

from lema import LemaConfig, LemaModel
from lema.engine.head.loss import split_batch
from lema.stream import LayerStream
from lema.stream.placement import LayerBytes
from lema.stream.reader import SEGMENT, LayerReader
from lema.stream.schedule import fetched_per_step

STREAMED = "lema exact"
ROOMY = "lema fast, PEFT's memory"
PEFT = "peft"  # arms


def main() -> None:
    arguments = _arguments()
    shape = Shape(
        arguments.hidden,
        arguments.intermediate,
        arguments.layers,
        arguments.vocabulary,
        dtype=arguments.dtype,
    )
    if arguments.alone:
        _alone(arguments.alone, arguments.directory, shape, arguments)
        return
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name)
        write_model(directory, shape)
        if arguments.memory:
            _memory_of_each(directory)
            return
        made = {name: make() for name, make in _arms(directory, shape, arguments).items()}
        seconds, cpu, losses = _alternate(
            {name: arm for name, (arm, _) in made.items()}, directory, arguments.steps
        )
        streamed = made[STREAMED][1]
        limits = _limits(streamed.memory, directory, shape, arguments)
        rows = _rows(seconds, cpu, losses, arguments.tokens, limits)
        _show(rows, limits, streamed.memory.counters)
        roomy = made[ROOMY][1]
        layer = roomy.planner.demand().layers[0]
        Console(width=110).print(
            f"in PEFT's {roomy.config.device_memory / 1e6:,.0f} MB: "
            f"{roomy.allocation.summary()}; the products of a "
            f"layer take {layer.product_bytes / layer.saved_bytes:.2f} of the bytes of its "
            "activations"
        )
        report(
            f"speed-{shape.dtype}-{arguments.micro_batches}x",
            {"arms": rows, "limits": limits},
            shape,
        )


def _arms(
    directory: Path, shape: Shape, arguments: argparse.Namespace
) -> dict[str, Callable[[], tuple[Any, Any]]]:
    """Return, by the arm's name, what makes its step and its model."""
    torch.manual_seed(0)
    ids = torch.randint(
        0, shape.vocabulary, (arguments.micro_batches, arguments.tokens // arguments.micro_batches)
    )
    room = {
        "gradient_checkpointing": "auto",
        "device_memory": _peft_memory(directory, shape, arguments),
    }
    arm = partial(_lema_arm, directory, ids, arguments)
    return {
        STREAMED: arm,
        "lema exact, PEFT's memory": partial(arm, **room),
        "lema fast": partial(arm, arithmetic="fast"),
        ROOMY: partial(arm, arithmetic="fast", **room),
        PEFT: partial(_peft_arm, directory, ids),
    }


def _peft_arm(directory: Path, ids: torch.Tensor) -> tuple[Callable[[], float], Any]:
    model = peft_model(directory)
    return plain_step(model, ids, model.dtype, adamw(model)), model


def _memory_of_each(directory: Path) -> None:
    """Run each arm in a process of its own, and print what that says of its memory."""
    for name in (STREAMED, "lema exact, PEFT's memory", "lema fast", ROOMY, PEFT):
        given = [*sys.argv[1:], "--alone", name, "--directory", str(directory)]
        subprocess.run([sys.executable, __file__, *given], check=True)  # this very script


def _alone(name: str, directory: Path, shape: Shape, arguments: argparse.Namespace) -> None:
    """Print the most memory that three steps of one arm take, without what the process has
    before.
    """
    arm = _arms(directory, shape, arguments)[name]
    gc.collect()
    before = memory_kinds()["anonymous"]
    with PeakAnonymous() as peak:
        step, _ = arm()
        for _ in range(3):
            step()
    mapped = memory_kinds()["file"]
    print(
        (
            f"{name}: {(peak.peak - before) / 1e6:,.0f} MB anonymous, {mapped / 1e6:,.0f} MB "
            "of mapped files"
        ),
        flush=True,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=2816)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--vocabulary", type=int, default=16000)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=1024, help="per optimizer step")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6, help="measured, after one that is not")
    parser.add_argument("--prefetch-depth", type=int, default=2)
    parser.add_argument(
        "--directory", type=Path, help="where to write the model (a disk, not memory)"
    )
    parser.add_argument(
        "--memory", action="store_true", help="of each arm in a process of its own, not its speed"
    )
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    return parser.parse_args()


def _lema_arm(
    directory: Path, ids: torch.Tensor, arguments: argparse.Namespace, **settings: Any
) -> tuple[Callable[[], float], LemaModel]:
    model = LemaModel(_config(directory, arguments, **settings))
    model.initialize_lora()
    trainer = model.get_trainer()
    micro_batches = split_batch({"input_ids": ids, "labels": ids}, 1)
    return lambda: trainer.accumulate(micro_batches).loss, model


def _config(directory: Path, arguments: argparse.Namespace, **settings: Any) -> LemaConfig:
    usual = {
        "device": "cpu",
        "gradient_checkpointing": True,
        "micro_batch_size": 1,
        "batch_size": arguments.micro_batches,
        "max_length": arguments.tokens // arguments.micro_batches,
        "prefetch_depth": arguments.prefetch_depth,
        "save_steps": 0,
    }
    return LemaConfig(str(directory), **usual | settings)


def _peft_memory(directory: Path, shape: Shape, arguments: argparse.Namespace) -> int:
    """Return the bytes that a step takes by LEMA's count if all layers are in memory and each is
    recomputed.
    """
    model = LemaModel(
        _config(directory, arguments, arithmetic="fast", device_memory=10 * shape.weight_bytes)
    )
    model.initialize_lora()
    parts = {**model.planner.needs().device, "slots": 0, "residents": 0, "saved": 0}
    model.close()
    return sum(parts.values()) + shape.layers * shape.layer_bytes


def _alternate(
    arms: dict[str, Callable[[], float]], directory: Path, steps: int
) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, list[float]]]:
    """Run the arms in turn, the order reversed every round; drop the first round."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    cpu: dict[str, list[float]] = {name: [] for name in arms}
    losses: dict[str, list[float]] = {name: [] for name in arms}
    for round_number in range(steps + 1):
        for name in list(arms) if round_number % 2 else list(reversed(arms)):
            forget_pages(directory)
            began = time.perf_counter()
            began_cpu = cpu_seconds()
            losses[name].append(arms[name]())
            if round_number:
                seconds[name].append(time.perf_counter() - began)
                cpu[name].append(cpu_seconds() - began_cpu)
    return seconds, cpu, losses


def _limits(
    stream: LayerStream, directory: Path, shape: Shape, arguments: argparse.Namespace
) -> dict[str, float]:
    """Return the least seconds a step can take by arithmetic alone and by reading alone."""
    rows = arguments.tokens // arguments.micro_batches
    dtype = getattr(torch, shape.dtype)
    x = torch.randn(rows, shape.hidden).to(dtype)
    w = torch.randn(shape.intermediate, shape.hidden).to(dtype)
    flops = 2 * rows * shape.hidden * shape.intermediate
    rate = max(flops / _timed(lambda: x @ w.t(), 20) for _ in range(5))
    head = 4 * shape.vocabulary * shape.hidden
    work = (6 * shape.layers * shape.layer_parameters + head) * arguments.tokens
    nbytes = len(fetched_per_step(shape.layers, stream.num_slots)) * shape.layer_bytes
    speed = max(_read_speed(stream.layers, directory) for _ in range(3))
    return {
        "flops_per_second": rate,
        "bytes_per_second": speed,
        "compute_seconds": work / rate,
        "read_seconds": nbytes / speed,
    }


def _timed(call: Callable[[], object], repeats: int) -> float:
    call()
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - began) / repeats


def _read_speed(layers: Sequence[LayerBytes], directory: Path) -> float:
    """Read every layer once from the disk, past the page cache, with as many threads as the
    streamed arm has.
    """
    forget_pages(directory)
    with PlainReader(layers, Way(LayerReader.THREADS, SEGMENT)) as reader, Meter() as meter:
        reader.read()
    return sum(layer.read_bytes for layer in layers) / meter.seconds


def _rows(
    seconds: dict[str, list[float]],
    cpu: dict[str, list[float]],
    losses: dict[str, list[float]],
    tokens: int,
    limits: dict[str, float],
) -> list[dict[str, Any]]:
    limit = max(limits["compute_seconds"], limits["read_seconds"])
    baseline = statistics.median(seconds[PEFT])
    return [
        {
            "arm": name,
            "seconds": statistics.median(times),
            "tokens_per_second": tokens / statistics.median(times),
            "ratio_to_peft": baseline / statistics.median(times),
            "paired_ratio": statistics.median(
                theirs / ours for ours, theirs in zip(times, seconds[PEFT], strict=True)
            ),
            "cpu_seconds": statistics.median(cpu[name]),
            "fraction_of_limit": limit / statistics.median(times),
            "all_seconds": times,
            "losses": losses[name],
        }
        for name, times in seconds.items()
    ]


def _show(rows: list[dict[str, Any]], limits: dict[str, float], counters: Any) -> None:
    table = Table(title="one optimizer step")
    for column in (
        "arm",
        "s/step",
        "tok/s",
        "x PEFT",
        "x PEFT, step by step",
        "CPU s",
        "of the limit",
        "last loss",
    ):
        table.add_column(column)
    for row in rows:
        table.add_row(
            row["arm"],
            f"{row['seconds']:.2f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['ratio_to_peft']:.3f}",
            f"{row['paired_ratio']:.3f}",
            f"{row['cpu_seconds']:.2f}",
            f"{row['fraction_of_limit']:.2f}",
            f"{row['losses'][-1]:.5f}",
        )
    console = Console(width=110)
    console.print(table)
    console.print(
        f"limit: compute {limits['compute_seconds']:.2f} s at "
        f"{limits['flops_per_second'] / 1e12:.2f} TFLOP/s, "
        f"reading {limits['read_seconds']:.2f} s at {limits['bytes_per_second'] / 1e9:.2f} GB/s"
    )
    console.print(f"streamed: {counters}")


if __name__ == "__main__":
    main()
