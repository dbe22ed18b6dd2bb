"""Processor seconds of each verb of `lema` on a small model, as a multiple of `import torch`.

    OMP_NUM_THREADS=1 python benchmarks/startup.py                  # makes the demo's model and run first, a minute
    OMP_NUM_THREADS=1 python benchmarks/startup.py --keep DIRECTORY --rounds 7    # there, and uses it again

Seconds are of the process in user and system mode: those of the clock on a shared machine are
others', too. Each verb is a process of its own, and the verbs take turns with `import torch`, so
that other work slows all of them. All modules are compiled to bytecode in a turn that is not
counted, as pip compiles those that it installs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import RESULTS, machine

UNIT = "import torch"
VERBS = {
    "config show": ("config", "show", "demo/train.yaml"),
    "init": (
        "init",
        "demo/model",
        "--device-memory",
        "1GB",
        "--data",
        "demo/data/text.txt",
        "--output",
        "new.yaml",
    ),
    "report": ("report", "demo/adapter", "--output", "new.html"),
    "watch": ("watch", "demo/adapter", "--once"),
    "data": ("data", "demo/train.yaml"),
    "doctor --quick": ("doctor", "--quick"),
    "models MODEL": ("models", "demo/model"),
    "plan": ("plan", "demo/train.yaml"),
}
PROGRAMS = {
    UNIT: ("-c", "import torch"),
    "import transformers, peft": ("-c", "import transformers, peft"),
    **{f"lema {verb}": ("-m", "lema", *words) for verb, words in VERBS.items()},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="directory of the demo")
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="WORD", help="programs whose names begin with one"
    )
    arguments = parser.parse_args()
    chosen = [
        name
        for name in PROGRAMS
        if not arguments.only or name == UNIT or name.startswith(tuple(arguments.only))
    ]
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(arguments.keep or temporary).resolve()
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = f"{temporary}/bytecode"
        if not (directory / "demo/adapter").exists():
            directory.mkdir(parents=True, exist_ok=True)
            _seconds(directory, ("-m", "lema", "demo", "demo"))
        seconds = _rounds(directory, chosen, arguments.rounds)
    about = machine()
    print(json.dumps(about))
    print("| program | seconds | from | to | x import torch |\n|---|---|---|---|---|")
    unit = statistics.median(seconds[UNIT])
    for name, measured in seconds.items():
        middle = statistics.median(measured)
        print(
            f"| {name} | {middle:.2f} | {min(measured):.2f} | {max(measured):.2f} | "
            f"{middle / unit:.2f} |"
        )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "startup.json").write_text(
        json.dumps({"machine": about, "rows": seconds}, indent=2) + "\n"
    )


def _rounds(directory: Path, names: list[str], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each program in each round; a round before them fills caches and is
    not counted.
    """
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for counted in [False, *[True] * rounds]:
        for name in names:
            taken = _seconds(directory, PROGRAMS[name])
            if counted:
                seconds[name].append(taken)
    return seconds


def _seconds(directory: Path, words: tuple[str, ...]) -> float:
    """Return the processor seconds of a process of Python, with those of its own processes."""
    for written in ("new.yaml", "new.html"):
        (directory / written).unlink(missing_ok=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *words], cwd=directory, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # which ends with 2 where this machine has a problem
    if done.returncode and "doctor" not in words:
        raise SystemExit(f"{words}: {done.stderr}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
