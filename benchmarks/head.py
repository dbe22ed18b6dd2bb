"""A model in the shape of Llama 3 8B trains in a small memory cgroup, its head leased in pieces,
and the plan says so.

    OMP_NUM_THREADS=2 python benchmarks/head.py --directory DIR        # 16 GB of disk, which it deletes

Weights are random, bf16. One child plans; another trains a few steps inside a memory cgroup of
`--limit`, the whole process included (interpreter, torch, page cache). malloc gives freed memory
back (RETURNING, as in memory.py).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from common import PeakAnonymous, Shape, memory_kinds, report
from gpu_model import MODELS, TINY, Place, write_random
from limits_group import memory_group
from memory import RETURNING

ROWS = 1024  # that are cast at a time


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=float, default=3.0e9, help="bytes of the cgroup; 0: none")
    parser.add_argument("--rows", type=int, default=2, help="of a step, each a micro-batch")
    parser.add_argument("--tokens", type=int, default=128, help="of a row")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--head", default="stream", choices=["stream", "device"])
    parser.add_argument(
        "--tiny", action="store_true", help="a small model without a limit, to see that it runs"
    )
    parser.add_argument("--layers", type=int, help="fewer than the 32 of the model")
    parser.add_argument(
        "--directory", type=Path, help="where to write the model (a disk, not memory)"
    )
    parser.add_argument(
        "--fp32-products", action="store_true", help="for processors without bf16: see `_products`"
    )
    parser.add_argument("--model", type=Path, help="a model of this shape that is there already")
    parser.add_argument("--child", nargs=2, metavar=("WHAT", "MODEL"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        what, model = arguments.child
        print(json.dumps((_plan if what == "plan" else _train)(arguments, model)))
        return
    whole = _shape(arguments)
    shape = Shape(**{**vars(whole), "layers": arguments.layers or whole.layers})
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        model = arguments.model or Path(name) / "model"
        if arguments.model is None:
            write_random(model, shape, [Place(Path(name), 2 * shape.weight_bytes)], threads=2)
        row = _child("plan", model)
        with ExitStack() as stack:
            group = stack.enter_context(
                memory_group(None if arguments.tiny else int(arguments.limit) or None)
            )
            row |= _child("train", model, group.join)
            row["cgroup"] = group.counters()
    row["off"] = row["planned_peak"] / row["peak_anonymous"] - 1
    print(json.dumps(row, indent=1))
    if not arguments.tiny:
        report("head", [row], shape)


def _shape(arguments: argparse.Namespace) -> Shape:
    return (TINY if arguments.tiny else MODELS)["8B"]


def _child(what: str, model: Path, join: Callable[[], None] | None = None) -> dict[str, Any]:
    command = [sys.executable, __file__, *sys.argv[1:], "--child", what, str(model)]
    env = {**os.environ, **RETURNING}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, preexec_fn=join, env=env
    )
    if done.returncode:
        raise SystemExit(f"the child ended with {done.returncode}\n{done.stderr[-2000:]}")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def _settings(arguments: argparse.Namespace, model: str) -> Any:
    from lema import LemaConfig

    return LemaConfig(
        model,
        device="cpu",
        gradient_checkpointing=True,
        save_steps=0,
        batch_size=arguments.rows,
        micro_batch_size=1,
        max_length=arguments.tokens,
        head=arguments.head,
    )


def _plan(arguments: argparse.Namespace, model: str) -> dict[str, Any]:
    """Plan without measuring speeds, which takes longer than a step where the processor has no
    bf16.
    """
    from lema.plan.measure import process_bytes
    from lema.plan.planner import machine_state_of, planner_of

    config = _settings(arguments, model)
    planner = planner_of(config, machine_state=machine_state_of(config))
    needs = planner.needs()
    process = process_bytes()
    parts = {
        **{f"host: {name}": size for name, size in needs.host.items() if name != "ring"},
        **needs.device,
    }
    return {
        "planned_peak": process + sum(parts.values()),
        "process": process,
        "parts": {name: size for name, size in parts.items() if size},
        "notes": planner.blueprint.notes,
    }


@contextmanager
def _products() -> Iterator[None]:
    """Form bf16 products from fp32 ones, some rows of the right-hand side at a time: on a processor
    without bf16 torch's own take a hundred times as long. Sums are in fp32 in both."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten

    class Products(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is not aten.mm.default or args[0].dtype != torch.bfloat16:
                return func(*args, **(kwargs or {}))
            left, right = args
            made = left.new_empty(left.shape[0], right.shape[1])
            if right.stride(0) == 1:  # the rows of a weight are the columns of the product
                for first in range(0, right.shape[1], ROWS):
                    made[:, first : first + ROWS] = (
                        left.float() @ right[:, first : first + ROWS].float()
                    )
                return made
            total = torch.zeros(made.shape)
            for first in range(0, right.shape[0], ROWS):
                total.addmm_(
                    left[:, first : first + ROWS].float(), right[first : first + ROWS].float()
                )
            return made.copy_(total)

    with Products():
        yield


def _train(arguments: argparse.Namespace, model: str) -> dict[str, Any]:
    import torch

    from lema import LemaModel
    from lema.engine.head.loss import split_batch

    before = memory_kinds()["anonymous"]
    with PeakAnonymous() as sampled, _products() if arguments.fp32_products else nullcontext():
        opened = LemaModel(_settings(arguments, model))
        opened.initialize_lora()
        trainer = opened.get_trainer()
        ids = torch.randint(0, _shape(arguments).vocabulary, (arguments.rows, arguments.tokens))
        micro_batches = split_batch({"input_ids": ids, "labels": ids}, 1)
        losses = []
        seconds = []
        for _ in range(arguments.steps):
            began = time.perf_counter()
            losses.append(trainer.accumulate(micro_batches).loss)
            seconds.append(time.perf_counter() - began)
            print(json.dumps({"seconds": seconds[-1], "peak": sampled.peak}), flush=True)
    counters = opened.memory.counters
    opened.close()
    return {
        "anonymous_before_model": before,
        "peak_anonymous": sampled.peak,
        "bytes_read": counters.bytes_read,
        "losses": losses,
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
