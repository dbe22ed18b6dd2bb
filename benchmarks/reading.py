"""Bytes per second of reading all layers from disk, against a plain reader of the same files, round about.

    python benchmarks/reading.py

Three arms, alternating: threads that do nothing but `preadv` with O_DIRECT into buffers of their own, the fastest a
process reads on this machine; `LayerReader`, each layer into its place in one of three host buffers; and a
`LayerStream` whose layers are leased and let go at once. The files are dropped from the page cache before every round.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import torch
from common import Shape, forget_pages, report, write_model
from rich.console import Console
from rich.table import Table

from lema import LemaConfig, LemaModel
from lema.stream.lease import LayerStream
from lema.stream.placement import PAGE, LayerBytes
from lema.stream.reader import LayerReader
from lema.stream.schedule import forward_order
from lema_cpu import CpuBackend

NUM_BUFFERS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=5632)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5, help="measured, after one that is not")
    parser.add_argument("--segment", type=int, default=4 << 20, help="bytes of one read of the plain reader")
    parser.add_argument("--directory", type=Path, help="where to write the model (a disk, not memory)")
    arguments = parser.parse_args()
    shape = Shape(arguments.hidden, arguments.intermediate, arguments.layers, vocabulary=1000)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name, ExitStack() as stack:
        directory = Path(name)
        write_model(directory, shape)
        model = stack.enter_context(closing(LemaModel(LemaConfig(name, device="cpu"))))
        layers = list(model.memory.layers)
        nbytes = sum(layer.read_bytes for layer in layers)
        reader = stack.enter_context(closing(LayerReader()))
        stream = stack.enter_context(closing(LayerStream(layers, CpuBackend(), prefetch_depth=NUM_BUFFERS - 1)))
        buffers = [CpuBackend().host_buffer(max(layer.nbytes for layer in layers)) for _ in range(NUM_BUFFERS)]
        arms: dict[str, Callable[[], None]] = {
            "plain preadv, O_DIRECT": lambda: _read_plainly(layers, arguments.segment),
            "LayerReader": lambda: _read_layers(reader, layers, buffers),
            "LayerStream": lambda: _lease_layers(stream),
        }
        speeds: dict[str, list[float]] = {name: [] for name in arms}
        for round_ in range(arguments.rounds + 1):
            turn = round_ % len(arms)  # who reads first changes: a disk may be quicker after a pause
            for name, read in [*arms.items()][turn:] + [*arms.items()][:turn]:
                forget_pages(directory)
                before = stream.counters.bytes_read
                began = time.perf_counter()
                read()
                seconds = time.perf_counter() - began
                moved = stream.counters.bytes_read - before or nbytes  # what slots kept is not read again
                if round_:
                    speeds[name].append(moved / seconds)
    plain = speeds["plain preadv, O_DIRECT"]
    rows = [
        {
            "arm": name,
            "bytes_per_second": statistics.median(found),
            "slowest": min(found),
            "fastest": max(found),
            "ratio_to_plain": statistics.median(one / other for one, other in zip(found, plain, strict=True)),
        }
        for name, found in speeds.items()
    ]
    _show(rows, nbytes)
    report("reading", rows, shape)


def _read_plainly(layers: list[LayerBytes], segment: int) -> None:
    """Read the same bytes in whole pages, as many threads as the reader has, each into one buffer of its own."""
    spans = [
        (run.file, start, min(segment, -(-(run.offset + run.nbytes) // PAGE) * PAGE - start))
        for layer in layers
        for run in layer.runs
        for start in range(run.offset // PAGE * PAGE, run.offset + run.nbytes, segment)
    ]
    lock, ahead = threading.Lock(), iter(spans)
    descriptors = {file: os.open(file, os.O_RDONLY | os.O_DIRECT) for file, _, _ in spans}

    def read() -> None:
        with mmap.mmap(-1, segment) as buffer, memoryview(buffer) as view:
            while True:
                with lock:
                    span = next(ahead, None)
                if span is None:
                    return
                file, start, length = span
                os.preadv(descriptors[file], [view[:length]], start)

    threads = [threading.Thread(target=read) for _ in range(LayerReader.THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for descriptor in descriptors.values():
        os.close(descriptor)


def _read_layers(reader: LayerReader, layers: list[LayerBytes], buffers: list[torch.Tensor]) -> None:
    tickets = []
    for index, layer in enumerate(layers):
        if index >= len(buffers):
            tickets[index - len(buffers)].wait()  # the buffer's turn has come again
        tickets.append(reader.submit(layer, buffers[index % len(buffers)]))
    for ticket in tickets:
        ticket.wait()


def _lease_layers(stream: LayerStream) -> None:
    order = forward_order(len(stream.layers))
    stream.announce(order)
    for layer in order:
        with stream.lease(layer):
            pass


def _show(rows: list[dict[str, object]], nbytes: int) -> None:
    table = Table(title=f"cold reads of {nbytes / 1e6:,.0f} MB of layers")
    for column in ("arm", "MB/s", "slowest", "fastest", "of plain"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for row in rows:
        speeds = [f"{float(row[key]) / 1e6:,.0f}" for key in ("bytes_per_second", "slowest", "fastest")]  # type: ignore[arg-type]
        table.add_row(str(row["arm"]), *speeds, f"{row['ratio_to_plain']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
