"""What the plan tells of large mixtures of experts as they are published: memory by part, and
tokens per second.

    python benchmarks/moe_plan.py                      # all of them, some minutes each
    python benchmarks/moe_plan.py DeepSeek-V3:16 --tokens 16384

Nothing is measured, and neither a GPU nor weights are needed: names, shapes and types of tensors
are the published ones, and speeds those of a profile. Each model has two rows: with host memory
that holds all of it, and with a part of that and a disk. Adapters are on every linear of the
layers, experts excepted. Where nothing fits, the row has what the smallest groups take, by part.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers.utils import logging

from lema.config import LemaConfig
from lema.errors import MemoryLimitError
from lema.plan.blueprint import draw_up
from lema.plan.cost import Speeds
from lema.plan.groups import expert_summary
from lema.plan.machine import PROFILES, Machine
from lema.plan.planner import planner_of
from lema_tools.models.checkpoints import named
from lema_tools.models.published import write_hollow

GB = 10**9
MODELS = (
    "DeepSeek-V3:16",
    "DeepSeek-V3:24",
    "Kimi-K2-Thinking:24",
    "GLM-5.2:24",
    "Qwen3-235B-A22B:24",
)
FORMS = {"GLM-5.2": "fp8 in blocks"}  # of its second repository
DISK = 7e9
HOST = 64  # bytes per second, and GB of host memory beside it
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "lora_rank": 16,
    "lora_target_parameters": [],
    "micro_batch_size": 1,
    "loss_chunk_tokens": 256,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models",
        nargs="*",
        default=MODELS,
        help="names of checkpoints, each with GB of device memory",
    )
    parser.add_argument("--tokens", type=int, default=16384, help="of a step")
    parser.add_argument(
        "--length", type=int, default=1024, help="tokens of a row, one of which is computed at once"
    )
    parser.add_argument("--prefetch-depth", type=int, default=1, help="slots beside the one in use")
    parser.add_argument(
        "--profile", choices=sorted(PROFILES), default="4090", help="whose speeds the plan has"
    )
    parser.add_argument("--json", type=Path, help="a file to write the rows to, too")
    given = parser.parse_args()
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    print(
        f"{given.tokens:,} tokens a step, rows of {given.length:,}, speeds of "
        f"{given.profile}: predictions"
    )
    print(
        "| model | device | weights in | experts together | tokens/s | limited by | peak | of it |"
    )
    print("|---|---|---|---|---|---|---|---|")
    found = list[dict[str, Any]]()
    for model in given.models:
        name, _, memory = model.partition(":")
        shape = {"batch_size": given.tokens // given.length, "max_length": given.length}
        settings = {**SETTINGS, **shape, "prefetch_depth": given.prefetch_depth}
        for row in planned(name, int(memory), settings, PROFILES[given.profile]):
            found.append(row)
            print(f"| {' | '.join(_cells(row))} |", flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


def planned(
    name: str, memory: int, settings: dict[str, Any], machine: Machine
) -> Iterator[dict[str, Any]]:
    """Yield what is planned of a model on a device of so many GB, with its weights in host
    memory and on a disk.
    """
    checkpoint = named(name)
    if checkpoint is None:
        raise SystemExit(f"{name} is no checkpoint that is known here: `lema models` lists those")
    settings = {**settings, "device_memory": memory * GB}
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = replace(checkpoint, form=FORMS.get(name, checkpoint.form))
        model = write_hollow(checkpoint, Path(scratch))
        blueprint = draw_up(LemaConfig(str(model), **settings))
        known = dict[Any, Any]()
        enough = blueprint.stored_bytes + HOST * GB
        for place, host in (("host memory", enough), ("a disk", HOST * GB)):
            of_place = {
                "host_memory": host,
                "strategy": "resident" if place == "host memory" else "streaming",
            }
            config = LemaConfig(str(model), **settings, **of_place)
            there = replace(
                machine,
                device_memory=memory * GB,
                host_memory=host,
                speeds=Speeds(DISK, machine.speeds.link),
            )
            planner = planner_of(config, there, blueprint=blueprint, workload_cache=known)
            blueprint = (
                blueprint
                if planner.blueprint.pieces
                else replace(planner.blueprint, parts=None, experts=0)
            )
            row: dict[str, Any] = {
                "model": name,
                "form": checkpoint.form,
                "device_gb": memory,
                "weights": place,
            }
            told = expert_summary(planner)
            row["experts"], row["reached"] = (
                planner.blueprint.experts,
                None if told is None else told.reached,
            )
            row["parts"] = None if told is None else told.parts
            try:
                needs = planner.needs()
            except MemoryLimitError as error:
                needs = planner.unlimited().needs()
                yield {
                    **row,
                    "refused": error.where,
                    "device": needs.device,
                    "host": sum(needs.host.values()),
                }
                continue
            step = planner.simulated(needs.demand, needs.allocation)
            speed = {
                "seconds": step.seconds,
                "compute": step.compute,
                "link": step.link,
                "disk": step.disk,
            }
            row |= {
                "device": needs.device,
                "host": sum(needs.host.values()),
                **speed,
                "limited": step.bottleneck,
            }
            yield row | {
                "tokens_per_second": planner.shape.tokens / step.seconds,
                "boundaries": needs.allocation.boundaries,
            }


def _cells(row: dict[str, Any]) -> Iterator[str]:
    yield from (
        f"{row['model']}, {row['form']}",
        f"{row['device_gb']} GB",
        row["weights"],
        str(row["experts"] or "all"),
    )
    if refused := row.get("refused"):
        yield from ("does not fit", refused)
    else:
        yield from (f"{row['tokens_per_second']:,.0f}", row["limited"])
    parts = sorted(row["device"].items(), key=lambda part: -part[1])
    yield f"{sum(row['device'].values()) / 1e9:.1f} GB"
    yield ", ".join(f"{part} {size / 1e9:.1f}" for part, size in parts if size > 0.05 * GB)


if __name__ == "__main__":
    main()
