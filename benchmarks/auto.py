"""What is left open against thirty configurations set by hand, under the same limit of device memory.

    OMP_NUM_THREADS=1 python benchmarks/auto.py
    OMP_NUM_THREADS=1 python benchmarks/auto.py --models dense --keep 30 30 30   # all of them several times

`auto` is `device_memory` alone, the rest chosen by the plan. The grid sets rows at once, recomputation, prefetch depth
and the chunk of the loss; those that do not fit are refused, and are told. Each configuration has a process of its own,
forked off once everything is imported, which takes a step that is not counted, and then one whenever it is its turn.
The grid is halved successively (Jamieson and Talwalkar 2016, arXiv:1502.07943): all take a turn, then the best that
`--keep` says take more, beside `auto`, which takes part in all rounds. In a round the arms' turns are interleaved, so
that what else the machine does falls on all alike. What one arm has measured of model and machine the others plan with,
so that they differ by their settings alone. Of arms that the plan has made alike one takes steps.

Arms are ranked by the least of their steps' processor time, user and system, of all threads: others that want the
processor only add to it, by what they take of its caches, and less than to the seconds that pass. Both are told.
`best / auto` is 1 or more where nothing set by hand was faster. The best is the best of several noisy numbers, and
`auto` one: the ratio is hard on it. `planned` is what the plan believed of a step, in seconds.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import peft
import torch
from common import Shape, cpu_seconds, report
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

import lema.train.model
from lema import LemaConfig, LemaModel
from lema.engine.head.loss import CHUNK_TOKENS
from lema.errors import MemoryLimitError
from lema.plan.planner import Planner, opened_planner, timed
from lema.train.trainer import LemaTrainer

SMALL = {"max_position_embeddings": 2048, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 4096}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 192, "head_dim": 24}


def small(kind: type[Any], hidden: int, inner: int, layers: int, **changes: Any) -> Any:
    """Return a config of these sizes."""
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return kind(**{**SMALL, **sizes, **changes})


# Config, rows of a step, their length, and a limit in bytes that does not hold all that would make a step faster.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--arms", type=int, default=30, help="configurations of the grid")
    parser.add_argument("--keep", type=int, nargs="+", default=[8, 5, 5, 5], help="arms of the second turn, and so on")
    parser.add_argument("--limit", type=int, help="bytes, in the place of each model's own")
    arguments = parser.parse_args()
    assert LemaTrainer is not None and peft is not None  # imported here, so that no fork has to
    found = []
    for name in arguments.models:
        config, rows, length, limit = MODELS[name]
        with tempfile.TemporaryDirectory() as place:
            AutoModelForCausalLM.from_config(config).save_pretrained(place)
            base = {"device_memory": arguments.limit or limit, "max_length": length, "batch_size": rows}
            found.append({"model": name, **compared(place, base, arguments.arms, arguments.keep)})
        for key, value in found[-1].items():
            print(f"{key:>20}: {value}", flush=True)
    report("auto", found, Shape(0, 0, 0, 0))


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
        site = replace(planner.site, machine=replace(planner.site.machine, speeds=self.speeds))
        timings = self.timings.times(planner.shape.micro_batch.rows / self.rows)
        return replace(planner, known=dict(self.known), timings=timings, site=site)


@dataclass
class Arm:
    """One configuration in a process of its own."""

    name: str
    process: Any
    ends: Connection
    chosen: str  # by the plan
    planned: float  # seconds of a step
    learnt: Learnt
    cpu: list[float] = field(default_factory=list)  # seconds of each step
    wall: list[float] = field(default_factory=list)

    @property
    def score(self) -> float:
        return min(self.cpu)

    def turn(self) -> None:
        self.ends.send("step")
        cpu, wall = self.ends.recv()
        self.cpu.append(cpu)
        self.wall.append(wall)

    def end(self) -> None:
        self.ends.send("end")
        self.process.join()


def configurations(count: int) -> Iterator[dict[str, Any]]:
    """Yield so many of the grid, spread over it."""
    whole = [dict(zip(GRID, values, strict=True)) for values in itertools.product(*GRID.values())]
    yield from (whole[index * len(whole) // count] for index in range(min(count, len(whole))))


def compared(model: str, base: dict[str, Any], count: int, keep: list[int]) -> dict[str, Any]:
    """Time all arms on one model."""
    auto = opened("auto", model, base, Learnt())
    if auto is None:
        raise SystemExit(f"{base} holds no step at all")
    arms: list[Arm] = []
    refused, learnt, seen = 0, auto.learnt, {auto.chosen: "auto"}
    for number, settings in enumerate(configurations(count)):
        name = " ".join(f"{key}={value}" for key, value in settings.items())
        if (arm := opened(name, model, base | settings, learnt)) is None:
            refused += 1
            continue
        learnt = arm.learnt
        if (other := seen.setdefault(arm.chosen, name)) != name:
            print(f"{number + 1:3} {name}  as {other}", flush=True)
            arm.end()
            continue
        arm.turn()
        arms = fewer([*arms, arm], max(keep, default=count))
        if number % max(1, count // 3) == 0:
            auto.turn()
        print(f"{number + 1:3} {arm.score:7.3f} CPU s  {arm.planned:7.3f} s planned  {name}  {arm.chosen}", flush=True)
    for left in keep:
        arms = fewer(arms, left)
        for one in (auto, *arms) if left % 2 else (*arms, auto):
            one.turn()
    tokens, best = base["max_length"] * base["batch_size"], min(arms, key=lambda arm: arm.score)
    told = {
        "limit": base["device_memory"],
        "arms": count - refused,
        "refused": refused,
        "unlike": len(seen),
        "turns": len(best.cpu),
    }
    for arm, who in ((auto, "auto"), (best, "best")):
        told[who] = f"{arm.name}: {arm.chosen}"
        told |= {f"{who} CPU ms/token": 1000 * arm.score / tokens, f"{who} s/step": min(arm.wall)}
        told |= {f"{who} planned s": arm.planned, f"{who} CPU s of steps": [round(one, 3) for one in arm.cpu]}
    told["best / auto, CPU"] = best.score / auto.score
    told["best / auto, wall"] = min(best.wall) / min(auto.wall)
    for arm in (auto, *arms):
        arm.end()
    return told


def fewer(arms: list[Arm], count: int) -> list[Arm]:
    """Return the best so many arms, and end the others."""
    ranked = sorted(arms, key=lambda arm: arm.score)
    for arm in ranked[count:]:
        arm.end()
    return ranked[:count]


def opened(name: str, model: str, settings: dict[str, Any], learnt: Learnt) -> Arm | None:
    """Open one arm in a process of its own; None: it does not fit."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=steps, args=(theirs, model, settings, learnt))
    process.start()
    theirs.close()
    told = ours.recv()
    if told is None:
        process.join()
        return None
    return Arm(name, process, ours, *told)


def steps(ends: Connection, model: str, settings: dict[str, Any], learnt: Learnt) -> None:
    """Take a step whenever it is asked for, after one that is not counted."""
    lema.train.model.opened_planner = lambda *given: learnt.given(opened_planner(*given))
    config = LemaConfig(model, device="cpu", save_steps=0, **settings)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 4096, (config.batch_size, config.max_length or 1), generator=draw)
    batch: dict[str, Tensor] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with closing(LemaModel(config)) as open_model:
        open_model.initialize_lora()
        try:
            allocation, planner = open_model.allocation, timed(open_model.planner)
        except MemoryLimitError:
            ends.send(None)
            return
        rows, chunk = planner.shape.micro_batch.rows, planner.config.loss_chunk_tokens or CHUNK_TOKENS
        chunk = min(chunk, rows * planner.shape.micro_batch.length)
        chosen = f"{rows} rows, {chunk} tokens a chunk, {allocation.slots} slots, {allocation.summary()}"
        found = Learnt(planner.known, planner.timings, rows, planner.site.machine.speeds)
        ends.send((chosen, planner.needs().seconds, found))
        trainer = open_model.get_trainer()
        for number in itertools.count():
            if ends.recv() != "step":
                break
            if not number:
                trainer.train_step(batch)
            cpu, began = cpu_seconds(), time.perf_counter()
            trainer.train_step(batch)
            ends.send((cpu_seconds() - cpu, time.perf_counter() - began))
    os._exit(0)  # because a fork should not end what its parent began


if __name__ == "__main__":
    main()
