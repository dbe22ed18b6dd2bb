"""The quantised formats, each with the library that quantises to it and expands it again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lema.storage.quantized import bitsandbytes, published, torchao

__all__ = ["KINDS", "LIBRARIES", "expand"]

# Each is a module with the same functions: `takes`, `specs`, `quantize`, `expand`, `part_name`, `metadata`, `settings`.
LIBRARIES: Mapping[str, Any] = {"torchao": torchao, "bitsandbytes": bitsandbytes}
KINDS: Mapping[str, str] = {"int8": "torchao", "fp8": "torchao", "nf4": "bitsandbytes"}


@torch.no_grad()
def expand(library: str, parts: Mapping[str, Tensor], about: Mapping[str, Any], out: Tensor) -> None:
    """Fill `out` with the weight that the parts stand for, in its dtype: bitwise what the library dequantises."""
    expander = published.expand if library == published.LIBRARY else LIBRARIES[library].expand
    expander(parts, about, out)
