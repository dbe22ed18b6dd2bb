"""What `lema plan` says of a run beside what the run takes: peak memory, and seconds per step.

    OMP_NUM_THREADS=1 python benchmarks/plan.py            # every configuration
    OMP_NUM_THREADS=1 python benchmarks/plan.py --only 0,7

Each configuration is planned in one process and trained in another, both on this machine, one after the other. Memory
is anonymous memory of the training process, sampled; the plan's share of interpreter and libraries is that of the
planning process. malloc gives freed memory back (RETURNING, as in memory.py): what glibc keeps by default differs from
run to run. Steps are timed from the third on, with the model's files dropped from the page cache before each.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common import PeakAnonymous, Shape, forget_pages, report, write_model
from memory import RETURNING
from rich.console import Console
from rich.table import Table

STEPS = 4


@dataclass(frozen=True)
class Case:
    """A model and the settings of a run."""

    shape: Shape
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        said = " ".join(f"{key}={value}" for key, value in self.settings.items())
        shape = self.shape
        return f"{shape.layers}x{shape.hidden}/{shape.intermediate} v{shape.vocabulary} {shape.dtype} {said}"


SMALL, MIDDLE, LARGE = Shape(512, 1408, 8, 4096, 8), Shape(1024, 2816, 12, 8192), Shape(1536, 4096, 8, 8192)
FULL = Shape(768, 2048, 8, 8192, 12, "float32")
DEEP = Shape(512, 1408, 40, 4096, 8)
WIDE = Shape(1024, 2816, 6, 65536)
RECOMPUTED = {"gradient_checkpointing": True}
CASES = [
    Case(SMALL, {**RECOMPUTED, "batch_size": 2, "max_length": 256}),
    Case(SMALL, {**RECOMPUTED, "batch_size": 8, "micro_batch_size": 2, "max_length": 256}),
    Case(SMALL, {"batch_size": 4, "micro_batch_size": 2, "max_length": 256}),
    Case(SMALL, {**RECOMPUTED, "batch_size": 4, "micro_batch_size": 1, "max_length": 1024}),
    Case(MIDDLE, {**RECOMPUTED, "batch_size": 1, "max_length": 512}),
    Case(MIDDLE, {**RECOMPUTED, "batch_size": 4, "micro_batch_size": 1, "max_length": 256}),
    Case(MIDDLE, {**RECOMPUTED, "batch_size": 4, "max_length": 256}),
    Case(MIDDLE, {**RECOMPUTED, "batch_size": 2, "micro_batch_size": 1, "max_length": 256, "prefetch_depth": 1}),
    Case(MIDDLE, {**RECOMPUTED, "batch_size": 2, "micro_batch_size": 1, "max_length": 256, "prefetch_depth": 4}),
    Case(MIDDLE, {"batch_size": 2, "micro_batch_size": 1, "max_length": 256}),
    Case(MIDDLE, {**RECOMPUTED, "batch_size": 2, "max_length": 256, "strategy": "resident"}),
    Case(MIDDLE, {**RECOMPUTED, "batch_size": 2, "max_length": 256, "lora_rank": 64}),
    Case(LARGE, {**RECOMPUTED, "batch_size": 2, "micro_batch_size": 1, "max_length": 256}),
    Case(LARGE, {**RECOMPUTED, "batch_size": 2, "max_length": 512}),
    Case(LARGE, {**RECOMPUTED, "batch_size": 1, "max_length": 64}),
    Case(FULL, {**RECOMPUTED, "batch_size": 2, "micro_batch_size": 1, "max_length": 256}),
    Case(FULL, {"batch_size": 2, "micro_batch_size": 1, "max_length": 256}),
    Case(DEEP, {**RECOMPUTED, "batch_size": 4, "micro_batch_size": 2, "max_length": 256}),
    Case(WIDE, {**RECOMPUTED, "batch_size": 2, "micro_batch_size": 1, "max_length": 256, "loss_chunk_tokens": 128}),
    Case(WIDE, {**RECOMPUTED, "batch_size": 1, "max_length": 512}),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="numbers of configurations, comma-separated")
    parser.add_argument("--directory", type=Path, help="where to write the models (a disk, not memory)")
    parser.add_argument("--child", nargs=2, metavar=("WHAT", "CONFIG"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps({"plan": _plan, "train": _train}[arguments.child[0]](Path(arguments.child[1]))))
        return
    wanted = range(len(CASES)) if arguments.only is None else map(int, arguments.only.split(","))
    rows = []
    for number in wanted:
        case = CASES[number]
        with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
            write_model(Path(name), case.shape)
            config = Path(name) / "run.yaml"
            given = {"model_name_or_path": name, "device": "cpu", "save_steps": 0, **case.settings}
            config.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in given.items()))
            planned, trained = _child("plan", config), _child("train", config)
        rows.append({"number": number, "case": case.name, "shape": asdict(case.shape), **planned, **trained})
        print(json.dumps(rows[-1]))
    _show(rows)
    if arguments.only is None:
        report("plan", rows, MIDDLE)


def _child(what: str, config: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", what, str(config)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **RETURNING})
    if done.returncode:
        raise SystemExit(f"the child ended with {done.returncode}\n{done.stderr[-2000:]}")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def _plan(config: Path) -> dict[str, Any]:
    from lema.config import LemaConfig
    from lema.plan.outlook import make_plan

    plan, _ = make_plan(LemaConfig.from_yaml(config))
    parts = {**plan.host, **plan.device}
    return {
        "planned_peak": plan.host_peak,
        "planned_seconds": plan.step.seconds,
        "parts": {name: size for name, size in parts.items() if size},
        "bottleneck": plan.step.bottleneck,
        "disk": plan.machine.speeds.disk,
    }


def _train(config: Path) -> dict[str, Any]:
    import torch

    from lema import LemaConfig, LemaModel
    from lema.loss import split_batch

    settings = LemaConfig.from_yaml(config)
    model = LemaModel(settings)
    model.initialize_lora()
    trainer = model.get_trainer()
    vocabulary = model.skeleton.config.vocab_size
    ids = torch.randint(0, vocabulary, (settings.batch_size, settings.max_length or 1))
    mask = torch.ones_like(ids)
    mask[:, -1] = 0  # rows of real data differ in length, and attention is computed with a mask
    batch = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}
    micro_batches = split_batch(batch, settings.micro_batch_size)
    seconds = []
    with PeakAnonymous() as sampled:
        for _ in range(STEPS + 2):
            forget_pages(Path(settings.model_name_or_path))
            began = time.perf_counter()
            trainer.accumulate(micro_batches, more=True)
            seconds.append(time.perf_counter() - began)
    return {"peak": sampled.peak, "seconds": statistics.median(seconds[2:])}


def _show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="planned and measured")
    for column in ("", "case", "MB planned", "MB", "off", "s planned", "s", "off"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for row in rows:
        memory, length = row["planned_peak"] / row["peak"] - 1, row["planned_seconds"] / row["seconds"] - 1
        megabytes = [f"{row[key] / 1e6:,.0f}" for key in ("planned_peak", "peak")]
        seconds = [f"{row[key]:.3f}" for key in ("planned_seconds", "seconds")]
        cells = [*megabytes, f"{100 * memory:+.1f}%", *seconds, f"{100 * length:+.0f}%"]
        table.add_row(str(row["number"]), row["case"], *cells)
    Console(width=170).print(table)


if __name__ == "__main__":
    main()
