"""One arm that trains a model and does a step when its standard input says so: what
benchmarks/limits.py limits.

    python benchmarks/limits_child.py lema MODEL

It prints one line of JSON when it is ready, and one for each line it reads: that step's seconds,
CPU seconds, bytes read from the disk, and its memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from plainloop import ALPHA, RANK, RATE, adamw, peft_model, plain_step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("arm", choices=sorted(ARMS))
    parser.add_argument("model", type=Path)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=128, help="per micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--prefetch-depth", type=int, default=2)
    arguments = parser.parse_args()
    lines = os.fdopen(os.dup(sys.stdout.fileno()), "w")  # what libraries print goes to stderr
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    torch.manual_seed(7)
    ids = torch.randint(0, arguments.vocabulary, (arguments.micro_batches, arguments.tokens))
    step = ARMS[arguments.arm](arguments, ids)
    print(
        json.dumps({"anonymous": _status("RssAnon"), "file": _status("RssFile")}),
        file=lines,
        flush=True,
    )
    for _ in sys.stdin:
        print(json.dumps(_measured(step)), file=lines, flush=True)


def _measured(step: Callable[[], float]) -> dict[str, Any]:
    began = time.perf_counter()
    cpu = _cpu_seconds()
    read = _bytes_read()
    faults = _faults()
    loss = step()
    return {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": _cpu_seconds() - cpu,
        "bytes_read": _bytes_read() - read,
        "major_faults": _faults() - faults,
        "anonymous": _status("RssAnon"),
        "file": _status("RssFile"),
        "loss": loss,
    }


def _lema(arguments: argparse.Namespace, ids: torch.Tensor) -> Callable[[], float]:
    from lema import LemaConfig, LemaModel
    from lema.engine.head.loss import split_batch

    config = LemaConfig(
        str(arguments.model),
        device="cpu",
        lora_rank=RANK,
        lora_alpha=ALPHA,
        learning_rate=RATE,
        gradient_checkpointing=True,
        micro_batch_size=1,
        prefetch_depth=arguments.prefetch_depth,
        save_steps=0,
    )
    model = LemaModel(config)
    model.initialize_lora()
    trainer = model.get_trainer()
    micro_batches = split_batch({"input_ids": ids, "labels": ids}, 1)
    return lambda: trainer.accumulate(micro_batches).loss


def _peft(arguments: argparse.Namespace, ids: torch.Tensor) -> Callable[[], float]:
    model = peft_model(arguments.model)
    return plain_step(model, ids, model.dtype, adamw(model))


ARMS = {"lema": _lema, "peft": _peft}


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def _bytes_read() -> int:
    return _field(Path("/proc/self/io"), "read_bytes")


def _status(name: str) -> int:
    return _field(Path("/proc/self/status"), name) * 1024


def _field(file: Path, name: str) -> int:
    """Return the number after `name:` in one of the kernel's lists."""
    for line in file.read_text().splitlines():
        found, _, value = line.partition(":")
        if found == name:
            return int(value.split()[0])
    raise LookupError(f"{file} has no {name}")


if __name__ == "__main__":
    main()
