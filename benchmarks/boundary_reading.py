"""Bytes per second at which chunks of layers' inputs come back from the disk in the order of a
backward, against a plain sequential read of as many bytes past the page cache, in turns.

    python benchmarks/boundary_reading.py --directory . --rounds 5

A row's inputs of some layers are kept on disk chunk by chunk, as a step's forward does, and fetched
as its backward does: of each layer the chunks but the last in order, and then all in reverse. Nobody
computes with them, so this is the most that reading can reach. Every byte is compared with a
checksum. The plain reader is one thread that does nothing but `preadv` with O_DIRECT, a chunk at
a time, of a file that it has written. What is compared is one round's fetching with the same round's
plain reading, and of that the median: a machine that others use is the same for both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from common import Meter, machine

from lema.activations.chunks.cuts import Cut, Cuts
from lema.activations.stepstore import BoundaryArena, BoundaryChunks
from lema.backend.hostmemory import anonymous
from lema.backend.trace import NoTrace
from lema_cpu import CpuBackend


class BytesRead(NoTrace):
    """Adds up what is read from the disk."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._lock = threading.Lock()

    def span(self, track: str, name: str, **details: Any) -> AbstractContextManager[None]:
        if name == "read":
            with self._lock:
                self.nbytes += details["nbytes"]
        return super().span(track, name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, default=Path(), help="on the disk to be read")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=2048, help="tokens")
    parser.add_argument("--chunks", type=int, default=8, help="of the row")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print(machine())
    ratios = []
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        for number in range(arguments.rounds):
            measured = one_round(Path(name), arguments, plain_first=bool(number % 2))
            ratios.append(measured["fetched"] / measured["plain"])
            words = (f"{what} {rate / 1e9:.2f} GB/s" for what, rate in measured.items())
            print(f"{', '.join(words)}: {ratios[-1]:.2f} of the plain reader", flush=True)
    print(f"median: {statistics.median(ratios):.2f}")


def one_round(directory: Path, arguments: argparse.Namespace, *, plain_first: bool) -> Any:
    """Keep the inputs, fetch them, and read as many bytes plainly; return bytes per second of each
    of these."""
    chunk_bytes = arguments.chunk * arguments.hidden * 2
    read = BytesRead()
    with (
        closing(BoundaryArena(CpuBackend(), "disk", directory, read)) as arena,
        plain_file(directory, chunk_bytes, arguments.layers * arguments.chunks) as descriptor,
    ):
        step, cuts, kept = keep(arena, arguments)
        plain = 0.0
        if plain_first:
            plain = read_plainly(descriptor, chunk_bytes)
        meter = fetch(step, cuts, arguments)
        fetched = read.nbytes / meter.seconds
        cores = f"{meter.cpu_seconds / meter.seconds:.2f} cores of it, {meter.others:.2f} of others"
        print(
            f"fetching: {meter.cpu_seconds / read.nbytes * 1e9:.2f} s of processor per GB, {cores}"
        )
        if not plain_first:
            plain = read_plainly(descriptor, chunk_bytes)
    return {"kept": kept, "fetched": fetched, "plain": plain}


def keep(arena: BoundaryArena, arguments: argparse.Namespace) -> tuple[Any, Cuts, float]:
    """Keep the inputs of all layers; return the step, its cuts, and bytes per second."""
    size = arguments.chunk
    numbers = range(arguments.chunks)
    cuts = Cuts(
        tuple(Cut(slice(None), slice(number * size, (number + 1) * size)) for number in numbers),
        (*numbers[:-1], *reversed(numbers)),
    )
    layers = range(arguments.layers)
    row = torch.zeros(1, size * arguments.chunks, arguments.hidden, dtype=torch.bfloat16)
    row.view(torch.int16)[0, :, ::7] = torch.arange(row.shape[1], dtype=torch.int16)[:, None]
    step = arena.step([row], layers, {(layer, 0): cuts for layer in layers})
    with Meter() as meter:
        for layer in layers:
            for number, cut in enumerate(cuts.chunks):
                with step.keeping(layer, 0, number, cut.of(row)):
                    pass
            step.end_chunks()
    return step, cuts, arguments.layers * row.nbytes / meter.seconds


def fetch(step: Any, cuts: Cuts, arguments: argparse.Namespace) -> Meter:
    """Fetch the inputs as a backward does; return the time. What is still in a buffer is not
    read."""
    with Meter() as meter:
        for layer in reversed(range(arguments.layers)):
            chunks = BoundaryChunks(step, layer, 0)
            for number in cuts.order:
                with chunks.chunk(number):
                    pass
    return meter


@contextmanager
def plain_file(directory: Path, chunk_bytes: int, count: int) -> Iterator[int]:
    """Write a file past the page cache; yield its descriptor."""
    memory = memoryview(anonymous(chunk_bytes).fill_(7).numpy())
    path = directory / "plain.bin"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    try:
        for number in range(count):
            assert os.pwrite(descriptor, memory, number * chunk_bytes) == chunk_bytes
        yield descriptor
    finally:
        os.close(descriptor)
        path.unlink()


def read_plainly(descriptor: int, chunk_bytes: int) -> float:
    """Read a file in order, past the page cache; return bytes per second."""
    memory = memoryview(anonymous(chunk_bytes).fill_(0).numpy())
    size = os.fstat(descriptor).st_size
    with Meter() as meter:
        for start in range(0, size, chunk_bytes):
            assert os.preadv(descriptor, [memory], start) == chunk_bytes
    return size / meter.seconds


if __name__ == "__main__":
    main()
