"""Seconds of a command on a quiet machine, and with every core taken by another process, run about.

    lema demo a-demo
    python benchmarks/busy.py lema train a-demo/train.yaml --max_steps 20 --output_dir a-demo/again

Each core is taken by a process that only counts. The number to read is the median, over the rounds,
of the seconds of a busy run divided by those of the quiet one before it: of two programs on a core
each has half of it, so about 2 is what sharing costs; more is lost to waiting. Measure on a machine
that does nothing else.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from common import print_machine

COUNTING = "while True: pass"


@contextmanager
def taken(cores: int) -> Iterator[None]:
    """Have so many processes do nothing but count in a `with` block."""
    others = [subprocess.Popen([sys.executable, "-c", COUNTING]) for _ in range(cores)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def seconds(command: Sequence[str]) -> float:
    """Return how long a command takes; what it prints is shown only if it fails."""
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    passed = time.perf_counter() - begin
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}the command ended with exit code {done.returncode}")
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    seconds(arguments.command)  # what is read for the first time is in memory then
    print_machine()
    factors = []
    for number in range(1, arguments.rounds + 1):
        quiet = seconds(arguments.command)
        with taken(cores):
            busy = seconds(arguments.command)
        factors.append(busy / quiet)
        print(
            f"round {number}: {quiet:.1f} s quiet, {busy:.1f} s busy, factor {factors[-1]:.2f}",
            flush=True,
        )
    print(f"{cores} cores; the median factor is {statistics.median(factors):.2f}")


if __name__ == "__main__":
    main()
