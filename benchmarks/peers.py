"""LEMA, streaming from disk, against PEFT with gradient checkpointing, FSDP2, DeepSpeed, and the
peers that stream.

    tox -e peers                                 # the table of docs/benchmarks/engines.md, in at most eleven minutes
    tox -e peers -- --layers 2 --hidden 128 --intermediate 352 --vocabulary 512 --rounds 1      # that all arms run

Every arm is a process of its own (`peers_arms.py` says what each does) that has loaded the model
and waits. One after the other takes one optimizer step while the rest are blocked, the order
reversed every round, so that whatever else the machine does falls on all of them; the first round
is dropped. Files of the model and of copies that arms make of it are dropped from the page cache
before every step (pages that a process has mapped, as PEFT's has, stay); LEMA and AirLLM read a
copy of their own, which no other arm reads.

A micro-batch is one row of a fixed number of tokens, so more micro-batches are more tokens in a
step. Measured of each step, by process: wall seconds, CPU seconds (user and system, all threads),
the most anonymous memory, file pages mapped when it ends (libraries, and PEFT's weights, which the
kernel may drop and read again), bytes read from the disk. The arms' losses have to agree at every
step, or the benchmark fails. An arm that cannot train the model has a row that says why, in its own
words; LEMA and PEFT have to.

A ratio is the median over the rounds of an arm's number by LEMA's of the same round: above 1, LEMA
takes less.
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
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import Shape, forget_pages, report
from peers_arms import ARMS, Task
from peers_model import FAMILIES, write_family
from rich.console import Console
from rich.table import Table

INTERVAL = 0.01  # seconds between looks at an arm's memory
# of the loss; rounded differently, they drift apart over the steps
TOLERANCE = {
    "float32": 1e-6,
    "bfloat16": 1e-3,
}
# times the tolerance, because its adapters are in the weights' type, and each update is rounded
LOOSER = {"airllm": 5}
OWN_COPY = {"lema", "airllm"}  # of the model, because they read it in every step
NEEDED = {"lema", "peft"}
STARTING = 6  # micro-batches: what starting the processes takes, when the time is divided
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
TABLE = ["micro-batches", "arm", "s/step", "LEMA's speed, of this", "tok/s", "CPU s", "anonymous MB", "mapped files MB",
         "read MB"]  # fmt: skip
MEASURED = ("seconds", "cpu_seconds", "peak_anonymous", "bytes_read")


def main() -> None:
    arguments = _arguments()
    began = time.monotonic()
    shape = Shape(
        arguments.hidden,
        arguments.intermediate,
        arguments.layers,
        arguments.vocabulary,
        dtype=arguments.dtype,
    )
    lines = [TABLE, ["---"] * len(TABLE)]
    unable: dict[str, str] = {}
    weights = [count + STARTING for count in arguments.micro_batches]
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        shared = Path(name, "shared")
        scratch = Path(name, "scratch")
        scratch.mkdir()
        write_family(shared, shape, arguments.family)
        for arm in OWN_COPY & set(arguments.arms):
            shutil.copytree(shared, Path(name, arm))
        for number, micro_batches in enumerate(arguments.micro_batches):
            tasks = {
                arm: Task(
                    directory=str(Path(name, arm) if arm in OWN_COPY else shared),
                    scratch=str(scratch),
                    dtype=arguments.dtype,
                    vocabulary=arguments.vocabulary,
                    micro_batches=micro_batches,
                    tokens=arguments.tokens,
                )
                for arm in arguments.arms
                if arm not in unable
            }
            until = began + arguments.seconds * sum(weights[: number + 1]) / sum(weights)
            with _processes(tasks, Path(name), unable) as arms:
                steps = _alternate(arms, arguments.rounds, arguments.dropped, until)
                about = {arm: process.about for arm, process in arms.items()}
            _check_losses(steps, TOLERANCE[arguments.dtype])
            rows = _rows(steps, micro_batches * arguments.tokens, arguments.dropped)
            threads = ", ".join(sorted({str(one["threads"]) for one in about.values()}))
            _show(
                rows,
                (
                    f"{micro_batches} x {arguments.tokens} tokens a step, {shape.dtype}, "
                    f"threads: {threads}"
                ),
            )
            results = {
                "arms": rows,
                "rounds": len(rows[0]["losses"]) - arguments.dropped,
                "about": about,
            }
            report(
                f"peers-{micro_batches}x{arguments.suffix}", {**results, "unable": unable}, shape
            )
            lines += [_line(micro_batches, row) for row in rows]
    lines += [
        ["-", arm, f"it cannot: {why}", *["-"] * (len(TABLE) - 3)] for arm, why in unable.items()
    ]
    print("\n".join(f"| {' | '.join(line)} |" for line in lines))
    took = f"{time.monotonic() - began:.0f} s, at least {results['rounds']} rounds; "
    print(
        took
        + ", ".join(
            f"{name} {number}" for name, number in next(iter(about.values()))["versions"].items()
        )
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--micro-batches",
        type=_numbers,
        default=[1, 4, 16],
        help="of one step, separated by commas",
    )
    parser.add_argument("--tokens", type=int, default=128, help="of one micro-batch")
    parser.add_argument(
        "--rounds", type=int, default=4, help="measured, after those dropped, if there is time"
    )
    parser.add_argument("--dropped", type=int, default=1, help="rounds before the measured ones")
    parser.add_argument(
        "--seconds",
        type=float,
        default=600,
        help="for all; each number has one measured round anyway",
    )
    parser.add_argument("--family", choices=FAMILIES, default=FAMILIES[0], help="of the model")
    arms = ["lema", "peft", "fsdp2", "deepspeed", "soup", "airllm"]
    parser.add_argument("--arms", type=_arms, default=arms, help=", ".join(ARMS))
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=2816)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=16000)
    parser.add_argument("--dtype", choices=sorted(TOLERANCE), default="bfloat16")
    parser.add_argument(
        "--directory", type=Path, help="where to write the model (a disk, not memory)"
    )
    parser.add_argument(
        "--suffix",
        default="",
        help="of the results' names, for runs that are not to replace others",
    )
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _arms(text: str) -> list[str]:
    names = text.split(",")
    if unknown := sorted(set(names) - ARMS.keys()):
        raise argparse.ArgumentTypeError(
            f"no arm is named {', '.join(unknown)}; there are {', '.join(ARMS)}"
        )
    return names


class Arm:
    """A process that waits for the word to take a step; its own log tells what went wrong."""

    def __init__(self, name: str, task: Task, log: Path) -> None:
        self.name = name
        self._log = log
        self._directory = Path(task.directory)
        self._scratch = Path(task.scratch)
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
        """Note what the arm says of itself; `ChildProcessError`: it could not begin."""
        self.about, _ = self._answer()

    def step(self) -> dict[str, Any]:
        """Drop the arm's files from the page cache, let it take one step, and watch its memory
        meanwhile.
        """
        copies = {file.parent for file in self._scratch.rglob("*.safetensors")}
        for directory in (self._directory, *copies):
            forget_pages(directory)
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
            raise ChildProcessError(f"{self.name} ended:\n{self._log.read_text()[-4000:]}")
        return json.loads(line), max(peak, self._anonymous())

    def _anonymous(self) -> int:
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return next(
            (int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0
        )


@contextmanager
def _processes(
    tasks: dict[str, Task], logs: Path, unable: dict[str, str]
) -> Iterator[dict[str, Arm]]:
    """Start the arms; those that cannot begin are noted in `unable`, with the last of what they
    said.
    """
    arms: dict[str, Arm] = {}
    try:
        for name, task in tasks.items():
            arms[name] = Arm(name, task, logs / f"{name}.log")
        for name, arm in list(arms.items()):
            try:
                arm.wait_until_ready()
            except ChildProcessError as error:
                if name in NEEDED:
                    raise
                arms.pop(name).close()
                said = [
                    line
                    for line in str(error).splitlines()
                    if ": " in line and not line.startswith(" ")
                ]
                unable[name] = (said or [str(error)])[-1][:200].replace("|", "/")
        yield arms
    finally:
        for arm in arms.values():
            arm.close()


def _alternate(
    arms: dict[str, Arm], rounds: int, dropped: int, until: float
) -> dict[str, list[dict[str, Any]]]:
    """Return every step of every arm, one round after the other, the order reversed each time: at
    least one after those dropped, and no further one that would end after `until`."""
    steps: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    for number in range(dropped + rounds):
        began = time.monotonic()
        for name in reversed(arms) if number % 2 else arms:
            steps[name].append(arms[name].step())
        now = time.monotonic()
        if number >= dropped and now + (now - began) > until:
            break
    return steps


def _check_losses(steps: dict[str, list[dict[str, Any]]], tolerance: float) -> None:
    first, *others = steps
    for name in others:
        allowed = tolerance * LOOSER.get(name, 1)
        for number, (ours, theirs) in enumerate(zip(steps[first], steps[name], strict=True), 1):
            if abs(ours["loss"] - theirs["loss"]) > allowed * abs(ours["loss"]):
                raise SystemExit(
                    f"step {number}: {first} has a loss of {ours['loss']}, {name} one of "
                    f"{theirs['loss']}"
                )


def _rows(
    steps: dict[str, list[dict[str, Any]]], tokens: int, dropped: int
) -> list[dict[str, Any]]:
    rows = []
    for name, taken in steps.items():
        measured = {key: [step[key] for step in taken[dropped:]] for key in MEASURED}
        row: dict[str, Any] = {
            "arm": name,
            **{key: statistics.median(values) for key, values in measured.items()},
        }
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


def _line(micro_batches: int, row: dict[str, Any]) -> list[str]:
    """Return a row of the documentation's table."""
    speed = (
        "-" if row["arm"] == "lema" or "ratios" not in row else f"{row['ratios']['seconds']:.2f}"
    )
    numbers = (
        f"{row['seconds']:.2f}",
        speed,
        f"{row['tokens_per_second']:.0f}",
        f"{row['cpu_seconds']:.2f}",
    )
    memory = (f"{row[kind] / 1e6:,.0f}" for kind in ("peak_anonymous", "file", "bytes_read"))
    return [str(micro_batches), row["arm"], *numbers, *memory]


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
