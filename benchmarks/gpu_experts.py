"""LEMA's speed on large mixtures of experts, whose weights stay in page-locked host memory, under a
cap of the device.

    python benchmarks/gpu_experts.py gpt-oss-120b:16 --cap 24 --out experts.jsonl
    python benchmarks/gpu_experts.py Qwen3-30B-A3B:8 Qwen3-30B-A3B:1 --cap 24
    python benchmarks/gpu_experts.py gpt-oss-120b:2 --device cpu --tiny      # to see that everything runs

A row is a checkpoint and its micro-batches of one row each. Names, shapes and types are the
published ones; layers are the bytes of the first under many names (gpu_repeated.py), in host memory
too, which each row says. So a shape of 60 GB is opened in seconds and needs little host memory;
every layer crosses the link as its own bytes would. Adapters are on every linear of the layers,
experts excepted.

A row is a line of JSON as soon as it is measured: tokens per second beside what the plan says,
memory beside what it says, bytes moved. What fails or does not fit is a line with the reason, and
the next row is measured.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

# the rest is imported once nothing is missing
from gpu_software import (
    untested_versions,
    what_is_missing,
)

# One that can grow what it has reserved, as in gpu_process.py: else fragments decide what fits
# under a cap.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
# before what takes long to import, so that --seconds is the time of everything
BEGAN = time.monotonic()
GB = 10**9
SHARED_MEMORY = Path("/dev/shm")
ROOM = 6 * GB  # for one layer and what is outside the layers; more than any of these has


def main() -> None:
    options = _options()
    if missing := what_is_missing(options.device):
        raise SystemExit("\n".join(missing))
    for line in untested_versions():
        print(line, file=sys.stderr)
    from gpu_lines import Lines

    # so that what was written is cleared away
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    lines = Lines(options.out)
    until = BEGAN + options.seconds
    failed = False
    with tempfile.TemporaryDirectory(
        prefix="lema-gpu-", dir=_directory(options.directory)
    ) as scratch:
        for row in options.rows:
            name, _, count = row.partition(":")
            about = {
                "model": name,
                "micro_batches": int(count or 1),
                "tokens": options.tokens,
                "cap_gb": options.cap,
            }
            if time.monotonic() > until:
                lines.write(status="not reached", **about)
                continue
            try:
                measured = _row(name, int(count or 1), options, Path(scratch), until)
            except Exception as error:  # noqa: BLE001 - it is the row
                measured = {"status": "failed", "why": f"{type(error).__name__}: {error}"[:1000]}
                traceback.print_exc()
                failed = True
            lines.write(**about, **measured)
            gc.collect()
    if failed:
        raise SystemExit(1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="+", metavar="MODEL:MICRO-BATCHES")
    parser.add_argument("--device", default="cuda", help="LEMA's name for it")
    parser.add_argument(
        "--cap",
        type=float,
        default=24,
        help="of device memory, in GB, which the allocator enforces",
    )
    parser.add_argument(
        "--tokens", type=int, help="of a micro-batch; 1024, or 32 of the tiny models"
    )
    parser.add_argument("--rounds", type=int, default=3, help="steps of a row, at most")
    parser.add_argument(
        "--seconds", type=float, default=150, help="for everything; a step that has begun ends"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="small models, and no cap, to see that everything runs"
    )
    parser.add_argument(
        "--directory", type=Path, help="where the first layer goes; shared memory, if it has room"
    )
    parser.add_argument("--out", type=Path, help="a file for the lines")
    options = parser.parse_args()
    options.tokens = options.tokens or (32 if options.tiny else 1024)
    return options


def _directory(said: Path | None) -> Path | None:
    """Return where to write: what the caller says, or shared memory; None: the disk."""
    if said is not None:
        return said
    return (
        SHARED_MEMORY
        if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > ROOM
        else None
    )


def _row(
    name: str, count: int, options: argparse.Namespace, scratch: Path, until: float
) -> dict[str, Any]:
    """Measure one row."""
    from gpu_arms import Job
    from gpu_child import Arm
    from gpu_device import Device

    device = Device(options.device)
    model = _written(name, scratch, tiny=options.tiny)
    began = time.perf_counter()
    job = Job(
        arm="lema",
        model=str(model["directory"]),
        shape=model["shape"],
        device=options.device,
        cap=None if options.tiny else int(options.cap * GB),
        tokens=options.tokens,
        rank=16,
        scratch=str(scratch),
        repeated=True,
        # Host memory is limited to what the whole checkpoint would take, which one layer stands
        # for.
        changes={"lora_target_parameters": [], "host_memory": int(1.3 * model["bytes"]) + 8 * GB},
    )
    arm = Arm(job, device)
    try:
        about = arm.prepare(count, job.cap)
        if refused := about.get("refused"):
            return {"status": "does not fit", "why": refused}
        opened = time.perf_counter() - began
        steps = [arm.step()]
        while len(steps) < options.rounds and time.monotonic() + steps[-1]["seconds"] < until:
            steps.append(arm.step())
    finally:
        arm.close()
    seconds = statistics.median(step["seconds"] for step in steps)
    tokens = count * options.tokens
    planned = about.pop("planned")
    allocated = max(step["allocated"] for step in steps)
    predicted = about["predicted_seconds"]
    last = steps[-1]
    return {
        "status": "measured",
        "real": device.accelerated and not options.tiny,
        "device": device.name,
        "capped": arm.capped,
        "tokens_per_second": tokens / seconds,
        "seconds": seconds,
        "all_seconds": [step["seconds"] for step in steps],
        "losses": [step["loss"] for step in steps],
        "layers": model["layers"],
        "layers_are": "the bytes of the first, under the names of all",
        "bytes": model["bytes"],
        "open_seconds": opened,
        "write_seconds": model["seconds"],
        "planned_bytes": sum(planned.values()),
        "planned": planned,
        "allocated": allocated,
        "off": allocated / sum(planned.values()) - 1,
        "seconds_off": None if predicted is None else seconds / predicted - 1,
        "reserved": max(step["reserved"] for step in steps),
        **{
            name: last[name]
            for name in ("bytes_uploaded", "bytes_read", "refused", "host")
            if name in last
        },
        **about,
    }


def _written(name: str, scratch: Path, *, tiny: bool) -> dict[str, Any]:
    """Return a model's directory and what is known of it; it is written once."""
    from common import Shape
    from gpu_repeated import write_repeated
    from transformers import AutoConfig

    from lema.storage import GlobalBinaryIndex
    from lema_tools.models.checkpoints import named

    checkpoint = named(name)
    if checkpoint is None:
        raise SystemExit(f"{name} is no checkpoint that is known here: `lema models` lists those")
    directory = scratch / checkpoint.name
    began = time.perf_counter()
    if not directory.exists():
        sizes = {**(checkpoint.sizes or {}), **(_small(checkpoint.model_type) if tiny else {})}
        write_repeated(replace(checkpoint, sizes=sizes), directory)
    config = AutoConfig.from_pretrained(directory)
    return {
        "directory": directory,
        "bytes": GlobalBinaryIndex(directory).nbytes,
        "seconds": time.perf_counter() - began,
        "layers": config.num_hidden_layers,
        "shape": Shape(
            config.hidden_size,
            config.intermediate_size,
            config.num_hidden_layers,
            config.vocab_size,
        ),
    }


def _small(model_type: str) -> dict[str, Any]:
    """Return the sizes of a small model of a type."""
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "layer_types": None,
    }
    return sizes | ({"num_local_experts": 8} if model_type == "gpt_oss" else {"num_experts": 8})


if __name__ == "__main__":
    main()
