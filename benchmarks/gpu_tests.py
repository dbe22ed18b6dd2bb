"""Run the tests that need a device, and write a line of JSON for each as soon as it ends.

    python benchmarks/gpu_tests.py --out tests.jsonl
    python benchmarks/gpu_tests.py --out tests.jsonl --mark 'not slow' tests/cuda/test_cuda_order.py

The files are named, because collecting all of them takes longer than the marked tests. A warning of
a library is no failure here: its versions may be others than those that the tests run with
elsewhere. What fails is in the line.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest
from gpu_lines import Lines

ROOT = Path(__file__).parents[1]
FILES = (
    "tests/cuda/test_cuda_device.py",
    "tests/activations/test_streams.py",
    "tests/engine/test_optim.py",
    "tests/cuda/test_doctor_cuda.py",
)
LONGEST = 2000  # characters of an error


class Outcomes:
    """A plugin of pytest that writes what became of each test."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the outcome of a test, or the failure of what is before or after it."""
        if report.when == "call" or report.outcome != "passed":
            why = {} if report.outcome == "passed" else {"why": str(report.longrepr)[-LONGEST:]}
            seconds = round(report.duration, 3)
            self._lines.write(
                test=report.nodeid, outcome=report.outcome, when=report.when, seconds=seconds, **why
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", default=FILES)
    parser.add_argument("--mark", default="cuda", help="which tests of these, as pytest's -m")
    parser.add_argument("--most-failures", type=int, default=12)
    parser.add_argument("--out", type=Path, help="a file for the lines")
    options = parser.parse_args()
    os.chdir(ROOT)
    plain = ["-o", "addopts=", "-o", "filterwarnings=default", "-p", "no:cacheprovider", "-n", "0"]
    arguments = [
        "-q",
        "--tb=short",
        f"--maxfail={options.most_failures}",
        "-m",
        options.mark,
        *plain,
        *options.files,
    ]
    raise SystemExit(pytest.main(arguments, plugins=[Outcomes(Lines(options.out))]))


if __name__ == "__main__":
    main()
