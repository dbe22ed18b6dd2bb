"""Trains with LEMA's default settings in memory cgroups of several sizes: does the run that the
plan chose fit?

    OMP_NUM_THREADS=2 python benchmarks/defaults.py

Each row is a `lema train` in a cgroup of its own, with malloc's defaults, as a user's. With
`--kept` LEMA's CPU backend does not give freed memory back: malloc alone decides. Needs the right
to make memory cgroups.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import Shape, report
from limits_group import memory_group
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
DEFAULTS = ("gradient_checkpointing", "device_memory")
TRAIN = "import sys; from lema.cli import main; sys.exit(main())"
KEPT = "from lema_cpu.heap import Heap; Heap.look = lambda heap: None; "
COLUMNS = "limit MB", "exit code", "tokens/s", "peak MB", "what the plan chose"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--limits", type=int, nargs="+", default=[800, 1000, 1300, 1800], help="MB of the cgroups"
    )
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--kept", action="store_true", help="freed memory is not given back")
    parser.add_argument(
        "--directory", type=Path, help="where to write the model (a disk, not memory)"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        written = [
            sys.executable,
            str(HERE / "shaped_run.py"),
            directory,
            "--layers",
            str(arguments.layers),
        ]
        subprocess.run(written, check=True)
        rows = [_row(Path(directory), limit * 10**6, arguments) for limit in arguments.limits]
    table = Table(*COLUMNS, title="default settings in a memory cgroup")
    for row in rows:
        table.add_row(*(str(row[column]) for column in COLUMNS))
    Console(width=150).print(table)
    report(f"defaults{'-kept' * arguments.kept}", rows, Shape(1024, 2816, arguments.layers, 16000))


def _row(directory: Path, limit: int, arguments: argparse.Namespace) -> dict[str, Any]:
    given = dict.fromkeys(DEFAULTS, "auto") | {"max_steps": str(arguments.steps)}
    options = [part for name, value in given.items() for part in ("--set", f"{name}={value}")]
    command = [
        sys.executable,
        "-c",
        KEPT * arguments.kept + TRAIN,
        "train",
        str(directory / "run.yaml"),
        *options,
    ]
    with memory_group(limit) as group:
        done = subprocess.run(
            command, capture_output=True, text=True, preexec_fn=group.join, check=False
        )
        peak = group.counters()["peak"]
    told = done.stdout + done.stderr
    if done.returncode not in (0, -9):
        raise SystemExit(told)
    found = re.search(r"(\d+)\s+tokens/s", told), re.search(r"\((\d+ resident[^)]*)\)", told)
    speed, chosen = (some[1].replace("\n", " ") if some else "" for some in found)
    return dict(
        zip(
            COLUMNS,
            (limit // 10**6, done.returncode, speed, round(peak / 1e6), chosen),
            strict=True,
        )
    )


if __name__ == "__main__":
    main()
