"""The quantised formats, each with the library that quantises to it and expands it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from lema.storage.quantized import bitsandbytes as ofbits
from lema.storage.quantized import published
from lema.storage.quantized import torchao as ofao
from lema.storage.quantized.records import PartSpecs

__all__ = ["KINDS", "LIBRARIES", "Library", "expand"]


class Library(Protocol):
    """How one library stores quantised weights; a module of this package each."""

    def takes(self, shape: Sequence[int]) -> bool:
        """Whether a weight of this shape can be quantised."""

    def specs(self, kind: str, shape: Sequence[int], dtype: torch.dtype) -> tuple[PartSpecs, dict[str, Any]]:
        """Say what a weight becomes."""

    def quantize(self, kind: str, weight: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the parts of a weight, and what the library says of it."""

    def expand(self, parts: Mapping[str, Tensor], about: Mapping[str, Any], out: Tensor) -> None:
        """Fill `out` with what the library dequantises the parts to."""

    def part_name(self, parameter: str, part: str) -> str:
        """Return what a part is called in a file."""

    def metadata(self, abouts: Mapping[str, Mapping[str, Any] | None]) -> dict[str, str]:
        """Return what the library writes into a file's header; None: a tensor that is not quantised."""

    def settings(self, kind: str, dtype: torch.dtype, unchanged: Sequence[str]) -> dict[str, Any]:
        """Return the `quantization_config` by which `transformers` loads what is written."""


LIBRARIES: Mapping[str, Library] = {"torchao": cast(Library, ofao), "bitsandbytes": cast(Library, ofbits)}
KINDS: Mapping[str, str] = {"int8": "torchao", "fp8": "torchao", "nf4": "bitsandbytes"}


@torch.no_grad()
def expand(library: str, parts: Mapping[str, Tensor], about: Mapping[str, Any], out: Tensor) -> None:
    """Fill `out` with the weight that the parts stand for, in its dtype: bitwise what the library dequantises."""
    expander = published.expand if library == published.LIBRARY else LIBRARIES[library].expand
    expander(parts, about, out)
