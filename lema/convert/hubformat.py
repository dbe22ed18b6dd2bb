"""A model's weights in the hub's format, shard by shard, in a directory that appears when it is complete."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from math import prod
from pathlib import Path

from lema.convert.tensors import METADATA
from lema.storage import TensorFile
from lema.storage.header import DTYPE_BITS
from lema.storage.tensorfile import TensorSpec

__all__ = ["shards_of", "write_shards"]

SHARD_NAME = "{}-{:05}-of-{:05}.safetensors"  # the hub's, of "model"


def shards_of(specs: Iterable[TensorSpec], max_bytes: int) -> list[list[TensorSpec]]:
    """Cut the tensors, in their order, into files of at most `max_bytes`; a larger one has a file to itself."""
    shards: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        nbytes = _bytes(spec)
        if shards[-1] and size + nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += nbytes
    return shards


def _bytes(spec: TensorSpec) -> int:
    _, dtype, shape = spec
    return prod(shape) * DTYPE_BITS[dtype] // 8


def write_shards(
    directory: Path,
    shards: Sequence[Sequence[TensorSpec]],
    pieces: Callable[[str], Iterable[memoryview]],
    stem: str = "model",
) -> None:
    """Write each shard, and where there are several the index of which tensor is where.

    `pieces` returns the bytes of a tensor by its name; it is called in the order of the shards.
    """
    single = len(shards) == 1
    weight_map: dict[str, str] = {}
    for number, specs in enumerate(shards, start=1):
        file = directory / (f"{stem}.safetensors" if single else SHARD_NAME.format(stem, number, len(shards)))
        with TensorFile(file, specs, METADATA) as out:
            for name, _, _ in specs:
                out.write(name, pieces(name))
                weight_map[name] = file.name
    if not single:
        size = sum(_bytes(spec) for specs in shards for spec in specs)
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (directory / f"{stem}.safetensors.index.json").write_text(text, encoding="utf-8")
