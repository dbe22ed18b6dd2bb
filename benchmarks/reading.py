"""Bytes per second of reading all layers from disk, against a plain reader of the same files, in
many short rounds.

    python benchmarks/reading.py
    python benchmarks/reading.py --experts 64

With `--experts`, a model of experts is read as it is published, each expert's matrices by
themselves, in turn with the same model as `lema prepare` writes it, each layer whole. Otherwise the
plain reader's threads do nothing but `preadv` with O_DIRECT into buffers of their own. First it
tries several ways (threads x bytes at once). Then arms take turns, who begins changing every round:
the plain reader in the ways that were the fastest, and in the way of `LayerReader`, into huge pages
and into small ones; `LayerReader`, each layer into its place in one of three host buffers; and a
`LayerStream` whose layers are leased and let go at once. The files are dropped from the page cache
before every arm. What is compared is one round's arm with the same round's plain reader, in the way
that was the fastest over all rounds, and of that the median: a machine that others use is the same
for both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import Meter, Shape, forget_pages, report, write_model
from plainreader import WAYS, PlainReader, Way
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from lema import LemaConfig, LemaModel
from lema.convert.prepare import prepare
from lema.stream import LayerStream
from lema.stream.placement import LayerBytes
from lema.stream.reader import SEGMENT, LayerReader
from lema.stream.schedule import forward_order
from lema_cpu import CpuBackend

NUM_BUFFERS = 3
NUM_FINALISTS = 2
OWN_WAY = Way(LayerReader.THREADS, SEGMENT)
SMALL_PAGES = replace(OWN_WAY, huge_pages=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=5632)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument(
        "--experts", type=int, help="of a layer, each as wide as an eighth of --intermediate"
    )
    parser.add_argument("--rounds", type=int, default=25, help="measured, after one that is not")
    parser.add_argument(
        "--tries",
        type=int,
        default=5,
        help="rounds in which the ways of the plain reader are tried",
    )
    parser.add_argument(
        "--directory", type=Path, help="where to write the model (a disk, not memory)"
    )
    arguments = parser.parse_args()
    shape = Shape(arguments.hidden, arguments.intermediate, arguments.layers, vocabulary=1000)
    if arguments.experts:
        _compare_experts(shape, arguments)
        return
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name, ExitStack() as stack:
        directory = Path(name)
        write_model(directory, shape)
        model = stack.enter_context(closing(LemaModel(LemaConfig(name, device="cpu"))))
        layers = list(model.memory.layers)
        nbytes = sum(layer.read_bytes for layer in layers)
        tried = _try_ways(layers, directory, arguments.tries)
        by_speed = sorted(
            tried, key=lambda way: statistics.median(meter.seconds for meter in tried[way])
        )
        ways = dict.fromkeys([*by_speed[:NUM_FINALISTS], OWN_WAY, SMALL_PAGES])
        reader = stack.enter_context(closing(LayerReader()))
        stream = stack.enter_context(
            closing(LayerStream(layers, CpuBackend(), prefetch_depth=NUM_BUFFERS - 1))
        )
        buffers = [
            CpuBackend().host_buffer(max(layer.nbytes for layer in layers))
            for _ in range(NUM_BUFFERS)
        ]
        arms: dict[str, Callable[[], None]] = {
            f"plain, {way}": stack.enter_context(PlainReader(layers, way)).read for way in ways
        }
        arms["LayerReader"] = lambda: _read_layers(reader, layers, buffers)
        arms["LayerStream"] = lambda: _lease_layers(stream)
        meters = _in_turn(arms, directory, arguments.rounds)
        huge = _share_of_huge_pages(buffers)
    plain = {name: meters[name] for name in arms if name.startswith("plain")}
    best = min(plain, key=lambda name: statistics.median(meter.seconds for meter in plain[name]))
    rows = [
        _row(name, meters[name], plain[best], plain[f"plain, {OWN_WAY}"], nbytes) for name in arms
    ]
    trial = [{"way": str(way), **_speeds(found, nbytes)} for way, found in tried.items()]
    _show(rows, trial, best, nbytes, huge)
    found = {"arms": rows, "best": best, "ways": trial, "share_of_buffers_in_huge_pages": huge}
    report("reading", found, shape)


def _compare_experts(shape: Shape, arguments: argparse.Namespace) -> None:
    """Read a model whose experts are stored one by one, and the same one prepared."""
    config = Qwen3MoeConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        vocab_size=shape.vocabulary,
        num_experts=arguments.experts,
        moe_intermediate_size=shape.intermediate // 8,
        dtype=torch.bfloat16,
    )
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name, ExitStack() as stack:
        published = Path(name) / "published"
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(published)
        directories = {
            "whole": prepare(published, Path(name) / "whole").path,
            "per expert": published,
        }
        arms: dict[str, Callable[[], None]] = {}
        slots: dict[str, int] = {}
        for kind, directory in directories.items():
            model = stack.enter_context(
                closing(LemaModel(LemaConfig(str(directory), device="cpu")))
            )
            layers = list(model.memory.layers)
            slots[kind], nbytes = (
                max(layer.nbytes for layer in layers),
                sum(layer.read_bytes for layer in layers),
            )
            buffers = [CpuBackend().host_buffer(slots[kind]) for _ in range(NUM_BUFFERS)]
            arms[kind] = partial(
                _read_layers, stack.enter_context(closing(LayerReader())), layers, buffers
            )
        meters: dict[str, list[Meter]] = {kind: [] for kind in arms}
        for number in range(arguments.rounds + 1):
            for kind in sorted(arms, reverse=number % 2 == 1):
                forget_pages(directories[kind])
                with Meter() as meter:
                    arms[kind]()
                if number:
                    meters[kind].append(meter)
    ratios = [
        one.seconds / other.seconds
        for one, other in zip(meters["whole"], meters["per expert"], strict=True)
    ]
    low, middle, high = statistics.quantiles(ratios, n=4)
    found = {kind: _speeds(of_kind, nbytes) for kind, of_kind in meters.items()}
    found |= {"per_expert_of_whole": middle, "quartiles": [low, high], "slot_bytes": slots}
    for kind, speeds in found.items():
        print(kind, speeds)
    report("reading_experts", found, shape)


def _try_ways(layers: Sequence[LayerBytes], directory: Path, rounds: int) -> dict[Way, list[Meter]]:
    """Read by every way, round about."""
    with ExitStack() as stack:
        return _in_turn(
            {way: stack.enter_context(PlainReader(layers, way)).read for way in WAYS},
            directory,
            rounds,
        )


def _in_turn(
    arms: dict[Any, Callable[[], None]], directory: Path, rounds: int
) -> dict[Any, list[Meter]]:
    """Run every arm once a round, on cold files, another one first each time; the first round is
    not measured.
    """
    meters: dict[Any, list[Meter]] = {name: [] for name in arms}
    for number in range(rounds + 1):
        first = number % len(arms)
        for name, read in [*arms.items()][first:] + [*arms.items()][:first]:
            forget_pages(directory)
            with Meter() as meter:
                read()
            if number:
                meters[name].append(meter)
    return meters


def _read_layers(
    reader: LayerReader, layers: Sequence[LayerBytes], buffers: Sequence[torch.Tensor]
) -> None:
    tickets = []
    for index, layer in enumerate(layers):
        if index >= len(buffers):
            tickets[index - len(buffers)].wait()  # the buffer's turn has come again
        tickets.append(reader.submit(layer, buffers[index % len(buffers)]))
    for ticket in tickets:
        ticket.wait()


def _lease_layers(stream: LayerStream) -> None:
    """Lease every layer. What is in the buffers is wanted last, so it is read again before its
    turn.
    """
    order = forward_order(len(stream.layers))
    before = stream.counters.bytes_read
    stream.announce(order)
    for layer in order:
        with stream.lease(layer):
            pass
    assert stream.counters.bytes_read - before == sum(layer.read_bytes for layer in stream.layers)


def _share_of_huge_pages(buffers: Sequence[torch.Tensor]) -> float:
    """Return how much of the buffers the system has put into huge pages: it may have had none
    left in one piece.
    """
    starts = {buffer.data_ptr() for buffer in buffers}
    found = 0
    within = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            first, last = (int(bound, 16) for bound in name.split("-"))
            within = any(first <= start < last for start in starts)
        elif within and name == "AnonHugePages:":
            found += int(values[0]) * 1024
    # neighbours may be in one mapping with them
    return min(1.0, found / sum(buffer.numel() for buffer in buffers))


def _speeds(meters: Sequence[Meter], nbytes: int) -> dict[str, float]:
    speeds = [nbytes / meter.seconds for meter in meters]
    return {
        "bytes_per_second": statistics.median(speeds),
        "slowest": min(speeds),
        "fastest": max(speeds),
        "cpu_seconds_per_gb": statistics.median(
            meter.cpu_seconds / nbytes * 1e9 for meter in meters
        ),
        "cores_others_kept_busy": statistics.mean(meter.others for meter in meters),
    }


def _row(
    name: str, meters: Sequence[Meter], best: Sequence[Meter], own_way: Sequence[Meter], nbytes: int
) -> dict[str, Any]:
    ratios = [plain.seconds / meter.seconds for meter, plain in zip(meters, best, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "arm": name,
        **_speeds(meters, nbytes),
        "of_best_plain": middle,
        "of_best_plain_quartiles": [low, high],
        "of_own_way_plain": statistics.median(
            plain.seconds / meter.seconds for meter, plain in zip(meters, own_way, strict=True)
        ),
        "seconds": [meter.seconds for meter in meters],
    }


def _show(
    rows: list[dict[str, Any]], trial: list[dict[str, Any]], best: str, nbytes: int, huge: float
) -> None:
    console = Console(width=120)
    headings = ("MB/s", "slowest", "fastest", "CPU s/GB", "others")
    ways = Table("threads x segment", title="ways of the plain reader, tried before")
    table = Table(
        "arm",
        title=f"cold reads of {nbytes / 1e6:,.0f} MB of layers, {len(rows[0]['seconds'])} rounds",
    )
    for heading in headings:
        ways.add_column(heading, justify="right")
    for heading in (*headings, "of best plain", "quartiles", f"of plain, {OWN_WAY}"):
        table.add_column(heading, justify="right")
    for row in trial:
        ways.add_row(row["way"], *_cells(row))
    for row in rows:
        low, high = row["of_best_plain_quartiles"]
        ratios = (
            f"{row['of_best_plain']:.2f}",
            f"{low:.2f} - {high:.2f}",
            f"{row['of_own_way_plain']:.2f}",
        )
        table.add_row(row["arm"], *_cells(row), *ratios)
    console.print(ways, table, sep="\n")
    load = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    console.print(
        f"Best: {best}. Others: cores that others kept busy meanwhile; load at the end: {load}. "
        f"Of LayerReader's buffers {huge:.0%} are in huge pages."
    )


def _cells(row: dict[str, Any]) -> list[str]:
    speeds = [f"{row[key] / 1e6:,.0f}" for key in ("bytes_per_second", "slowest", "fastest")]
    return [*speeds, f"{row['cpu_seconds_per_gb']:.3f}", f"{row['cores_others_kept_busy']:.1f}"]


if __name__ == "__main__":
    main()
