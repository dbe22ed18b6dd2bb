"""Models whose layers are all the bytes of the first: a shape of 60 GB is written in seconds, where
2 GB have room.

`write_repeated` writes config and header of a published checkpoint, with its true names, shapes and
types, and random values for the first layer and for what is outside the layers. The file is as long
as the real one, and has no bytes on the disk for the other layers. `repeat_layers` has LEMA look
for those where the first layer's are. Each of them is copied to the device as if it were its own;
only its values are not.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lema.storage import GlobalBinaryIndex
from lema.storage.header import TensorRecord
from lema.stream.placement import DTYPES
from lema.train.opened import model
from lema_tools.models.checkpoints import Checkpoint
from lema_tools.models.published import write_hollow

__all__ = ["RepeatedIndex", "repeat_layers", "write_repeated"]

LAYER = re.compile(r"^(.*\blayers\.)(\d+)(\..*)$")
VALUES = 33_554_393  # in a block of random values, which is read round and round; a prime
STEP = 7_919  # values between the beginnings of two tensors in the block, so that no two are alike
SPREAD = 0.02  # of weights, whose mean is zero
# A scale of mxfp4 is an exponent plus 127. Values of a block are up to 6, so these give weights of
# about SPREAD.
SCALES = (117, 122)


class RepeatedIndex(GlobalBinaryIndex):
    """Where the tensors of a model lie, every layer where the first does."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        for name, record in list(self.items()):
            if parts := LAYER.match(name):
                first = self[f"{parts[1]}0{parts[3]}"]
                assert (first.dtype, first.shape) == (record.dtype, record.shape), (
                    f"{name} is not as the first layer's"
                )
                self[name] = replace(first, name=name)


def repeat_layers() -> None:
    """Have every model that this process opens from now on take the bytes of its first layer for
    all layers.
    """
    model.GlobalBinaryIndex = RepeatedIndex  # type: ignore[misc]


def write_repeated(checkpoint: Checkpoint, directory: Path) -> int:
    """Write a checkpoint with the values of its first layer alone; return the bytes that the whole
    of it has.

    Raises:
        OSError: the first layer, or what is outside the layers, finds no room.
    """
    write_hollow(checkpoint, directory)
    index = GlobalBinaryIndex(directory)
    (file,) = index.files
    blocks: dict[str, Any] = {}
    with file.open("r+b", buffering=0) as out:
        for number, (name, record) in enumerate(index.items()):
            parts = LAYER.match(name)
            if parts is None or parts[2] == "0":
                kind = _kind(record)
                if kind not in blocks:
                    blocks[kind] = _block(kind, record.dtype)
                out.seek(record.offset)
                for piece in _pieces(blocks[kind], number * STEP, record.nbytes):
                    out.write(piece)
    return index.nbytes


def _kind(record: TensorRecord) -> str:
    """Return what a tensor's values are like."""
    if record.dtype in ("U8", "I8"):
        return "scales" if record.name.endswith("_scales") else "codes"
    return f"{record.dtype}, around {1 if 'norm' in record.name else 0}"


def _block(kind: str, dtype: str) -> np.ndarray[Any, Any]:
    """Return random values of a kind, as bytes `[values, bytes of a value]`."""
    generator = torch.Generator().manual_seed(0)
    if kind in ("codes", "scales"):
        low, high = SCALES if kind == "scales" else (0, 256)
        values = torch.randint(low, high, (VALUES,), dtype=torch.uint8, generator=generator)
    else:
        normal = torch.randn(VALUES, generator=generator) * SPREAD + int(kind[-1])
        values = normal.to(DTYPES[dtype])
    return values.unsqueeze(1).view(torch.uint8).numpy()


def _pieces(block: np.ndarray[Any, Any], start: int, nbytes: int) -> Iterator[memoryview]:
    """Yield `nbytes` of a block that begins anew where it ends."""
    start %= len(block)
    while nbytes:
        piece = block[start:].reshape(-1)[:nbytes]
        yield memoryview(piece)
        nbytes -= len(piece)
        start = 0
