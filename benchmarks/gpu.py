"""LEMA on a GPU against PEFT in memory and the engines that offload, under caps of device memory,
in under ten minutes.

    python benchmarks/gpu.py                                  # on a machine with a GPU
    python benchmarks/gpu.py --device cpu --tiny              # the same from end to end, which measures nothing

Weights are random, written in place (gpu_model.py): the shapes of an 8B and a 32B model. First
comes what the machine can do at best: copies between host and device, matrix products of a layer's
shapes. Then the parity of a small model with the `cpu` backend. Then the runs, the most important
first, each an arm (gpu_arms.py) in a process of its own whose allocator refuses more than the cap.
PEFT with the whole model on the device is a process too, and takes its step in turn with every
other arm, round by round, the order reversed each time: a ratio is the median over the rounds.
Tokens are counted in micro-batches of one row.

Results are written after every row. What fails, is not installed, does not fit or is not reached in
time is a row that says so, and no target is met by it. A second call with `--resume` measures what
is missing.

The limit of a row is the longer of its arithmetic at the rate of the matrix products and its bytes
at the page-locked link's speed; of arms whose bytes are not counted, its arithmetic. Per token that
is 6 P L + 9 L S H + 4 V H operations (P parameters of a layer, S tokens of a row): forward,
recomputation, gradients of the inputs; causal attention; head.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

# the rest is imported once nothing is missing
from gpu_software import (
    untested_versions,
    what_is_missing,
)

# before what takes long to import, so that --seconds is the time of everything
BEGAN = time.monotonic()
RESULTS = Path(__file__).parent / "results"
MODELS = ("8B", "32B")


def main() -> None:
    arguments = _arguments()
    if missing := what_is_missing(arguments.device):
        raise SystemExit("\n".join(missing))
    for line in untested_versions():
        print(line, file=sys.stderr)
    from gpu_call import Call
    from gpu_plan import PLAN
    from gpu_table import show
    from rich.console import Console

    if arguments.list:
        print(
            "\n".join(
                f"{run.name:20} {run.strategy or '':10} micro-batches {run.micro_batches}"
                for run in PLAN
            )
        )
        return
    # so that what was begun is cleared away
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    call = Call(arguments, BEGAN)
    try:
        call.run()
    finally:
        call.close()
    show(call.results, Console(width=220))
    print(f"wrote {arguments.out} after {call.elapsed:.0f} s")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="LEMA's name for it")
    parser.add_argument(
        "--tiny", action="store_true", help="small models and caps, to see that everything runs"
    )
    parser.add_argument("--seconds", type=float, default=540, help="for everything")
    parser.add_argument("--rounds", type=int, default=3, help="of a row, at most")
    parser.add_argument(
        "--row-seconds", type=float, default=40, help="of the rounds of a row, about"
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument(
        "--only",
        nargs="+",
        help="of the plan, such as '8B/lema@4' or '*/fsdp2@*'; --list shows all",
    )
    parser.add_argument(
        "--rows-only", action="store_true", help="without parity, and without `lema prove`"
    )
    parser.add_argument(
        "--host-memory", type=float, metavar="GB", help="there may be, where it grows on demand"
    )
    parser.add_argument("--list", action="store_true", help="show the plan, and measure nothing")
    parser.add_argument(
        "--micro-batches", type=int, nargs="+", default=[16, 4, 1], help="of those that are planned"
    )
    parser.add_argument(
        "--tokens", type=int, help="of a micro-batch; 1024, or 16 of the tiny models"
    )
    parser.add_argument("--rank", type=int, default=16, help="of every arm's adapters")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu.json")
    parser.add_argument("--resume", action="store_true", help="keep what --out has measured")
    parser.add_argument(
        "--directory", type=Path, help="where to write what memory has no room for (a disk)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
