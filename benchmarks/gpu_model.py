"""Random weights in the shape of well-known models, written where there is room for them, with
little memory.

A safetensors file is a header and then bytes, so bytes are written straight from one block of
random values that is read round and round; its length is odd, so that no two tensors, and no two
rows of one, begin alike. Throughput and memory do not depend on the values, but on their being
random: a device multiplies zeros faster.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch
from common import Shape, write_config, write_index

__all__ = [
    "MODELS",
    "SHARED_MEMORY",
    "TINY",
    "Place",
    "Written",
    "available_memory",
    "places_for",
    "remove",
    "write_random",
]

GB = 10**9
MODELS = {
    "8B": Shape(4096, 14336, 32, 128256, 32, kv_heads=8),  # of Llama 3 8B
    "32B": Shape(5120, 27648, 64, 152064, 40, kv_heads=8),  # of Qwen2.5 32B
}
TINY = {
    "8B": Shape(64, 176, 6, 512, 4, kv_heads=2),
    "32B": Shape(96, 256, 8, 640, 6, kv_heads=2),
}
SHARED_MEMORY = Path("/dev/shm")
SPARE = 4 * GB  # of a disk, left free
# of host memory for interpreters, libraries and what the arms need beside the weights
PROCESSES = 28 * GB
WRITING = 60.0  # seconds that a disk may take
PROBE = 256 << 20  # bytes that tell how fast it is
ALIGNMENT = 256  # of the data of a file
VALUES = 8_388_593  # in the block; a prime
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True)
class Place:
    """A directory, and how many bytes may be written there."""

    directory: Path
    room: int


@dataclass(frozen=True)
class Written:
    """A model on its files.

    Attributes:
        directory: with config, index, and links to the files.
        shape: as written; it may have fewer layers than it should.
        full_layers: how many it should have.
        where: bytes by kind of place.
    """

    directory: Path
    shape: Shape
    full_layers: int
    where: dict[str, int]


def available_memory() -> int:
    """Return the bytes of host memory that can still be taken, within the limit of this
    process's cgroup too.
    """
    free: int = psutil.virtual_memory().available
    ways = (("memory.max", "memory.stat", ("anon", "shmem")),
            ("memory/memory.limit_in_bytes", "memory/memory.stat", ("total_rss", "total_shmem")))  # fmt: skip
    for limit, stat, kinds in ways:
        try:
            said = (Path("/sys/fs/cgroup") / limit).read_text().strip()
            lines = (Path("/sys/fs/cgroup") / stat).read_text().splitlines()
        except OSError:
            continue
        taken = {name: int(value) for name, value in (line.split() for line in lines)}
        if said.isdigit():
            free = min(free, int(said) - sum(taken.get(kind, 0) for kind in kinds))
    return free


def places_for(shape: Shape, scratch: Path, free: int, *, disk_only: bool = False) -> list[Place]:
    """Return where a model's files may go, the fastest first: memory beside a copy of the weights,
    then the disk.

    Args:
        shape: of the model.
        scratch: a directory on the disk, by whose name the one in memory is called.
        free: bytes of host memory that can still be taken.
        disk_only: nothing goes to memory.
    """
    memory = Place(SHARED_MEMORY / scratch.name, 0)
    if not disk_only and SHARED_MEMORY.is_dir():
        beside = free - shape.weight_bytes - PROCESSES
        memory = replace(memory, room=max(0, min(shutil.disk_usage(SHARED_MEMORY).free, beside)))
    if memory.room >= 1.01 * shape.weight_bytes:
        return [memory]
    room = min(shutil.disk_usage(scratch).free - SPARE, int(_disk_speed(scratch, shape) * WRITING))
    return [memory, Place(scratch, max(0, room))]


def write_random(
    directory: Path, shape: Shape, places: Sequence[Place], *, threads: int = 8
) -> Written:
    """Write a model of `shape`, the files spread over `axis_spans`, with as many of its layers as
    they have room for.

    Args:
        directory: for config, index and links; each place gets a directory of the same name.
        shape: of the model.
        places: filled one after the other.
        threads: that write.

    Raises:
        OSError: not one layer finds room.
    """
    names = {
        f"model-{layer:05d}.safetensors": _layer(shape, layer) for layer in range(shape.layers)
    }
    outside = {"model-outside.safetensors": _outside(shape)}
    width = getattr(torch, shape.dtype).itemsize
    homes: dict[str, Path] = {}
    where: dict[str, int] = {}  # by kind, which is what a reader is told
    rooms = {place.directory: place.room for place in places}
    for name, sizes in {**outside, **names}.items():
        nbytes = sum(rows * columns for rows, columns in sizes.values()) * width
        home = next((place for place, room in rooms.items() if room >= nbytes), None)
        if home is None:
            break
        homes[name] = home / directory.name
        rooms[home] -= nbytes
        kind = "shared memory" if SHARED_MEMORY in home.parents else "disk"
        where[kind] = where.get(kind, 0) + nbytes
    layers = len(homes) - 1
    if layers < 1:
        raise OSError(f"no room for one layer of {shape.layer_bytes:,} bytes: {rooms}")
    short = replace(shape, layers=layers)
    write_config(directory, short)
    block = _block(shape.dtype)
    everything = {**outside, **names}
    with ThreadPoolExecutor(threads) as pool:
        tasks = [
            pool.submit(_write, home / name, everything[name], block, number * 7919, shape.dtype)
            for number, (name, home) in enumerate(homes.items())
        ]
        for task in tasks:
            task.result()
    for name, home in homes.items():
        if home != directory:
            (directory / name).symlink_to(home / name)
    write_index(directory, short, {tensor: name for name in homes for tensor in everything[name]})
    return Written(directory, short, shape.layers, where)


def _disk_speed(directory: Path, shape: Shape) -> float:
    """Return the bytes per second that a disk takes, all the way."""
    nbytes = min(PROBE, shape.weight_bytes)
    file = directory / "probe"
    began = time.perf_counter()
    with file.open("wb") as out:
        out.write(bytes(nbytes))
        out.flush()
        os.fsync(out.fileno())
    speed = nbytes / (time.perf_counter() - began)
    file.unlink()
    return speed


def remove(scratch: Path, written: Written | None = None) -> None:
    """Delete the files of a model, wherever they lie; None: of every model of a directory, and
    the directory.
    """
    inside = "" if written is None else written.directory.name
    for directory in (SHARED_MEMORY / scratch.name, scratch):
        shutil.rmtree(directory / inside, ignore_errors=True)


def _layer(shape: Shape, layer: int) -> dict[str, tuple[int, int]]:
    prefix = f"model.layers.{layer}."
    norms = {
        f"{prefix}{name}.weight": (1, shape.hidden)
        for name in ("input_layernorm", "post_attention_layernorm")
    }
    return {**{f"{prefix}{name}.weight": size for name, size in shape.matrices.items()}, **norms}


def _outside(shape: Shape) -> dict[str, tuple[int, int]]:
    size = (shape.vocabulary, shape.hidden)
    return {
        "model.embed_tokens.weight": size,
        "lm_head.weight": size,
        "model.norm.weight": (1, shape.hidden),
    }


def _block(dtype: str) -> memoryview:
    values = torch.randn(VALUES, generator=torch.Generator().manual_seed(0)) * 0.02
    return memoryview(values.to(getattr(torch, dtype)).view(torch.uint8).numpy())


def _write(
    file: Path, sizes: dict[str, tuple[int, int]], block: memoryview, start: int, dtype: str
) -> None:
    """Write one file; vectors are norms, and hold ones."""
    width = getattr(torch, dtype).itemsize
    end = 0
    header = {}
    parts = []
    for name, (rows, columns) in sizes.items():
        nbytes = rows * columns * width
        shape = [columns] if rows == 1 else [rows, columns]
        header[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": [end, end + nbytes]}
        ones = memoryview(
            torch.ones(columns, dtype=getattr(torch, dtype)).view(torch.uint8).numpy()
        )
        parts.append((ones if rows == 1 else block, nbytes))
        end += nbytes
    raw = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    # so that the first tensor, and those behind it, are aligned
    raw += b" " * (-(8 + len(raw)) % ALIGNMENT)
    file.parent.mkdir(parents=True, exist_ok=True)
    place = start * width % len(block)
    with file.open("wb", buffering=0) as out:
        out.write(len(raw).to_bytes(8, "little") + raw)
        for source, nbytes in parts:
            for piece in _round(source, place if source is block else 0, nbytes):
                _whole(out.fileno(), piece)
            place = (place + nbytes) % len(block)


def _round(source: memoryview, place: int, nbytes: int) -> Iterator[memoryview]:
    """Yield `nbytes` of a source that begins anew where it ends."""
    while nbytes:
        piece = source[place : place + nbytes]
        yield piece
        nbytes -= len(piece)
        place = 0


def _whole(descriptor: int, piece: memoryview) -> None:
    while piece:
        piece = piece[os.write(descriptor, piece) :]
