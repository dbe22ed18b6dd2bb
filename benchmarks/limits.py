"""How little memory a step needs to stay fast, and what half of a model's size in memory costs it.

    python benchmarks/limits.py smallest
    python benchmarks/limits.py twice

`smallest` finds by bisection the smallest memory cgroup in which a step takes at most 1.1 times
what it takes without a limit, for LEMA and for PEFT with gradient checkpointing. `twice` gives both
a cgroup of half the weights' bytes.

The whole process lives in its cgroup: interpreter, libraries, page cache; no swap. PEFT's weights
stay as `from_pretrained` leaves them, maps of the files, so it can run in less than their size by
reading them again; without a limit they stay in the page cache. LEMA reads past the page cache,
under a limit and without one. Every trial loads anew and takes turns with a process without a
limit, step by step; the ratio is the median over the rounds. Both run with malloc's defaults, as a
user's do. Needs the right to make memory cgroups.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from common import Shape, report, write_model
from limits_trial import Pair, middle, trial, unlimited
from rich.console import Console
from rich.table import Table

COLUMNS = ("arm", "limit MB", "outcome", "s/step", "without limit", "x time", "CPU s", "without", "read MB", "peak MB",
           "major faults", "rounds")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("which", choices=["smallest", "twice"])
    parser.add_argument("--arms", nargs="+", default=["lema", "peft"], choices=["lema", "peft"])
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--intermediate", type=int, default=4096)
    parser.add_argument("--layers", type=int, help="smallest: 28; twice: 48")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=128, help="per micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--prefetch-depth", type=int, default=2)
    parser.add_argument(
        "--rounds", type=int, default=5, help="of a step under the limit and one without"
    )
    parser.add_argument(
        "--tolerance", type=float, default=1.1, help="smallest: times the time without a limit"
    )
    parser.add_argument(
        "--precision", type=float, default=1.05, help="smallest: between the last two limits"
    )
    parser.add_argument(
        "--fraction", type=float, default=0.5, help="twice: of the weights, for the limit"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=8,
        help="times the time without a limit that a step may take",
    )
    parser.add_argument(
        "--directory", type=Path, help="where to write the models (a disk, not memory)"
    )
    arguments = parser.parse_args()
    layers = arguments.layers or (28 if arguments.which == "smallest" else 48)
    shape = Shape(arguments.hidden, arguments.intermediate, layers, arguments.vocabulary)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr] # each trial is printed when it is over
    console = Console(width=150)
    load = os.getloadavg()[0]
    with _two_copies(arguments.directory, shape) as files:
        run = _smallest if arguments.which == "smallest" else _twice
        found = run(arguments, shape, files, console)
    found |= {
        "threads": torch.get_num_threads(),
        "tokens": arguments.micro_batches * arguments.tokens,
    }
    found |= {"micro_batches": arguments.micro_batches, "load_before": load}
    console.print(
        f"weights {shape.weight_bytes / 1e6:,.0f} MB; load {load:.1f}, "
        f"{os.getloadavg()[0]:.1f} at the end"
    )
    report(f"limits-{arguments.which}", found, shape)


@contextmanager
def _two_copies(directory: Path | None, shape: Shape) -> Iterator[tuple[Path, Path]]:
    with tempfile.TemporaryDirectory(dir=directory) as name:
        one = Path(name) / "one"
        other = Path(name) / "other"
        write_model(one, shape)
        shutil.copytree(one, other)
        yield one, other


def _arm(arm: str, arguments: argparse.Namespace, files: tuple[Path, Path]) -> Any:
    names = ("vocabulary", "tokens", "micro_batches", "prefetch_depth")
    options = [
        word
        for name in names
        for word in (f"--{name.replace('_', '-')}", str(getattr(arguments, name)))
    ]
    return unlimited(arm, *files, options)


def _smallest(
    arguments: argparse.Namespace, shape: Shape, files: tuple[Path, Path], console: Console
) -> dict[str, Any]:
    trials: list[dict[str, Any]] = []
    smallest: dict[str, int] = {}
    for arm in arguments.arms:
        with _arm(arm, arguments, files) as pair:

            def passes(limit: int, pair: Pair = pair) -> bool:
                row = trial(pair, limit, arguments.rounds, arguments.patience, _lost(arguments))
                trials.append(row)
                console.print(_line(row), soft_wrap=True)
                return bool(row["outcome"] == "ran" and row["ratio"] <= arguments.tolerance)

            peak = pair.peak
            console.print(
                f"{arm}: {peak / 1e6:,.0f} MB at its peak without a limit, "
                f"{pair.first_seconds:.2f} s/step"
            )
            smallest[arm] = bisect(passes, peak, arguments.precision)
    console.print(
        _table(
            trials, f"a step of {arguments.micro_batches} x {arguments.tokens} tokens under a limit"
        )
    )
    for arm, limit in smallest.items():
        console.print(
            f"{arm}: within {arguments.tolerance} x of its time without a limit in "
            f"{limit / 1e6:,.0f} MB, "
            f"{limit / shape.weight_bytes:.2f} of the weights"
        )
    if len(smallest) == 2:
        console.print(f"lema's is {smallest['lema'] / smallest['peft']:.2f} of peft's")
    return {"smallest": smallest, "trials": trials}


def _lost(arguments: argparse.Namespace) -> Callable[[list[float]], bool]:
    """Return what tells that so many rounds were too long that the median will be."""
    return lambda ratios: (
        sum(ratio > arguments.tolerance for ratio in ratios) > arguments.rounds / 2
    )


def bisect(passes: Callable[[int], bool], high: int, precision: float) -> int:
    """Return the smallest limit that passes, to a factor of `precision`.

    Args:
        passes: tries a limit, in bytes.
        high: a limit that should pass; tried only where every smaller one tried did not, then
            raised until it does.
        precision: how far, as a factor, the limit found may lie above one that did not pass.
    """
    low = high // 2
    passed = failed = False
    while high / low > precision:
        limit = round((high * low) ** 0.5)
        if passes(limit):
            high = limit
            passed = True
            if not failed:
                low = high // 2  # nothing is known to fail yet
        else:
            low = limit
            failed = True
    while not passed:
        if not (passed := passes(high)):
            high = round(high * precision)
    return high


def _twice(
    arguments: argparse.Namespace, shape: Shape, files: tuple[Path, Path], console: Console
) -> dict[str, Any]:
    limit = int(arguments.fraction * shape.weight_bytes)
    trials = []
    for arm in arguments.arms:
        with _arm(arm, arguments, files) as pair:
            row = trial(pair, limit, arguments.rounds, arguments.patience, lambda _: False)
            row["free_peak"] = pair.peak
        console.print(_line(row), soft_wrap=True)
        trials.append(row)
    console.print(
        _table(trials, f"{limit / 1e6:,.0f} MB for {shape.weight_bytes / 1e6:,.0f} MB of weights")
    )
    for row in trials:
        speed = (
            f"{1 / row['ratio']:.2f} of the speed without the limit"
            if row["ratio"]
            else row["outcome"]
        )
        console.print(f"{row['arm']}: {speed}; without it {row['free_peak'] / 1e6:,.0f} MB")
    return {"limit": limit, "trials": trials}


def _table(rows: list[dict[str, Any]], title: str) -> Table:
    table = Table(title=title)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("arm", "outcome") else "right")
    for row in rows:
        table.add_row(*_cells(row))
    return table


def _line(row: dict[str, Any]) -> str:
    pairs = zip(COLUMNS, _cells(row), strict=True)
    return ", ".join(
        f"{cell}" if column in ("arm", "outcome") else f"{column} {cell}" for column, cell in pairs
    )


def _cells(row: dict[str, Any]) -> list[str]:
    def cell(number: float | None, scale: float = 1, digits: int = 2) -> str:
        return "-" if number is None else f"{number / scale:,.{digits}f}"

    limited = row["limited"]
    free = row["free"]
    return [
        row["arm"],
        cell(row["limit"], 1e6, 0),
        row["outcome"],
        cell(middle(limited, "seconds")),
        cell(middle(free, "seconds")),
        cell(row["ratio"]),
        cell(middle(limited, "cpu_seconds")),
        cell(middle(free, "cpu_seconds")),
        cell(middle(limited, "bytes_read"), 1e6, 0),
        cell(row["peak"], 1e6, 0),
        cell(middle(limited, "major_faults"), 1, 0),
        str(len(row["ratios"])),
    ]


if __name__ == "__main__":
    main()
