"""What is left open against thirty configurations set by hand, under the same limit of device
memory.

    OMP_NUM_THREADS=1 python benchmarks/auto.py
    OMP_NUM_THREADS=1 python benchmarks/auto.py --resume   # go on with the models that are missing
    OMP_NUM_THREADS=1 python benchmarks/auto.py --quick    # a minute or two of one model, to see that it works

`auto` is `device_memory` alone, the rest chosen by the plan. The grid sets rows at once,
recomputation, prefetch depth and the chunk of the loss; those that do not fit are refused, and are
told. Each configuration has a process of its own, forked off once everything is imported. What one
has measured of model and machine the others plan with, so that they differ by their settings alone.
Of arms that the plan has made alike one takes steps.

A turn of an arm is one step that is not counted, and then `--steps` that are, one right after the
other: so the counted steps read ahead for each other, as those of a run do, and none finds its
layers read while others had their turns. All arms of the grid take one turn, which says who the
`--finalists` are and counts for nothing else. Then `auto`, the same once more, and the finalists
take `--rounds` turns each, interleaved, in another order each round, so that what else the machine
does falls on all alike. Each so has the same number of steps.

What is told are medians and quartiles of these steps: processor time, user and system, of all
threads, and the seconds that pass, of which others that want the processor take their part. `best`
is the finalist with the least median processor time. `best / auto` is 1 or more where nothing set
by hand was faster, and `again / auto` is what two arms of the same settings differ by: a `best /
auto` that is no further from 1 says nothing. The best is the best of several noisy numbers, and
`auto` one: the ratio is hard on it. `planned` is what the plan believed of a step, in seconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import peft
import torch
from common import RESULTS, Shape, cpu_seconds, report
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

import lema.train.opened.memory
from lema import LemaConfig, LemaModel
from lema.engine.head.loss import CHUNK_TOKENS
from lema.errors import MemoryLimitError
from lema.plan.planner import Planner, opened_planner, timed
from lema.train.trainer import LemaTrainer

SMALL = {
    "max_position_embeddings": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 192, "head_dim": 24}


def small(kind: type[Any], hidden: int, inner: int, layers: int, **changes: Any) -> Any:
    """Return a config of these sizes."""
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return kind(**{**SMALL, **sizes, **changes})


# Config, rows of a step, their length, and a limit in bytes that does not hold all that would make
# a step faster.
MODELS: dict[str, tuple[Any, int, int, int]] = {
    "dense": (small(LlamaConfig, 192, 512, 10), 8, 64, 80_000_000),
    "experts": (small(Qwen3MoeConfig, 192, 512, 8, **EXPERTS), 8, 64, 60_000_000),
    "words": (small(LlamaConfig, 160, 432, 8, vocab_size=32768), 8, 64, 130_000_000),
}
GRID = {
    "micro_batch_size": [1, 2, 8],
    "gradient_checkpointing": [True, False],
    "prefetch_depth": [1, 2, 4],
    "loss_chunk_tokens": [256, 1024],
}


STRIDE = 7  # because of settings taken by the sixth, all would have the same prefetch depth
QUICK = {"models": ["dense"], "arms": 6, "finalists": 2, "rounds": 2, "steps": 2}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--arms", type=int, default=30, help="configurations of the grid")
    parser.add_argument(
        "--finalists", type=int, default=5, help="arms of the grid that are compared with auto"
    )
    parser.add_argument("--rounds", type=int, default=6, help="turns of each arm that is compared")
    parser.add_argument("--steps", type=int, default=3, help="counted steps of a turn")
    parser.add_argument("--limit", type=int, help="bytes, in the place of each model's own")
    parser.add_argument(
        "--resume", action="store_true", help="leave out models whose results are there already"
    )
    parser.add_argument("--quick", action="store_true", help="one model, few arms, turns and steps")
    given = parser.parse_args()
    arguments = argparse.Namespace(**{**vars(given), **(QUICK if given.quick else {})})
    assert LemaTrainer is not None and peft is not None  # imported here, so that no fork has to
    found = []
    for name in arguments.models:
        # Each model has a file of its own, so that what was interrupted goes on with the next one.
        kept = RESULTS / f"auto-{'quick-' if given.quick else ''}{name}.json"
        if arguments.resume and kept.exists():
            found += json.loads(kept.read_text(encoding="utf-8"))["rows"]
            continue
        config, rows, length, limit = MODELS[name]
        with tempfile.TemporaryDirectory() as place:
            AutoModelForCausalLM.from_config(config).save_pretrained(place)
            base = {
                "device_memory": arguments.limit or limit,
                "max_length": length,
                "batch_size": rows,
            }
            found.append({"model": name, **compared(place, base, arguments)})
        for key, value in found[-1].items():
            print(f"{key:>22}: {value}", flush=True)
        report(kept.stem, found[-1:], Shape(0, 0, 0, 0))
    report("auto", found, Shape(0, 0, 0, 0))
    told = [
        "model",
        "arms",
        "refused",
        *(f"{who} / auto, {what}" for what in ("CPU", "wall") for who in ("best", "again")),
    ]
    print("| " + " | ".join(told) + " |\n" + "|---" * len(told) + "|")
    for row in found:
        cells = (f"{one:.3f}" if isinstance(one, float) else str(one) for one in map(row.get, told))
        print("| " + " | ".join(cells) + " |")


@dataclass(frozen=True)
class Learnt:
    """What planning has measured of a model and the machine."""

    known: dict[Any, Any] = field(default_factory=dict)
    timings: Any = None  # of a micro-batch of so many rows
    rows: int = 0
    speeds: Any = None

    def given(self, planner: Planner) -> Planner:
        """Return a planner that knows it."""
        if self.timings is None:
            return planner
        site = replace(
            planner.machine_state,
            machine=replace(planner.machine_state.machine, speeds=self.speeds),
        )
        timings = self.timings.times(planner.shape.micro_batch.rows / self.rows)
        return replace(
            planner, workload_cache=dict(self.known), timings=timings, machine_state=site
        )


@dataclass
class Arm:
    """One configuration in a process of its own."""

    name: str
    process: Any
    ends: Connection
    chosen: str  # by the plan
    planned: float  # seconds of a step
    learnt: Learnt
    cpu: list[float] = field(default_factory=list)  # seconds of each counted step
    wall: list[float] = field(default_factory=list)

    def turn(self, count: int) -> None:
        self.ends.send(count)
        cpu, wall = self.ends.recv()
        self.cpu += cpu
        self.wall += wall

    def end(self) -> None:
        self.ends.send(0)
        self.process.join()


def configurations(count: int) -> Iterator[dict[str, Any]]:
    """Yield so many of the grid, spread over it."""
    whole = [dict(zip(GRID, values, strict=True)) for values in itertools.product(*GRID.values())]
    assert math.gcd(STRIDE, len(whole)) == 1, "some of the grid would never come"
    yield from (whole[index * STRIDE % len(whole)] for index in range(min(count, len(whole))))


def compared(model: str, base: dict[str, Any], asked: argparse.Namespace) -> dict[str, Any]:
    """Time `auto` and the best arms of the grid on one model."""
    auto = opened("auto", model, base, Learnt())
    if auto is None:
        raise SystemExit(f"{base} holds no step at all")
    finalists, told = chosen_of_grid(auto, model, base, asked)
    again = opened("auto again", model, base, auto.learnt)
    assert again is not None, "it fitted before"
    arms = [auto, again, *finalists]
    for arm in arms:
        arm.cpu = []
        arm.wall = []  # because who is a finalist is known by the turns before
    for number in range(asked.rounds):
        for arm in in_turn(arms, number):
            arm.turn(asked.steps)
    best = min(finalists, key=lambda arm: statistics.median(arm.cpu), default=again)
    tokens = base["max_length"] * base["batch_size"]
    told |= {"counted steps of each": len(auto.cpu)}
    for arm, who in ((auto, "auto"), (again, "again"), (best, "best")):
        told |= {who: f"{arm.name}: {arm.chosen}", f"{who} planned s": arm.planned}
        told |= {f"{who} CPU s/step": quartiles(arm.cpu), f"{who} s/step": quartiles(arm.wall)}
        told |= {f"{who} CPU ms/token": 1000 * statistics.median(arm.cpu) / tokens}
    for arm, who in ((best, "best"), (again, "again")):
        told[f"{who} / auto, CPU"] = statistics.median(arm.cpu) / statistics.median(auto.cpu)
        told[f"{who} / auto, wall"] = statistics.median(arm.wall) / statistics.median(auto.wall)
    for arm in arms:
        arm.end()
    return told


def chosen_of_grid(
    auto: Arm, model: str, base: dict[str, Any], asked: argparse.Namespace
) -> tuple[list[Arm], dict[str, Any]]:
    """Let every arm of the grid take a turn; return the best of them, the others ended, and what
    there is to tell.
    """
    arms: list[Arm] = []
    grid = list(configurations(asked.arms))
    refused = 0
    learnt = auto.learnt
    seen = {auto.chosen: "auto"}
    for number, settings in enumerate(grid):
        name = " ".join(f"{key}={value}" for key, value in settings.items())
        if (arm := opened(name, model, base | settings, learnt)) is None:
            refused += 1
            continue
        learnt = arm.learnt
        if (other := seen.setdefault(arm.chosen, name)) != name:
            print(f"{number + 1:3} {name}  as {other}", flush=True)
            arm.end()
            continue
        arm.turn(asked.steps)
        arms = sorted([*arms, arm], key=lambda one: statistics.median(one.cpu))
        for one in arms[asked.finalists :]:
            one.end()
        del arms[asked.finalists :]
        taken = statistics.median(arm.cpu)
        print(
            (
                f"{number + 1:3} {taken:7.3f} CPU s  {arm.planned:7.3f} s planned  {name}  "
                f"{arm.chosen}"
            ),
            flush=True,
        )
    counts = {"arms": len(grid) - refused, "refused": refused, "unlike": len(seen)}
    return arms, {"limit": base["device_memory"], **counts}


def in_turn(arms: Sequence[Any], number: int) -> list[Any]:
    """Return the arms in the order of a round: each goes first in one of as many rounds, every
    other time backwards.
    """
    start = number % len(arms)
    order = [*arms[start:], *arms[:start]]
    return order if number % 2 == 0 else [order[0], *order[:0:-1]]


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Return the median, and the quartiles beside it."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"low": round(low, 4), "median": round(middle, 4), "high": round(high, 4)}


def opened(name: str, model: str, settings: dict[str, Any], learnt: Learnt) -> Arm | None:
    """Open one arm in a process of its own; None: it does not fit."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=steps, args=(theirs, model, settings, learnt)
    )
    process.start()
    theirs.close()
    told = ours.recv()
    if told is None:
        process.join()
        return None
    return Arm(name, process, ours, *told)


def steps(ends: Connection, model: str, settings: dict[str, Any], learnt: Learnt) -> None:
    """Take a turn whenever so many steps are asked for, until none are."""
    lema.train.opened.memory.opened_planner = lambda *given: learnt.given(opened_planner(*given))
    config = LemaConfig(model, device="cpu", save_steps=0, **settings)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 4096, (config.batch_size, config.max_length or 1), generator=draw)
    batch: dict[str, Tensor] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with closing(LemaModel(config)) as open_model:
        open_model.initialize_lora()
        try:
            allocation = open_model.allocation
            planner = timed(open_model.planner)
        except MemoryLimitError:
            ends.send(None)
            return
        rows = planner.shape.micro_batch.rows
        chunk = planner.config.loss_chunk_tokens or CHUNK_TOKENS
        chunk = min(chunk, rows * planner.shape.micro_batch.length)
        chosen = (
            f"{rows} rows, {chunk} tokens a chunk, {allocation.slots} slots, {allocation.summary()}"
        )
        found = Learnt(
            planner.workload_cache, planner.timings, rows, planner.machine_state.machine.speeds
        )
        ends.send((chosen, planner.needs().seconds, found))
        trainer = open_model.get_trainer()
        while count := ends.recv():
            ends.send(turn(lambda: trainer.train_step(batch), count))
    os._exit(0)  # because a fork should not end what its parent began


def turn(step: Callable[[], object], count: int) -> tuple[list[float], list[float]]:
    """Take one step that is not counted and then `count` that are, without a pause; return their
    seconds of processor time, and those that passed."""
    step()
    marks = [(cpu_seconds(), time.perf_counter())]
    for _ in range(count):
        step()
        marks.append((cpu_seconds(), time.perf_counter()))
    cpu, wall = (
        [b - a for a, b in itertools.pairwise(series)] for series in zip(*marks, strict=True)
    )
    return cpu, wall


if __name__ == "__main__":
    main()
