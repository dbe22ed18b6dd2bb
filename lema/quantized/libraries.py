"""The libraries that quantise and expand: imported only when a quantised model is prepared or opened."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lema.errors import ConfigError
from lema.quiet import hushed

__all__ = ["PartSpecs", "flat_pieces", "pieces", "quiet_import"]

PartSpecs = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # part -> dtype, shape

# Both libraries make temporaries of several bytes per weight: of a piece they fit a processor's cache, of a whole
# weight they would be larger than the layer. A device with thousands of cores wants larger pieces.
PIECE_ON_HOST, PIECE_ON_DEVICE = 1 << 20, 1 << 24  # weights


def quiet_import(module: str) -> Any:
    """Import a module of one of the libraries.

    Raises:
        ConfigError: the library is not installed.
    """
    try:
        with hushed():
            return importlib.import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        raise ConfigError(
            f"the weights are quantised in the format of {library}, which cannot be imported: {error}",
            where=library,
            how='pip install "lema[quantize]"',
        ) from error


def pieces(tensor: Tensor) -> Iterator[slice]:
    """Cut a tensor along its first dimension."""
    size = max(1, _piece(tensor) * tensor.shape[0] // max(tensor.numel(), 1))
    return _cut(tensor.shape[0], size)


def flat_pieces(tensor: Tensor, block: int) -> Iterator[slice]:
    """Cut a flat tensor between blocks."""
    return _cut(tensor.numel(), max(1, _piece(tensor) // block) * block)


def _piece(tensor: Tensor) -> int:
    return PIECE_ON_HOST if tensor.device.type == "cpu" else PIECE_ON_DEVICE


def _cut(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))
