"""What the plan tells of long rows: device memory by part, tokens per second, and how long a row
may become.

    python benchmarks/long_plan.py                      # all of them, some minutes
    python benchmarks/long_plan.py Qwen3-8B:262144:24:4090

Nothing is measured, and neither a GPU nor weights are needed: names, shapes and types of tensors
are the published ones, and speeds those of a profile. A step has one row. Adapters of rank 16 are
on every linear of the layers. Chunks are the largest with which the step fits.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers.utils import logging

from lema.config import LemaConfig
from lema.errors import MemoryLimitError
from lema.plan import make_plan
from lema.plan.machine import PROFILES
from lema_tools.models.checkpoints import named
from lema_tools.models.published import write_hollow

GB = 10**9
KB = 10**3
HOST = 256 * GB  # of host memory
CASES = (
    "Qwen3-8B:131072:12:4090",
    "Qwen3-8B:262144:24:4090",
    "Llama-3.1-8B-Instruct:131072:12:4090",
    "Llama-3.1-8B-Instruct:262144:24:4090",
    "Qwen3.6-27B:131072:24:4090",
    "Qwen3-8B:1048576:80:h100",
    "Llama-3.1-8B-Instruct:1048576:80:h100",
)
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "batch_size": 1,
    "lora_rank": 16,
    "lora_target_parameters": [],
    "sequence_chunk": "auto",
    "gradient_checkpointing": True,
}
PUBLISHED = 345  # tokens per second of one H100 at a million tokens, as TRL publishes them


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "cases",
        nargs="*",
        default=CASES,
        help="checkpoint, tokens of the row, GB of device memory and profile, joined by colons",
    )
    parser.add_argument("--json", type=Path, help="a file to write the rows to, too")
    options = parser.parse_args()
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    print("planned, not measured")
    print(
        "| model | tokens | device | fits | chunk | peak | of it | host, disk | attention | "
        "tokens/s | longest |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    planned_rows = list[dict[str, Any]]()
    for case in options.cases:
        name, length, memory, profile = case.split(":")
        row = planned(name, int(length), int(memory) * GB, profile)
        planned_rows.append(row)
        print(f"| {' | '.join(_cells(row))} |", flush=True)
    print(f"TRL publishes {PUBLISHED} tokens/s of each H100 for rows of a million tokens.")
    if options.json is not None:
        options.json.write_text(json.dumps(planned_rows, indent=1) + "\n")


def planned(name: str, length: int, memory: int, profile: str) -> dict[str, Any]:
    """Return what is planned of a model's step of one row.

    Args:
        name: of a checkpoint.
        length: tokens of the row.
        memory: bytes of the device.
        profile: whose speeds the plan has.
    """
    checkpoint = named(name)
    if checkpoint is None:
        raise SystemExit(f"{name} is no checkpoint that is known here: `lema models` lists those")
    row: dict[str, Any] = {"model": name, "length": length, "memory": memory, "profile": profile}
    machine = replace(PROFILES[profile], device_memory=memory, host_memory=HOST)
    with tempfile.TemporaryDirectory() as scratch:
        model = write_hollow(checkpoint, Path(scratch))
        limits = {"device_memory": memory, "max_length": length}
        config = LemaConfig(str(model), **SETTINGS, **limits)
        try:
            plan, _ = make_plan(config, machine)
        except MemoryLimitError as error:
            return {**row, "fits": False, "why": f"{error.what}; {error.how}"}
        long = plan.long_rows
    boundaries = plan.memory.host["boundaries"], plan.memory.disk["boundaries"]
    return {
        **row,
        "fits": plan.fits,
        "chunk": plan.micro_batch.chunk,
        "device": plan.memory.device,
        "host": sum(plan.memory.host.values()),
        "boundaries": boundaries,
        "seconds": plan.step.seconds,
        "tokens_per_second": plan.tokens_per_second,
        "attention": None if long is None else long.attention,
        "longest": None if long is None else long.longest,
        "reason": None if long is None else long.reason,
    }


def _cells(row: dict[str, Any]) -> list[str]:
    device = f"{row['memory'] / GB:.0f} GB, {row['profile']}"
    first = [row["model"], f"{row['length']:,}", device]
    if not row["fits"]:
        return [*first, "no", row.get("why", "more than the machine has"), *[""] * 6]
    parts = {**row["device"]}
    shown = {"layers that stay": parts.pop("residents")}
    shown |= {"of the row": sum(parts.pop(name) for name in ("working", "flight", "boundaries"))}
    shown |= {"slots, head, adapter": sum(parts.values())}
    host, disk = row["boundaries"]
    return [
        *first,
        "yes",
        f"{row['chunk'] or row['length']:,}",
        f"{sum(row['device'].values()) / GB:.1f} GB",
        ", ".join(f"{size / GB:.1f} {what}" for what, size in shown.items()),
        f"{host / GB:.0f} GB, {disk / GB:.0f} GB",
        "" if row["attention"] is None else f"{row['attention']:.0%}",
        f"{row['tokens_per_second']:,.0f}",
        "" if row["longest"] is None else f"{row['longest'] / KB:,.0f}k",
    ]


if __name__ == "__main__":
    main()
