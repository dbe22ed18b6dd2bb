"""`python -m tests.faults --full` makes every fault there is and prints what came of it as a
Markdown table.
"""

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def main(arguments: list[str]) -> int:
    """Make the faults asked for; return 1 if any ended otherwise than it must."""
    sys.path[:0] = [str(TESTS), str(TESTS / "support")]  # as pytest has it
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Arrow's allocator starts a thread where it is imported, and a process with threads must not be
    # forked.
    os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")
    import pickles

    from faults import forked
    from faults.outcome import Outcome
    from faults.table import ROWS, markdown, outcome_of

    names = [row.name for row in ROWS]
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument(
        "--full", action="store_true", help="as many cases as the table names; else a few of each"
    )
    parser.add_argument("--only", metavar="NAME", nargs="+", choices=names, help=", ".join(names))
    parser.add_argument("--count", type=int, help="so many cases of each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--json",
        action="store_true",
        help="print a JSON object of a row and what came of it per line",
    )
    parser.add_argument("--quiet", action="store_true", help="say nothing of single cases")
    given = parser.parse_args(arguments)
    pickles.watch()
    asked = given.only or [row.name for row in ROWS if given.full or row.short]
    outcomes = []

    def told(name: str, outcome: Outcome) -> None:
        outcomes.append(outcome)
        if given.json:
            sys.stdout.write(json.dumps({"row": name, **asdict(outcome)}) + "\n")
            sys.stdout.flush()

    with tempfile.TemporaryDirectory(prefix="lema-faults-") as place:
        # of all that is made, because a forked process does nothing at its exit
        tempfile.tempdir = place
        for row in [row for row in ROWS if row.name in asked]:
            count = (
                given.count
                if given.count is not None
                else row.full
                if given.full or not row.short
                else row.short
            )
            told(row.name, outcome_of(row, count, given.seed, None if given.quiet else _say))
    if (looked := forked.unpickled()).cases:
        told("pickles", looked)
    if not given.json:
        sys.stdout.write(markdown(outcomes) + "\n")
    for outcome in outcomes:
        for failure in outcome.failures:
            _say(f"{outcome.fault}: {failure}")
    return int(any(outcome.failures or outcome.passed != outcome.cases for outcome in outcomes))


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
