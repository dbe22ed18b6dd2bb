"""Seconds of a start of `lema train`, by part, from the shell to the first step and on to the end.

    python benchmarks/start.py CONFIG
    python benchmarks/start.py CONFIG --as-found   # with every library that transformers and PEFT find
    python benchmarks/start.py CONFIG --no-step    # ends where the first step would begin

Seconds are of the process in user and system mode, because wall time on a shared machine is
others', too; and of the clock, since the process began.
"""

import argparse
import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lema.cli import app as command
from lema.cli.exitcodes import run

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("config")
parser.add_argument("--as-found", action="store_true")
parser.add_argument("--no-step", action="store_true")


def _began() -> float:
    """Return when this process began, in seconds since the machine did."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Run the command with a clock around its parts, and print a row for each as it ends."""
    given = parser.parse_args()
    then = (0.0, 0.0)
    began = _began()

    def tell(part: str) -> None:
        nonlocal then
        now = time.process_time(), time.clock_gettime(time.CLOCK_BOOTTIME) - began
        each = " | ".join(
            f"{after - before:.2f} | {after:.2f}" for before, after in zip(then, now, strict=True)
        )
        print(f"| {part} | {each} |", flush=True)
        then = now

    def timed(owner: Any, name: str, part: str, before: str = "") -> None:
        work: Callable[..., Any] = getattr(owner, name)

        def clocked(*args: Any, **options: Any) -> Any:
            if before:
                tell(before)
                if given.no_step:
                    os._exit(0)
            made = work(*args, **options)
            tell(part)
            return made

        setattr(owner, name, clocked)

    import_libraries = vars(command)["import_libraries"]

    def imported(*args: Any, **options: Any) -> None:
        tell("interpreter, settings")
        import_libraries(*args, **options)
        for name in ("torch", "transformers.modeling_utils", "peft"):
            importlib.import_module(name)
        tell("torch, transformers, PEFT")
        names = ("model", "run", "trainer", "events")
        model, running, trainer, events = (
            importlib.import_module(f"lema.train.{name}") for name in names
        )
        tell("LEMA's modules")
        timed(model.LemaModel, "__init__", "model opened, weights outside the layers read")
        timed(model.LemaModel, "initialize_lora", "adapter drawn")
        timed(running, "load_data", "plan, data opened")
        timed(
            trainer.LemaTrainer,
            "accumulate",
            "first step, without the optimizer",
            before="trainer made",
        )
        timed(events.RunEvents, "draw", "optimizer, end of the run, picture")

    vars(command)["import_libraries"] = imported
    print("| part | processor | so far | clock | so far |\n|---|---|---|---|---|")
    sys.argv[1:] = ["train", given.config]
    try:
        sys.exit(run(command.app, sys.argv[1:])) if given.as_found else command.main()
    finally:
        tell("adapter saved")


if __name__ == "__main__":
    main()
