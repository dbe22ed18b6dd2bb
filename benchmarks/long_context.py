"""A step on one long row, whole and in chunks of its sequence: the time, how often layers are
leased, and the most memory that the process takes; or, with `--device-side`, the most bytes of
tensors that would be on a device with memory of its own, beside weights.

    OMP_NUM_THREADS=2 python benchmarks/long_context.py --lengths 4096 16384 --chunk 1024
    OMP_NUM_THREADS=2 python benchmarks/long_context.py --lengths 4096 16384 --device-side
    OMP_NUM_THREADS=2 python benchmarks/long_context.py --lengths 65536 --device-side --first-keys

Every arm is a process of its own, and arms take turns. Weights are random, fp32. The device is the
CPU, so inputs of layers that wait in host memory count in the memory of the process as well.

Attention to 65,536 tokens takes hours of a core. `--first-keys` computes chunks' attention over the
first block of keys alone: the numbers are then wrong, and the tensors have the same sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from common import PeakAnonymous, Shape, report, write_model
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lema import LemaConfig, LemaModel
from lema.model.sequence import attention
from lema.plan.work.meter import Tally

SHAPE = Shape(1024, 2816, 8, 512, heads=16, kv_heads=4, dtype="float32")
TINY = Shape(64, 128, 4, 512, heads=4, kv_heads=2, dtype="float32")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384], help="of the row")
    parser.add_argument("--chunk", type=int, default=1024, help="tokens of a chunk")
    parser.add_argument("--whole-up-to", type=int, default=16384, help="the longest row at once")
    parser.add_argument("--rounds", type=int, default=1, help="of every arm")
    parser.add_argument("--layers", type=int, help="how many there are; 8 unless said otherwise")
    parser.add_argument("--device-side", action="store_true", help="measure tensors, and no time")
    parser.add_argument("--first-keys", action="store_true", help="with --device-side alone")
    parser.add_argument("--tiny", action="store_true", help="a small model, to see that it runs")
    parser.add_argument("--child", nargs=3, metavar=("MODEL", "LENGTH", "CHUNK"), help="")
    arguments = parser.parse_args()
    shape = TINY if arguments.tiny else SHAPE
    if arguments.layers:
        shape = replace(shape, layers=arguments.layers)
    if arguments.first_keys and not arguments.device_side:
        parser.error("--first-keys computes wrong numbers in less time: it needs --device-side")
    if arguments.child:
        model, length, chunk = arguments.child
        measure = device_side if arguments.device_side else measured
        if arguments.first_keys:
            attend_to_first_keys()
        print(json.dumps(measure(Path(model), shape, int(length), int(chunk))))
        return
    rows = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name), shape)
        config = Path(name) / "config.json"
        longest = {"max_position_embeddings": max(arguments.lengths)}
        config.write_text(json.dumps({**json.loads(config.read_text()), **longest}))
        for _ in range(arguments.rounds):
            for length in arguments.lengths:
                chunks = (
                    (0, arguments.chunk) if length <= arguments.whole_up_to else (arguments.chunk,)
                )
                for chunk in chunks:
                    command = [sys.executable, __file__, "--child", name, str(length), str(chunk)]
                    command += ["--tiny"] * arguments.tiny
                    command += ["--device-side"] * arguments.device_side
                    command += ["--first-keys"] * arguments.first_keys
                    if arguments.layers:
                        command += ["--layers", str(arguments.layers)]
                    rows.append(json.loads(subprocess.check_output(command).splitlines()[-1]))
                    print(json.dumps(rows[-1]), flush=True)
    if not arguments.tiny:
        report("long_context", rows, shape)


def attend_to_first_keys() -> None:
    """Compute attention of chunks over the first block of keys alone."""
    all_blocks = attention._Tiles.blocks

    def first_block(*arguments: Any) -> Iterator[Any]:
        return islice(all_blocks(*arguments), 1)

    vars(attention)["_Tiles"].blocks = first_block


def config_of(directory: Path, length: int, chunk: int) -> LemaConfig:
    return LemaConfig(
        str(directory),
        device="cpu",
        strategy="streaming",
        max_length=length,
        gradient_checkpointing=True,
        sequence_chunk=chunk or None,
        boundary_activations="host",
        loss_chunk_tokens=1024,
        lora_rank=16,
        lora_target_modules="all-linear",
    )


def row_of(shape: Shape, length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, shape.vocabulary, (1, length), generator=generator)
    return {"input_ids": ids, "labels": ids}


def device_side(directory: Path, shape: Shape, length: int, chunk: int) -> dict[str, Any]:
    """Take a step on a row, after one on a short row, and measure tensors; `chunk` 0: at once."""
    batch = row_of(shape, length)
    tally = Tally(only_memory=True)
    with closing(LemaModel(config_of(directory, length, chunk))) as model:
        model.initialize_lora()
        model.skeleton.train()
        model.adapter.loss([row_of(shape, 2 * chunk or 512)]).backward()
        streamed = model.adapter
        allocate = streamed.backend.host_buffer

        def host_buffer(nbytes: int) -> Tensor:
            with _disable_current_modes():
                memory = allocate(nbytes)
            tally.leave_out([memory])
            return memory

        vars(streamed.backend)["host_buffer"] = host_buffer
        streamed.activations.arena.close()  # made again, with buffers that are left out
        with tally:
            tally.leave_out([*model.skeleton.parameters(), *model.skeleton.buffers()])
            tally.leave_out([parameter.grad for parameter in model.get_trainable_parameters()])
            tally.leave_out(batch.values())
            tally.leave_out([buffer.memory for buffer in model.memory._ring.buffers])
            model.adapter.loss([batch]).backward()
    return {"tokens": length, "chunk": chunk or None, "device_bytes": tally.peak}


def measured(directory: Path, shape: Shape, length: int, chunk: int) -> dict[str, Any]:
    """Take a step on a row, after one on a short row, and measure it; `chunk` 0: at once."""
    batch = row_of(shape, length)
    with closing(LemaModel(config_of(directory, length, chunk))) as model:
        model.initialize_lora()
        model.skeleton.train()
        model.adapter.loss([row_of(shape, 2 * chunk or 512)]).backward()
        for parameter in model.get_trainable_parameters():
            parameter.grad = None
        before = model.memory.counters.leases
        began = time.monotonic()
        user_began = os.times().user
        with PeakAnonymous() as memory:
            loss = model.adapter.loss([batch])
            loss.backward()
        seconds = time.monotonic() - began
        user_seconds = os.times().user - user_began
        leases = model.memory.counters.leases - before
    return {
        "tokens": length,
        "chunk": chunk or None,
        "peak_bytes": memory.peak,
        "leases": leases,  # of layers; the top one is leased once
        "seconds": round(seconds, 2),
        # of processors, which others at work do not lengthen as much
        "user_seconds": round(user_seconds, 2),
        "loss": float(loss.detach()),
    }


if __name__ == "__main__":
    main()
