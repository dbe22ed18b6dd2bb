"""What `lema plan` says of a run beside what the run takes: peak memory, and seconds per step.

    OMP_NUM_THREADS=1 python benchmarks/plan.py            # every configuration
    OMP_NUM_THREADS=1 python benchmarks/plan.py --only 0-4,7

Each configuration has two processes, one after the other. The first plans, then trains, and
measures the machine anew before each step: what is judged is the median of the ratios of
neighbours, so that a machine whose speed changes from minute to minute tells of the plan, not of
itself. Seconds that pass (the whole plan: computing, reading, what overlaps) and seconds of the
training thread's processor time (what is computed, whoever else wants the processor) are compared
in turns. The model's files are dropped from the page cache before each step.

The second trains alone: its anonymous memory is sampled, and compared with the first plan, whose
share of interpreter and libraries is that of the planning process. malloc gives freed memory back
(RETURNING, as in memory.py): what glibc keeps by default differs from run to run.
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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from common import PeakAnonymous, Shape, forget_pages, report, write_model
from memory import RETURNING
from rich.console import Console
from rich.table import Table

STEPS = 2  # the first makes the optimizer's state
MEMORY = 0.1
UNDER = 0.03
TIME = 0.2  # what is asked of a plan


@dataclass(frozen=True)
class Case:
    """A model, quantised or not, and the settings of a run."""

    shape: Shape
    settings: dict[str, Any] = field(default_factory=dict)
    quantize: str | None = None

    @property
    def name(self) -> str:
        said = " ".join(f"{key}={value}" for key, value in self.settings.items())
        shape = self.shape
        stored = self.quantize or shape.dtype
        return (
            f"{shape.layers}x{shape.hidden}/{shape.intermediate} v{shape.vocabulary} {stored} "
            f"{said}"
        )

    def write(self, directory: Path) -> None:
        """Write the model."""
        if self.quantize is None:
            write_model(directory, self.shape)
            return
        from lema.convert.prepare import prepare

        with tempfile.TemporaryDirectory(dir=directory.parent) as plain:
            write_model(Path(plain), self.shape)
            prepare(plain, directory, quantize=self.quantize)


SMALL = Shape(512, 1408, 8, 4096, 8)
MIDDLE = Shape(1024, 2816, 12, 8192)
LARGE = Shape(1536, 4096, 8, 8192)
FULL = Shape(768, 2048, 8, 8192, 12, "float32")
DEEP = Shape(512, 1408, 40, 4096, 8)
WIDE = Shape(1024, 2816, 6, 65536)
RECOMPUTED = {"gradient_checkpointing": True}
# How much room the limits leave is chosen so that some layers stay, or are kept in host memory, and
# others are not.
CASES = [
    Case(SMALL, {**RECOMPUTED, "batch_size": 2, "max_length": 256}),
    Case(SMALL, {**RECOMPUTED, "batch_size": 4, "micro_batch_size": 2, "max_length": 256}),
    Case(SMALL, {"batch_size": 2, "micro_batch_size": 1, "max_length": 256}),
    Case(SMALL, {**RECOMPUTED, "batch_size": 1, "max_length": 1024}),
    Case(MIDDLE, {**RECOMPUTED, "batch_size": 1, "max_length": 256}),
    Case(
        MIDDLE,
        {
            **RECOMPUTED,
            "batch_size": 3,
            "micro_batch_size": 1,
            "max_length": 128,
            "device_memory": "400MB",
        },
    ),
    Case(MIDDLE, {**RECOMPUTED, "batch_size": 4, "max_length": 64}, "int8"),
    Case(
        MIDDLE,
        {
            **RECOMPUTED,
            "batch_size": 2,
            "micro_batch_size": 1,
            "max_length": 128,
            "prefetch_depth": 1,
        },
    ),
    Case(
        MIDDLE,
        {
            **RECOMPUTED,
            "batch_size": 2,
            "micro_batch_size": 1,
            "max_length": 128,
            "prefetch_depth": 4,
        },
    ),
    Case(MIDDLE, {"batch_size": 2, "micro_batch_size": 1, "max_length": 128}),
    Case(MIDDLE, {**RECOMPUTED, "batch_size": 2, "max_length": 128, "strategy": "resident"}),
    Case(MIDDLE, {**RECOMPUTED, "batch_size": 2, "max_length": 128, "lora_rank": 64}),
    Case(
        LARGE,
        {
            **RECOMPUTED,
            "batch_size": 2,
            "micro_batch_size": 1,
            "max_length": 64,
            "host_memory": "400MB",
        },
    ),
    Case(LARGE, {**RECOMPUTED, "batch_size": 1, "max_length": 256}),
    Case(LARGE, {**RECOMPUTED, "batch_size": 1, "max_length": 16}, "nf4"),
    Case(FULL, {**RECOMPUTED, "batch_size": 2, "micro_batch_size": 1, "max_length": 256}),
    Case(FULL, {"batch_size": 2, "micro_batch_size": 1, "max_length": 256}),
    Case(DEEP, {**RECOMPUTED, "batch_size": 2, "micro_batch_size": 1, "max_length": 128}),
    Case(
        WIDE,
        {
            **RECOMPUTED,
            "batch_size": 2,
            "micro_batch_size": 1,
            "max_length": 64,
            "loss_chunk_tokens": 32,
        },
    ),
    Case(WIDE, {**RECOMPUTED, "batch_size": 1, "max_length": 128}),
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", help="numbers of configurations, and ranges of them, comma-separated"
    )
    parser.add_argument(
        "--rounds", type=int, default=2, help="of a plan by either clock and the step after it"
    )
    parser.add_argument(
        "--directory", type=Path, help="where to write the models (a disk, not memory)"
    )
    parser.add_argument("--child", nargs=2, metavar=("WHAT", "CONFIG"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        what = arguments.child[0]
        config = Path(arguments.child[1])
        print(
            json.dumps(
                _plan_and_train(config, arguments.rounds) if what == "time" else _train(config)
            )
        )
        return
    rows = []
    for number in range(len(CASES)) if arguments.only is None else _numbers(arguments.only):
        rows.append(_run(number, arguments.directory))
        print(json.dumps(rows[-1]), flush=True)
    _show(rows)
    if arguments.only is None:
        report("plan", rows, MIDDLE)


def _numbers(said: str) -> list[int]:
    spans = (part.partition("-") for part in said.split(","))
    return [
        number for first, _, last in spans for number in range(int(first), int(last or first) + 1)
    ]


def _run(number: int, directory: Path | None) -> dict[str, Any]:
    case = CASES[number]
    with tempfile.TemporaryDirectory(dir=directory) as name:
        model = Path(name) / "model"
        config = Path(name) / "run.yaml"
        case.write(model)
        given = {
            "model_name_or_path": str(model),
            "device": "cpu",
            "save_steps": 0,
            **case.settings,
        }
        config.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in given.items()))
        found = {**_child("time", config), **_child("memory", config)}
    return {"number": number, "case": case.name, "shape": asdict(case.shape), **found}


def _child(what: str, config: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, *sys.argv[1:], "--child", what, str(config)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **RETURNING}
    )
    if done.returncode:
        raise SystemExit(f"the child ended with {done.returncode}\n{done.stderr[-2000:]}")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def _plan_and_train(config: Path, rounds: int) -> dict[str, Any]:
    """Plan, then measure and train by turns."""
    from lema.config import LemaConfig
    from lema.plan import make_plan
    from lema.plan.measure import probe

    plan, planner = make_plan(LemaConfig.from_yaml(config))
    pairs: list[dict[str, float]] = []
    with _Training(config) as training:
        training.step()
        for clock in (time.perf_counter, time.thread_time) * rounds:
            assert planner.workload is not None
            known = planner.blueprint, planner.workload, planner.config, planner.shape
            machine, timings = probe(*known, training.model.backend, clock)
            now = replace(
                planner,
                machine_state=replace(planner.machine_state, machine=machine),
                timings=timings,
            )
            predicted = now.simulated(now.demand(), plan.allocation)
            wall, processor = training.step()
            if clock is time.perf_counter:
                pairs.append({"planned": predicted.seconds, "seconds": wall})
            else:
                pairs[-1] |= {"planned_processor": predicted.compute, "processor": processor}
    parts = {**plan.memory.host, **plan.memory.device}
    return {
        "planned_peak": plan.host_peak,
        "process": planner.machine_state.process_bytes,
        "parts": {name: size for name, size in parts.items() if size},
        "bottleneck": plan.step.bottleneck,
        "disk": plan.machine.speeds.disk,
        "pairs": pairs,
    }


def _train(config: Path) -> dict[str, Any]:
    """Train, and sample anonymous memory from the first step on."""
    with _Training(config) as training, PeakAnonymous() as sampled:
        for _ in range(STEPS):
            training.step()
    return {"peak": sampled.peak}


class _Training:
    """A run of the settings in a file, step by step, on tokens drawn at random."""

    def __init__(self, config: Path) -> None:
        import torch

        from lema import LemaConfig, LemaModel
        from lema.engine.head.loss import split_batch

        self.settings = settings = LemaConfig.from_yaml(config)
        self.model = LemaModel(settings)
        self.model.initialize_lora()
        self.trainer = self.model.get_trainer()
        vocabulary = self.model.skeleton.config.vocab_size
        ids = torch.randint(0, vocabulary, (settings.batch_size, settings.max_length or 1))
        mask = torch.ones_like(ids)
        mask[:, -1] = 0  # rows of real data differ in length, and attention is computed with a mask
        batch = {
            "input_ids": ids,
            "labels": ids.masked_fill(mask == 0, -100),
            "attention_mask": mask,
        }
        self.micro_batches = split_batch(batch, settings.micro_batch_size)

    def __enter__(self) -> _Training:
        return self

    def __exit__(self, *_: object) -> None:
        self.model.close()

    def step(self) -> tuple[float, float]:
        """Train a step on cold files; return the seconds that passed, and this thread's
        processor time.
        """
        forget_pages(Path(self.settings.model_name_or_path))
        began = time.perf_counter(), time.thread_time()
        self.trainer.accumulate(self.micro_batches, more=True)
        return time.perf_counter() - began[0], time.thread_time() - began[1]


def _show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="planned and measured")
    columns = [
        "",
        "case",
        "MB planned",
        "MB",
        "off",
        "of it, not the process",
        "s planned",
        "s",
        "off",
        "cpu s",
        "off",
    ]
    for column in columns:
        table.add_column(column, justify="left" if column == "case" else "right")
    found = [_differences(row) for row in rows]
    for row, off in zip(rows, found, strict=True):
        beside = (row["planned_peak"] - row["process"]) / (row["peak"] - row["process"]) - 1
        table.add_row(
            str(row["number"]),
            row["case"],
            *[f"{row[key] / 1e6:,.0f}" for key in ("planned_peak", "peak")],
            f"{100 * off['memory']:+.1f}%",
            f"{100 * beside:+.1f}%",
            *[f"{_median(row, key):.2f}" for key in ("planned", "seconds")],
            f"{100 * off['seconds']:+.0f}%",
            f"{_median(row, 'processor'):.2f}",
            f"{100 * off['processor']:+.0f}%",
        )
    console = Console(width=190)
    console.print(table)
    memory, seconds, processor = (
        [off[name] for off in found] for name in ("memory", "seconds", "processor")
    )
    console.print(
        f"memory within {MEMORY:.0%} and not under by more than {UNDER:.0%}: "
        f"{sum(-UNDER <= off <= MEMORY for off in memory)} of {len(rows)}; step time "
        f"within {TIME:.0%}: "
        f"{sum(abs(off) <= TIME for off in seconds)}, of processor time "
        f"{sum(abs(off) <= TIME for off in processor)}"
    )


def _median(row: dict[str, Any], key: str) -> float:
    return statistics.median(pair[key] for pair in row["pairs"])


def _differences(row: dict[str, Any]) -> dict[str, float]:
    """Return how far the plan is off, as a part of what was measured."""
    pairs = row["pairs"]
    return {
        "memory": row["planned_peak"] / row["peak"] - 1,
        "seconds": statistics.median(pair["planned"] / pair["seconds"] for pair in pairs) - 1,
        "processor": statistics.median(
            pair["planned_processor"] / pair["processor"] for pair in pairs
        )
        - 1,
    }


if __name__ == "__main__":
    main()
