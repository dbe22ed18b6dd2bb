"""Seconds per optimizer step of this checkout against another one, each in a process of its own,
step about.

    git worktree add ../before v0.9
    python benchmarks/versions.py ../before --dtype float32

Both stream the same files and train the same adapters on the same tokens. The two processes
alternate, the order reversed every round, and the model's files are dropped from the page cache
before every step. The number to read is the median over the rounds of one process's seconds divided
by the other's; beside it stand its quartiles, the same ratio of processor time, which other work on
the machine disturbs less, and whether all losses are equal to the bit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import Shape, cpu_seconds, forget_pages, report, write_model

from lema import LemaConfig, LemaModel
from lema.engine.head.loss import split_batch

HERE = Path(__file__).resolve().parents[1]
FLOORS = ("", "backends", "tools")  # the folders of a checkout that its modules are imported from


class Version:
    """A process that trains by the code of one checkout, one step whenever it is asked."""

    def __init__(self, checkout: Path, directory: Path, arguments: argparse.Namespace) -> None:
        paths = os.pathsep.join(str(checkout / floor) for floor in FLOORS)
        shown = [
            f"--{name}={getattr(arguments, name)}"
            for name in ("arithmetic", "tokens", "vocabulary")
        ]
        shown.append(f"--micro-batches={arguments.micro_batches}")
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(directory), "--alone", *shown],
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        said = self._answer()
        if Path(said["imported"]) != checkout / "lema":
            raise SystemExit(
                f"{checkout} was asked for, but its process imported {said['imported']}"
            )

    def step(self) -> dict[str, Any]:
        """Return the `seconds`, `cpu` seconds and `loss` of one optimizer step."""
        assert self._process.stdin is not None
        print("step", file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise SystemExit(f"a process ended with {self._process.wait()}; what it wrote is above")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def main() -> None:
    arguments = _arguments()
    if arguments.alone:
        _alone(arguments)
        return
    shape = Shape(
        arguments.hidden,
        arguments.intermediate,
        arguments.layers,
        arguments.vocabulary,
        dtype=arguments.dtype,
    )
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name)
        write_model(directory, shape)
        versions = [
            Version(checkout, directory, arguments)
            for checkout in (HERE, arguments.other.resolve())
        ]
        rounds = []
        for number in range(arguments.steps + 1):
            order = (0, 1) if number % 2 else (1, 0)
            answers = {which: _cold_step(versions[which], directory) for which in order}
            rounds.append([answers[0], answers[1]])
        for version in versions:
            version.close()
    for kind in ("seconds", "cpu"):
        ratios = [here[kind] / other[kind] for here, other in rounds[1:]]
        low, middle, high = statistics.quantiles(ratios, n=4)
        here, other = (
            statistics.median(answers[which][kind] for answers in rounds[1:]) for which in (0, 1)
        )
        print(
            f"{kind}: {here:.3f} here, {other:.3f} there, ratio {middle:.4f} (quartiles "
            f"{low:.4f} and {high:.4f})"
        )
    same = sum(here["loss"] == other["loss"] for here, other in rounds)
    print(f"losses: {same} of {len(rounds)} equal")
    report(
        f"versions-{shape.dtype}-{arguments.micro_batches}x-{arguments.arithmetic}", rounds, shape
    )


def _cold_step(version: Version, directory: Path) -> dict[str, Any]:
    forget_pages(directory)
    return version.step()


def _alone(arguments: argparse.Namespace) -> None:
    """Train on the model in the directory that `other` names, one step for each line that is
    read.
    """
    import lema

    torch.manual_seed(0)
    length = arguments.tokens // arguments.micro_batches
    ids = torch.randint(0, arguments.vocabulary, (arguments.micro_batches, length))
    settings: dict[str, Any] = {
        "device": "cpu",
        "arithmetic": arguments.arithmetic,
        "gradient_checkpointing": True,
        "micro_batch_size": 1,
        "batch_size": arguments.micro_batches,
        "max_length": length,
        "save_steps": 0,
    }
    model = LemaModel(LemaConfig(str(arguments.other), **settings))
    model.initialize_lora()
    trainer = model.get_trainer()
    micro_batches = split_batch({"input_ids": ids, "labels": ids}, 1)
    print(json.dumps({"imported": str(Path(lema.__file__).parent)}), flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        began_cpu = cpu_seconds()
        loss = trainer.accumulate(micro_batches).loss
        seconds = time.perf_counter() - began
        cpu = cpu_seconds() - began_cpu
        print(json.dumps({"seconds": seconds, "cpu": cpu, "loss": loss}), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="the directory of the other checkout")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=2816)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=16000)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--arithmetic", default="exact", choices=("exact", "fast"))
    parser.add_argument("--tokens", type=int, default=1024, help="per optimizer step")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument(
        "--steps", type=int, default=20, help="of each version, after one that is not measured"
    )
    parser.add_argument(
        "--directory", type=Path, help="where to write the model (a disk, not memory)"
    )
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
