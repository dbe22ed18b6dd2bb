"""LEMA, streaming from disk, against PEFT with gradient checkpointing, FSDP2's CPU offload and DeepSpeed's ZeRO-3.

    tox -e peers -- --micro-batches 1,4,16

Every arm is a process of its own (`peers_arms.py` says what each does) that has loaded the model and waits. One after
the other takes one optimizer step while the rest are blocked, the order reversed every round, so that whatever else the
machine does falls on all of them; the first round is dropped. The model's files are dropped from the page cache before
every step (pages that a process has mapped, as PEFT's has, stay); LEMA's are a second copy, which no other arm reads.

A micro-batch is one row of a fixed number of tokens, so more micro-batches are more tokens in a step. Measured of each
step, by process: wall seconds, CPU seconds (user and system, all threads), the most anonymous memory, file pages mapped
when it ends (libraries, and PEFT's weights, which the kernel may drop and read again), bytes read from the disk. The
arms' losses have to agree at every step, or the benchmark fails.

A ratio is the median over the rounds of an arm's number by LEMA's of the same round: above 1, LEMA takes less.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import Shape, forget_pages, report, write_model
from peers_arms import ARMS, Task
from rich.console import Console
from rich.table import Table

INTERVAL = 0.01  # seconds between looks at an arm's memory
TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-3}  # of the loss; rounded differently, they drift apart over the steps
COLUMNS = [
    "arm",
    "s/step",
    "x LEMA",
    "tok/s",
    "CPU s",
    "x LEMA",
    "anon. MB",
    "x LEMA",
    "file MB",
    "read MB",
    "last loss",
]
MEASURED = ("seconds", "cpu_seconds", "peak_anonymous", "bytes_read")


def main() -> None:
    arguments = _arguments()
    shape = Shape(
        arguments.hidden, arguments.intermediate, arguments.layers, arguments.vocabulary, dtype=arguments.dtype
    )
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        shared, own, scratch = Path(name, "shared"), Path(name, "lema"), Path(name, "scratch")
        scratch.mkdir()
        write_model(shared, shape)
        shutil.copytree(shared, own)
        for micro_batches in arguments.micro_batches:
            tasks = {
                arm: Task(
                    directory=str(own if arm == "lema" else shared),
                    scratch=str(scratch),
                    dtype=arguments.dtype,
                    vocabulary=arguments.vocabulary,
                    micro_batches=micro_batches,
                    tokens=arguments.tokens,
                )
                for arm in arguments.arms
            }
            with _processes(tasks, Path(name)) as arms:
                steps = _alternate(arms, arguments.rounds, arguments.dropped)
                about = {arm: process.about for arm, process in arms.items()}
            _check_losses(steps, TOLERANCE[arguments.dtype])
            rows = _rows(steps, micro_batches * arguments.tokens, arguments.dropped)
            threads = ", ".join(sorted({str(one["threads"]) for one in about.values()}))
            _show(rows, f"{micro_batches} x {arguments.tokens} tokens a step, {shape.dtype}, threads: {threads}")
            results = {"arms": rows, "rounds": arguments.rounds, "about": about}
            report(f"peers-{micro_batches}x{arguments.suffix}", results, shape)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batches", type=_numbers, default=[1, 4, 16], help="of one step, separated by commas")
    parser.add_argument("--tokens", type=int, default=128, help="of one micro-batch")
    parser.add_argument("--rounds", type=int, default=6, help="measured, after those dropped")
    parser.add_argument("--dropped", type=int, default=1, help="rounds before the measured ones")
    parser.add_argument("--arms", type=_arms, default=["lema", "peft", "fsdp2", "deepspeed"], help=", ".join(ARMS))
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=2816)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--vocabulary", type=int, default=16000)
    parser.add_argument("--dtype", choices=sorted(TOLERANCE), default="bfloat16")
    parser.add_argument("--directory", type=Path, help="where to write the model (a disk, not memory)")
    parser.add_argument("--suffix", default="", help="of the results' names, for runs that are not to replace others")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _arms(text: str) -> list[str]:
    names = text.split(",")
    if unknown := sorted(set(names) - ARMS.keys()):
        raise argparse.ArgumentTypeError(f"no arm is named {', '.join(unknown)}; there are {', '.join(ARMS)}")
    return names


class Arm:
    """A process that waits for the word to take a step; its own log tells what went wrong."""

    def __init__(self, name: str, task: Task, log: Path) -> None:
        self.name, self.directory, self._log = name, Path(task.directory), log
        self.about: dict[str, Any] = {}
        script = Path(__file__).with_name("peers_arms.py")
        with log.open("w") as written:
            self._process = subprocess.Popen(
                [sys.executable, str(script), name, json.dumps(asdict(task))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=written,
                text=True,
                env={"OMP_NUM_THREADS": "2", **os.environ},
            )

    def wait_until_ready(self) -> None:
        self.about, _ = self._answer()

    def step(self) -> dict[str, Any]:
        """Drop the arm's files from the page cache, let it take one step, and watch its memory meanwhile."""
        forget_pages(self.directory)
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        answer, peak = self._answer()
        return {**answer, "peak_anonymous": peak}

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> tuple[dict[str, Any], int]:
        """Return the next line, and the most anonymous memory seen until it came."""
        answers = self._process.stdout
        assert answers is not None
        peak = self._anonymous()
        while not select.select([answers], [], [], INTERVAL)[0]:
            peak = max(peak, self._anonymous())
        if not (line := answers.readline()):
            raise SystemExit(f"{self.name} ended:\n{self._log.read_text()[-4000:]}")
        return json.loads(line), max(peak, self._anonymous())

    def _anonymous(self) -> int:
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


@contextmanager
def _processes(tasks: dict[str, Task], logs: Path) -> Iterator[dict[str, Arm]]:
    arms: dict[str, Arm] = {}
    try:
        for name, task in tasks.items():
            arms[name] = Arm(name, task, logs / f"{name}.log")
        for arm in arms.values():
            arm.wait_until_ready()
        yield arms
    finally:
        for arm in arms.values():
            arm.close()


def _alternate(arms: dict[str, Arm], rounds: int, dropped: int) -> dict[str, list[dict[str, Any]]]:
    """Return every step of every arm, one round after the other, the order reversed each time."""
    steps: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    for number in range(dropped + rounds):
        for name in reversed(arms) if number % 2 else arms:
            steps[name].append(arms[name].step())
    return steps


def _check_losses(steps: dict[str, list[dict[str, Any]]], tolerance: float) -> None:
    first, *others = steps
    for name in others:
        for number, (ours, theirs) in enumerate(zip(steps[first], steps[name], strict=True), 1):
            if abs(ours["loss"] - theirs["loss"]) > tolerance * abs(ours["loss"]):
                raise SystemExit(f"step {number}: {first} has a loss of {ours['loss']}, {name} one of {theirs['loss']}")


def _rows(steps: dict[str, list[dict[str, Any]]], tokens: int, dropped: int) -> list[dict[str, Any]]:
    rows = []
    for name, taken in steps.items():
        measured = {key: [step[key] for step in taken[dropped:]] for key in MEASURED}
        row: dict[str, Any] = {"arm": name, **{key: statistics.median(values) for key, values in measured.items()}}
        row["tokens_per_second"] = tokens / row["seconds"]
        if "lema" in steps:
            row["ratios"] = {
                key: _paired(values, [step[key] for step in steps["lema"][dropped:]])
                for key, values in measured.items()
                if key != "bytes_read"
            }
        row["all"], row["losses"] = measured, [step["loss"] for step in taken]
        row["file"] = taken[-1]["file"]
        rows.append(row)
    return rows


def _paired(theirs: Sequence[float], ours: Sequence[float]) -> float:
    return statistics.median(their / our for their, our in zip(theirs, ours, strict=True))


def _show(rows: list[dict[str, Any]], title: str) -> None:
    table = Table(title=title)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "arm" else "right")
    for row in rows:
        ratios = [f"{row['ratios'][key]:.2f}" if "ratios" in row else "-" for key in MEASURED[:3]]
        table.add_row(
            row["arm"],
            f"{row['seconds']:.2f}",
            ratios[0],
            f"{row['tokens_per_second']:.0f}",
            f"{row['cpu_seconds']:.2f}",
            ratios[1],
            f"{row['peak_anonymous'] / 1e6:,.0f}",
            ratios[2],
            f"{row['file'] / 1e6:,.0f}",
            f"{row['bytes_read'] / 1e6:,.0f}",
            f"{row['losses'][-1]:.6f}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
