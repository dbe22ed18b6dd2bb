"""What LEMA asks of a library that quantises and expands weights: a module with these names."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lema.storage.index import GlobalBinaryIndex
from lema.storage.quantized.records import PartSpecs, QuantizedRecord

__all__ = ["Library"]


class Library(Protocol):
    """A format of quantised weights. A parameter is stored as several parts, whose names the
    library chooses.

    Attributes:
        KINDS: what `lema prepare --quantize` calls the forms that it writes.
    """

    KINDS: tuple[str, ...]

    def takes(self, shape: Sequence[int]) -> bool:
        """Whether a weight of this shape can be quantised."""

    def specs(
        self, kind: str, shape: Sequence[int], dtype: torch.dtype
    ) -> tuple[PartSpecs, dict[str, Any]]:
        """Return the dtype and shape of each part of a weight, and what the library says of it."""

    def quantize(self, kind: str, weight: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the parts of a weight, and what the library says of it."""

    def expand(self, parts: Mapping[str, Tensor], about: Mapping[str, Any], out: Tensor) -> None:
        """Fill `out`, on any device, with the weight that the parts stand for."""

    def find(self, index: GlobalBinaryIndex) -> list[QuantizedRecord]:
        """Return the parameters that the library has quantised, of all tensors of a checkpoint."""

    def part_of_quantized(
        self, record: QuantizedRecord, axis: int, ranges: Sequence[tuple[int, int]]
    ) -> QuantizedRecord:
        """Return ranges of a parameter along an axis, for a process that has only these."""

    def cut_rows(self, record: QuantizedRecord, first: int, end: int) -> QuantizedRecord:
        """Return some rows, and read no more. `ValueError`: rows are not stored apart."""

    def part_name(self, parameter: str, part: str) -> str:
        """Return what a part is called in a file."""

    def metadata(self, abouts: Mapping[str, Mapping[str, Any] | None]) -> dict[str, str]:
        """Return entries for a file's header, given what is said of each tensor; None: it is not
        quantised."""

    def settings(self, kind: str, dtype: torch.dtype, unchanged: Sequence[str]) -> dict[str, Any]:
        """Return the `quantization_config` of a model; modules `unchanged` are not quantised."""
