"""What activation offloading costs and saves: nothing, layer inputs, everything, and everything on
disk.

    python benchmarks/activations.py

A PEFT model with LoRA on every linear takes whole steps: forward, loss, backward, optimizer. Each
mode runs without and with gradient checkpointing (not reentrant), on the CPU, and on CUDA where
there is one.

Time: all arms in one process, over one model, one step of each in turn, the order reversed every
round, the first round dropped. A ratio is an arm's seconds by those of "none" with the same
checkpointing in the same round: median, and the quartiles.

Memory: a process for each arm, which takes the same steps from the same weights; their losses have
to be bitwise those of "none" or the benchmark fails. "device" is what tensors hold at most, without
weights, optimizer and what waits elsewhere: on the CPU what a device would hold. "anon." is the
process's anonymous memory with all of that: on the CPU what waits in host memory is in the same
memory, so only "disk" can lower it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from activations_arms import (
    MODES,
    Arm,
    Task,
    arms_of,
    context_of,
    make_model,
    set_checkpointing,
    step_of,
)
from common import RESULTS, Meter, Shape, machine, print_machine
from memory import RETURNING
from rich.console import Console
from rich.table import Table

COLUMNS = (
    "checkpointed",
    "offloaded",
    "s/step",
    "x none",
    "quartiles",
    "device MB",
    "anon. MB",
    "out MB",
    "back MB",
)


def main() -> None:
    arguments = _arguments()
    print_machine()
    shape = Shape(
        arguments.hidden,
        arguments.intermediate,
        arguments.layers,
        arguments.vocabulary,
        dtype=arguments.dtype,
    )
    arms = arms_of(arguments.modes)
    for device in arguments.devices:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
            task = Task.of(
                shape,
                device=device,
                rows=arguments.rows,
                tokens=arguments.tokens,
                directory=directory,
            )
            before = machine()
            memory = {arm: _memory(task, arm) for arm in arms}
            _check_losses(memory)
            meters = _times(task, arms, arguments.rounds)
        rows = [{**asdict(arm), **_row(arm, meters), **memory[arm]} for arm in arms]
        _show(rows, task, shape)
        name = {"gpu": torch.cuda.get_device_name()} if device == "cuda" else {}
        whole = {
            "benchmark": "activations",
            "machine": {**before, **name, "threads": torch.get_num_threads()},
            "device": device,
            "shape": asdict(shape),
            "rows_of_tokens": [arguments.rows, arguments.tokens],
            "rounds": arguments.rounds,
            "rows": rows,
        }
        arguments.out.mkdir(parents=True, exist_ok=True)
        written = arguments.out / f"activations-{device}.json"
        written.write_text(json.dumps(whole, indent=1) + "\n")
        print(f"wrote {written}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=2816)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=16000)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rows", type=int, default=2, help="of a step")
    parser.add_argument("--tokens", type=int, default=256, help="of a row")
    parser.add_argument("--rounds", type=int, default=5, help="measured, after one that is not")
    parser.add_argument(
        "--modes",
        type=_modes,
        default=list(MODES),
        help=f"of {', '.join(MODES)}; none is always there",
    )
    parser.add_argument(
        "--devices", type=lambda text: text.split(","), default=_devices(), help="cpu, cuda"
    )
    parser.add_argument(
        "--directory", type=Path, help="for what waits on disk (a disk, not memory)"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the results")
    return parser.parse_args()


def _devices() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def _modes(text: str) -> list[str]:
    names = text.split(",")
    if unknown := sorted(set(names) - MODES.keys()):
        raise argparse.ArgumentTypeError(
            f"no mode is named {', '.join(unknown)}; there are {', '.join(MODES)}"
        )
    return [mode for mode in MODES if mode == "none" or mode in names]


def _memory(task: Task, arm: Arm) -> dict[str, Any]:
    """Let a child take some steps, and read its last line."""
    script = Path(__file__).with_name("activations_child.py")
    given = json.dumps({"task": asdict(task), "arm": asdict(arm)})
    # what malloc keeps of freed memory differs from run to run
    environment = {
        **os.environ,
        **RETURNING,
    }
    command = [sys.executable, str(script), given]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(
            f"{arm.name}: the child ended with {done.returncode}\n{done.stderr[-2000:]}"
        )
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def _check_losses(memory: dict[Arm, dict[str, Any]]) -> None:
    for arm, row in memory.items():
        expected = memory[Arm("none", arm.checkpointing)]["losses"]
        if row["losses"] != expected:
            raise SystemExit(
                f"{arm.name}: losses {row['losses']}, and without offloading {expected}"
            )


def _times(task: Task, arms: Sequence[Arm], rounds: int) -> dict[Arm, list[Meter]]:
    """Let all arms step in turn; every mode has its context, open for the whole of it."""
    model, ids = make_model(task)
    with _contexts(model, {arm.mode for arm in arms}, task.directory) as contexts:
        steps = {mode: step_of(model, ids, context) for mode, context in contexts.items()}
        meters: dict[Arm, list[Meter]] = {arm: [] for arm in arms}
        for number in range(rounds + 1):
            for arm in arms if number % 2 else reversed(arms):
                set_checkpointing(model, arm.checkpointing)
                with Meter() as meter:
                    steps[arm.mode]()  # ends with reading the loss, so a device has ended too
                    if task.device == "cuda":
                        torch.cuda.synchronize()
                if number:
                    meters[arm].append(meter)
    return meters


@contextmanager
def _contexts(model: Any, modes: set[str], directory: str) -> Iterator[dict[str, Any]]:
    contexts = {mode: context_of(model, mode, directory) for mode in modes}
    try:
        yield contexts
    finally:
        for context in contexts.values():
            if context is not None:
                context.close()


def _row(arm: Arm, meters: dict[Arm, list[Meter]]) -> dict[str, Any]:
    ours = [meter.seconds for meter in meters[arm]]
    base = [meter.seconds for meter in meters[Arm("none", arm.checkpointing)]]
    ratios = sorted(one / other for one, other in zip(ours, base, strict=True))
    low, _, high = (
        statistics.quantiles(ratios, method="inclusive") if len(ratios) > 1 else (ratios[0],) * 3
    )
    return {
        "seconds": statistics.median(ours),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [low, high],
        "cpu_seconds": statistics.median(meter.cpu_seconds for meter in meters[arm]),
        "others": statistics.median(meter.others for meter in meters[arm]),
        "all_seconds": ours,
    }


def _show(rows: Sequence[dict[str, Any]], task: Task, shape: Shape) -> None:
    title = (
        f"{shape.layers} layers of {shape.hidden}, {task.rows} x {task.tokens} tokens, "
        f"{shape.dtype}, {task.device}"
    )
    table = Table(title=title)
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for row in rows:
        low, high = row["ratio_quartiles"]
        sizes = [
            f"{row[name] / 1e6:,.0f}"
            for name in ("peak_device", "peak_anonymous", "bytes_out", "bytes_back")
        ]
        table.add_row(
            "yes" if row["checkpointing"] else "no",
            row["mode"],
            f"{row['seconds']:.2f}",
            f"{row['ratio']:.3f}",
            f"{low:.3f} - {high:.3f}",
            *sizes,
        )
    console = Console(width=120)
    console.print(table)
    others = statistics.median(row["others"] for row in rows)
    console.print(
        f"{torch.get_num_threads()} threads; others kept {others:.2f} cores busy (median)"
    )


if __name__ == "__main__":
    main()
