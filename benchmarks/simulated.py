"""Steps in virtual time: models of 8B, 70B and 405B parameters on the machines that `lema plan`
knows by name.

    python benchmarks/simulated.py

`LayerStream` itself is driven, in the order of a training step, by a disk, a link and a device that
only keep time; the models are config and headers without weights. Tokens per step are multiples of
T*, from which on streaming can be hidden (`bytes per weight x FLOP/s / (3 x bytes/s)`, by the
slower of disk and link), in whole micro-batches; nothing stays on the device. Of interest is how
far a step is from the longest of computing, link and disk alone: the schedule costs what is above
1.

    python benchmarks/simulated.py --crossover

One model where computing takes as long as reading with the fewest buffers, or nearly: what the
solver spends the memory of some layers on, slots and layers that stay, against the best of all ways
to spend it that a simulation of each finds.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import RESULTS
from rich.console import Console
from rich.table import Table

from lema.config import LemaConfig
from lema.engine.head.loss import CHUNK_TOKENS
from lema.plan import Allocation, Machine
from lema.plan.allocate import DEPTHS
from lema.plan.blueprint import Blueprint, draw_up
from lema.plan.budget import solve, spread
from lema.plan.cost import Demand, LayerCost, Speeds
from lema.plan.machine import PROFILES
from lema.plan.planner import Planner, machine_state_of
from lema.plan.simulation.simulator import Simulated, simulate
from lema.plan.work.step import StepShape, by_arithmetic
from lema.plan.work.workload import MicroBatch, Workload, measure

MODELS = ["8B", "70B", "405B"]
TIMES = [0.5, 1.0, 1.5, 3.0]
LONG = 1024
SHORT = 64  # tokens of a micro-batch; short where T* is less than a long one
HIDDEN_FROM = 1.5
AT_MOST = 1.05
LAYERS = 16
LAYER_BYTES = 10**6  # of the model at the crossover; a byte is read in a microsecond
RATIOS = [0.5, 0.8, 1.0, 1.25]
HELD = [3, 4, 5, 6, 8, 10]  # computing by reading; layers that memory holds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--crossover", action="store_true", help="the solver where computing is as long as reading"
    )
    if parser.parse_args().crossover:
        _crossover()
        return
    sys.path.append(str(Path(__file__).parent.parent / "tests" / "support"))
    from hollowmodel import large_config, write_hollow

    rows = []
    with tempfile.TemporaryDirectory() as name:
        for model in MODELS:
            directory = write_hollow(Path(name) / model, large_config(model))
            rows += [{"model": model, **row} for row in _steps_of(directory)]
    _show(rows)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "simulated.json").write_text(
        json.dumps({"benchmark": "simulated", "rows": rows}, indent=1) + "\n"
    )


def _crossover() -> None:
    """Print what the solver does with the memory of a few layers, and the best that could be
    done with it.
    """
    table = Table(
        title=(
            f"{LAYERS} layers at the crossover: slots + layers that stay, and the step by its "
            "own limit"
        )
    )
    for column in ["computing / reading", *(f"{held} layers" for held in HELD)]:
        table.add_column(column, justify="right")
    rows = []
    for ratio in RATIOS:
        # of each of forward, recomputation, backward of a layer
        seconds = ratio * 2 * (LAYERS - 3) / (3 * LAYERS)
        size = LAYER_BYTES
        layer = LayerCost(
            size,
            size,
            size,
            saved_bytes=10**9,
            forward=seconds,
            recompute=seconds,
            backward=seconds,
        )
        demand = Demand((layer,) * LAYERS, shared=True)
        speeds = Speeds(LAYER_BYTES)
        cells = []
        for held in HELD:
            chosen = solve(demand, speeds, DEPTHS[0] + 1, device_limit=held * LAYER_BYTES)
            ways = [
                Allocation(slots, frozenset(spread(held - slots, LAYERS)))
                for slots in range(1, held + 1)
            ]
            found = simulate(demand, chosen, speeds)
            best = min(simulate(demand, one, speeds).seconds for one in ways)
            spent = chosen.slots, len(chosen.residents)
            rows.append(
                {
                    "ratio": ratio,
                    "held": held,
                    "spent": spent,
                    "step": _by_limit(found),
                    "best": best / found.seconds,
                }
            )
            cells.append(
                f"{spent[0]}+{spent[1]}: {_by_limit(found):.2f} (best {best / found.seconds:.2f})"
            )
        table.add_row(f"{ratio:g}", *cells)
    Console(width=170).print(table)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "crossover.json").write_text(
        json.dumps({"benchmark": "crossover", "rows": rows}, indent=1) + "\n"
    )


def _by_limit(found: Simulated) -> float:
    return found.seconds / max(found.compute, found.link, found.disk)


def _steps_of(directory: Path) -> list[dict[str, Any]]:
    config = LemaConfig(
        str(directory), device="cpu", gradient_checkpointing=True, micro_batch_size=1
    )
    blueprint = draw_up(config)
    works = {
        length: measure(blueprint.model, blueprint.layers, MicroBatch(1, length), CHUNK_TOKENS)
        for length in (LONG, SHORT)
    }
    found = []
    for machine in PROFILES.values():
        cached = frozenset(range(len(blueprint.layers)))
        sources = {"disk": (frozenset[int](), min(machine.speeds.disk, machine.speeds.link))}
        if blueprint.stored_bytes <= machine.host_memory and not machine.shared:
            sources["host"] = (cached, machine.speeds.link)
        for source, (held, speed) in sources.items():
            break_even = 2 * machine.half / (3 * speed)
            length = LONG if break_even > LONG else SHORT
            for times in TIMES:
                row = _step(
                    config, blueprint, works[length], machine, held, times * break_even, length
                )
                found.append({"machine": machine.name, "from": source, "times": times, **row})
    return found


def _step(
    config: LemaConfig,
    blueprint: Blueprint,
    work: Workload,
    machine: Machine,
    held: frozenset[int],
    tokens: float,
    length: int,
) -> dict[str, Any]:
    shape = StepShape(MicroBatch(1, length), math.ceil(tokens / length))
    timings = by_arithmetic(work, blueprint.layers, machine, blueprint.model.dtype.itemsize)
    planner = Planner(config, blueprint, machine_state_of(config, machine), work, timings, shape)
    allocation = Allocation(DEPTHS[0] + 1, host_cached=held)
    step = planner.simulated(planner.demand(), allocation)
    spilled = step.device_peak > machine.device_memory
    if spilled:  # inputs of layers wait in host memory
        step = planner.simulated(planner.demand(), replace(allocation, boundaries="host"))
    return {
        "tokens": shape.tokens,
        "seconds": step.seconds,
        "compute": step.compute,
        "link": step.link,
        "disk": step.disk,
        "ratio": step.seconds / max(step.compute, step.link, step.disk),
        "bottleneck": step.bottleneck,
        "stalled": step.stall_disk + step.stall_upload + step.stall_boundaries,
        "device_peak": step.device_peak,
        "host_peak": step.host_peak,
        "fits": step.device_peak <= machine.device_memory and step.host_peak <= machine.host_memory,
    }


def _show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="simulated steps")
    columns = [
        "model",
        "machine",
        "from",
        "T/T*",
        "tokens",
        "step s",
        "compute",
        "link",
        "disk",
        "step/longest",
    ]
    for column in [*columns, "stalled s", "device GB", "host GB", "fits"]:
        table.add_column(column, justify="right")
    for row in rows:
        seconds = [f"{row[key]:.3g}" for key in ("seconds", "compute", "link", "disk")]
        memory = [f"{row[key] / 1e9:.1f}" for key in ("device_peak", "host_peak")]
        table.add_row(
            *[
                row["model"],
                row["machine"],
                row["from"],
                f"{row['times']:g}",
                f"{row['tokens']:,}",
                *seconds,
            ],
            *[f"{row['ratio']:.3f}", f"{row['stalled']:.3g}", *memory, "" if row["fits"] else "no"],
        )
    console = Console(width=150)
    console.print(table)
    hidden = [row["ratio"] for row in rows if row["times"] >= HIDDEN_FROM]
    console.print(
        f"from {HIDDEN_FROM} T* on: {sum(ratio <= AT_MOST for ratio in hidden)} of "
        f"{len(hidden)} steps take at most "
        f"{AT_MOST} x the longest of computing, link and disk; the worst {max(hidden):.3f}"
    )


if __name__ == "__main__":
    main()
