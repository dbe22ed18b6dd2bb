"""How much longer a step takes than the larger of its computing and its reading, for several tokens
per step.

    python benchmarks/overlap.py

Three arms take turns in one process, who begins changing every round. *Step*: a training step whose
layers come from cold files. *Compute*: the same step by the same code with every layer in host
memory, so that nothing is read. *Reading*: the layers of a step leased in its order, with as many
buffers and nothing computed in between. The files are dropped from the page cache before every arm.
What is compared is one round's step with the same round's larger of the other two, and of that the
median. Few tokens per step are bound by reading, many by computing; near the crossover the way up
waits for the disk and the way down does not, and with few buffers neither can help the other out.
How much of that lies in the schedule a simulation of it tells, given the speeds of the other two
arms.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import Meter, Shape, forget_pages, report, write_model
from rich.console import Console
from rich.table import Table

from lema import LemaConfig, LemaModel
from lema.backend.trace import NO_TRACE, NoTrace, Trace
from lema.config import MemoryStrategy
from lema.engine.head.loss import split_batch
from lema.plan import Allocation
from lema.plan.cost import Demand, LayerCost, Speeds
from lema.plan.simulation.simulator import simulate
from lema.stream import LayerStream
from lema.stream.schedule import fetched_per_step, training_order
from lema_cpu import CpuBackend

STEP = "step"
COMPUTE = "compute"
READING = "reading"
MORE = "step with the memory of {} more"


@dataclass
class Measured:
    """What was seen of one arm with one number of tokens, round by round."""

    meters: list[Meter] = field(default_factory=list)
    blocked: list[float] = field(default_factory=list)  # seconds that leases waited for the disk
    losses: list[float] = field(default_factory=list)
    # seconds by track and name
    spans: list[dict[tuple[str, str], float]] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        return [meter.seconds for meter in self.meters]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--intermediate", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=4000)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 32, 128, 512], help="per step")
    parser.add_argument("--longest", type=int, default=256, help="tokens of a micro-batch, at most")
    parser.add_argument("--rounds", type=int, default=7, help="measured, after one that is not")
    parser.add_argument("--prefetch-depth", type=int, default=2)
    parser.add_argument(
        "--more", type=int, nargs="*", default=[], help="layers that further steps have memory for"
    )
    parser.add_argument(
        "--directory", type=Path, help="where to write the model (a disk, not memory)"
    )
    arguments = parser.parse_args()
    shape = Shape(arguments.hidden, arguments.intermediate, arguments.layers, arguments.vocabulary)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name, ExitStack() as stack:
        directory = Path(name)
        write_model(directory, shape)
        batches = {
            tokens: _batch(tokens, arguments.longest, shape.vocabulary)
            for tokens in arguments.tokens
        }
        step, model = _training(
            directory, MemoryStrategy.STREAMING, arguments.prefetch_depth, stack
        )
        stream = model.memory
        trace = Trace()
        compute, _ = _training(
            directory, MemoryStrategy.RESIDENT, arguments.prefetch_depth, stack, trace
        )
        reading = stack.enter_context(
            closing(
                LayerStream(stream.layers, CpuBackend(), prefetch_depth=arguments.prefetch_depth)
            )
        )
        arms: dict[str, Callable[[Any], float]] = {
            STEP: step,
            COMPUTE: compute,
            READING: lambda _: _lease(reading),
        }
        streams = {STEP: stream, READING: reading}
        chosen: dict[tuple[str, int], str] = {}
        for count in arguments.more:
            steps = {
                tokens: _with_memory(
                    count, directory, batch, shape, arguments.prefetch_depth, stack
                )
                for tokens, batch in batches.items()
            }
            arms[MORE.format(count)] = lambda batch, steps=steps: steps[_tokens(batch)][0](batch)
            chosen |= {(MORE.format(count), tokens): text for tokens, (_, text) in steps.items()}
        found = _in_turn(arms, streams, batches, directory, arguments.rounds, trace)
        sizes = [layer.read_bytes for layer in stream.layers]
    rows = []
    for tokens in batches:
        measured = {arm: found[arm, tokens] for arm in arms}
        rows.append(
            _row(tokens, measured)
            | {"schedule": _schedule(measured, sizes, arguments.prefetch_depth + 1)}
        )
    _show(rows, arguments.rounds)
    for (arm, tokens), text in chosen.items():
        low, middle, high = _ratios(arm, {one: found[one, tokens] for one in arms})
        print(
            f"{tokens} tokens, {arm} ({text}): {middle:.3f} of the larger, quartiles "
            f"{low:.2f} - {high:.2f}"
        )
    report(
        "overlap",
        {"sizes": rows, "crossover_tokens": _crossover(rows), "threads": torch.get_num_threads()},
        shape,
    )


def _batch(tokens: int, longest: int, vocabulary: int) -> list[dict[str, torch.Tensor]]:
    """Return a step's micro-batches, of one row each."""
    num_rows = -(-tokens // longest)
    ids = torch.randint(0, vocabulary, (num_rows, tokens // num_rows))
    return split_batch({"input_ids": ids, "labels": ids}, 1)


def _training(
    directory: Path,
    strategy: MemoryStrategy,
    prefetch_depth: int,
    stack: ExitStack,
    trace: NoTrace = NO_TRACE,
    **settings: Any,
) -> tuple[Callable[[Any], float], LemaModel]:
    """Return what trains a step and returns its loss, and its model."""
    usual = {
        "device": "cpu",
        "gradient_checkpointing": True,
        "micro_batch_size": 1,
        "save_steps": 0,
    }
    config = LemaConfig(
        str(directory), strategy=strategy, prefetch_depth=prefetch_depth, **usual | settings
    )
    model = stack.enter_context(closing(LemaModel(config, trace=trace)))
    model.initialize_lora()
    trainer = model.get_trainer()
    return lambda micro_batches: trainer.accumulate(micro_batches, more=True).loss, model


def _with_memory(
    count: int, directory: Path, batch: Any, shape: Shape, prefetch_depth: int, stack: ExitStack
) -> tuple[Callable[[Any], float], str]:
    """Return what trains a step in the memory of streaming and `count` layers more, and how the
    solver spends it.
    """
    settings = {"batch_size": len(batch), "max_length": batch[0]["input_ids"].shape[1]}
    ask = ExitStack()
    with ask:
        given = directory, MemoryStrategy.STREAMING, prefetch_depth
        _, model = _training(*given, ask, device_memory=10 * shape.weight_bytes, **settings)
        parts = {**model.planner.needs().device, "residents": 0}
        parts["slots"] = (prefetch_depth + 1) * max(
            layer.slot_bytes for layer in model.planner.demand().layers
        )
    limit = sum(parts.values()) + count * shape.layer_bytes
    step, model = _training(*given, stack, device_memory=limit, **settings)
    return step, model.allocation.summary()


def _tokens(batch: Any) -> int:
    return sum(part["input_ids"].numel() for part in batch)


def _lease(stream: LayerStream) -> float:
    """Lease a step's layers; the next step's are announced at the turn, as training does."""
    order = training_order(len(stream.layers))
    if not stream.announced:
        stream.announce(order)
    for number, layer in enumerate(order):
        with stream.lease(layer):
            if number == len(stream.layers) - 1:
                stream.announce(order)
    return 0.0


def _in_turn(
    arms: dict[str, Callable[[Any], float]],
    streams: dict[str, LayerStream],
    batches: dict[int, Any],
    directory: Path,
    rounds: int,
    trace: Trace,
) -> dict[tuple[str, int], Measured]:
    """Run every arm with every number of tokens once a round, on cold files; the first round is
    not measured.
    """
    found = {(arm, tokens): Measured() for arm in arms for tokens in batches}
    names = list(arms)
    for number in range(rounds + 1):
        first = number % len(names)
        for tokens, batch in batches.items():
            for arm in names[first:] + names[:first]:
                blocked = streams[arm].counters.seconds_blocked_disk if arm in streams else 0.0
                begun = len(trace.events)
                forget_pages(directory)
                with Meter() as meter:
                    loss = arms[arm](batch)
                if arm in streams:
                    blocked = streams[arm].counters.seconds_blocked_disk - blocked
                if number:
                    measured = found[arm, tokens]
                    measured.meters.append(meter)
                    measured.blocked.append(blocked)
                    measured.losses.append(loss)
                    measured.spans.append(_by_name(trace.events[begun:]))
    for tokens in batches:
        assert found[STEP, tokens].losses == found[COMPUTE, tokens].losses, (
            "where the weights were changed the loss"
        )
    return found


def _row(tokens: int, arms: dict[str, Measured]) -> dict[str, Any]:
    low, middle, high = _ratios(STEP, arms)
    arm_rows = {
        arm: {
            "seconds": statistics.median(found.seconds),
            "cpu_seconds": statistics.median(meter.cpu_seconds for meter in found.meters),
            "seconds_blocked_on_disk": statistics.median(found.blocked),
            "cores_others_kept_busy": statistics.mean(meter.others for meter in found.meters),
            "all_seconds": found.seconds,
        }
        for arm, found in arms.items()
    }
    return {"tokens": tokens, "ratio": middle, "quartiles": [low, high], "arms": arm_rows}


def _ratios(arm: str, arms: dict[str, Measured]) -> list[float]:
    """Return the quartiles of what an arm takes longer than the larger of computing and reading
    in its round.
    """
    limits = [max(pair) for pair in zip(arms[COMPUTE].seconds, arms[READING].seconds, strict=True)]
    return statistics.quantiles(
        [one / limit for one, limit in zip(arms[arm].seconds, limits, strict=True)], n=4
    )


def _by_name(events: list[dict[str, Any]]) -> dict[tuple[str, str], float]:
    """Return the seconds of a trace's spans, added up by track and name."""
    found: dict[tuple[str, str], float] = {}
    for event in events:
        key = (event["cat"], event["name"])
        found[key] = found.get(key, 0.0) + event["dur"] / 1e6
    return found


def _schedule(arms: dict[str, Measured], sizes: Sequence[int], slots: int) -> float:
    """Return the ratio that the order of reads and visits allows: a step in virtual time, at the
    speeds measured.
    """

    def usual(track: str, name: str) -> float:
        return statistics.median(spans.get((track, name), 0.0) for spans in arms[COMPUTE].spans)

    layers = tuple(
        LayerCost(
            size, size, size, forward=usual("forward", name), backward=usual("backward", name)
        )
        for name, size in ((f"layer {index}", size) for index, size in enumerate(sizes))
    )
    seconds = statistics.median(arms[COMPUTE].seconds)
    head = usual("forward", "head and loss")
    rest = seconds - head - sum(layer.forward + layer.backward for layer in layers)
    num_bytes = len(fetched_per_step(len(sizes), slots)) * statistics.mean(sizes)
    speeds = Speeds(num_bytes / statistics.median(arms[READING].seconds), float("inf"))
    demand = Demand(layers, head_seconds=head, outside_seconds=max(0.0, rest), shared=True)
    simulated = simulate(demand, Allocation(slots), speeds)
    return simulated.seconds / max(simulated.compute, simulated.link, simulated.disk)


def _crossover(rows: Sequence[dict[str, Any]]) -> float | None:
    """Return the tokens per step that take as long to compute as to read, between two that were
    measured.
    """
    behind = [
        (row["tokens"], row["arms"][COMPUTE]["seconds"] - row["arms"][READING]["seconds"])
        for row in rows
    ]
    for (fewer, below), (more, above) in itertools.pairwise(behind):
        if below < 0 <= above:
            return float(fewer + (more - fewer) * -below / (above - below))
    return None


def _show(rows: list[dict[str, Any]], rounds: int) -> None:
    table = Table("tokens", title=f"one step, its layers read from cold files; {rounds} rounds")
    headings = (
        "step s",
        "compute s",
        "reading s",
        "step / larger",
        "quartiles",
        "schedule",
        "blocked s",
        "CPU s",
        "others",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        arms, (low, high) = row["arms"], row["quartiles"]
        table.add_row(
            str(row["tokens"]),
            *(f"{arms[arm]['seconds']:.3f}" for arm in (STEP, COMPUTE, READING)),
            f"{row['ratio']:.3f}",
            f"{low:.2f} - {high:.2f}",
            f"{row['schedule']:.3f}",
            f"{arms[STEP]['seconds_blocked_on_disk']:.3f}",
            " / ".join(f"{arms[arm]['cpu_seconds']:.2f}" for arm in (STEP, COMPUTE, READING)),
            f"{statistics.mean(arm['cores_others_kept_busy'] for arm in arms.values()):.1f}",
        )
    console = Console(width=130)
    crossover = _crossover(rows)
    console.print(table)
    met = "outside what was measured" if crossover is None else f"{crossover:.0f} tokens per step"
    load = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    console.print(
        f"Computing takes as long as reading at: {met}. Schedule: the ratio that the order "
        "of reads and visits allows "
        "at these speeds. Blocked: the step's leases waited for the disk. CPU s: of step / "
        "compute / reading. Others: "
        f"cores that others kept busy. Threads: {torch.get_num_threads()}; load at the end: {load}."
    )


if __name__ == "__main__":
    main()
