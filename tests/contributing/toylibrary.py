"""A library that quantises and expands: whole numbers of 8 bits, and a power of two for each row.

It is a module with the names of `lema.storage.quantized.library.Library`. `lema prepare --quantize`
writes what it makes, and checkpoints that it wrote stream.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from toyform import METHOD, codes_of

from lema.storage.index import GlobalBinaryIndex
from lema.storage.quantized.records import (
    PartSpecs,
    QuantizedRecord,
    collected,
    cut_when_expanded,
)

LIBRARY = "toy"
KINDS: tuple[str, ...] = ("rows8",)
CODES = "codes"
SCALES = "scales"


def takes(shape: Sequence[int]) -> bool:
    """Matrices alone, none of experts."""
    return len(shape) == 2


def specs(kind: str, shape: Sequence[int], dtype: torch.dtype) -> tuple[PartSpecs, dict[str, Any]]:
    parts: PartSpecs = {CODES: (torch.int8, tuple(shape)), SCALES: (torch.float32, (shape[0], 1))}
    return parts, {}


def quantize(kind: str, weight: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    codes, scales = codes_of(weight.float())
    return {CODES: codes.to(torch.int8), SCALES: scales}, {}


def expand(parts: Mapping[str, Tensor], about: Mapping[str, Any], out: Tensor) -> None:
    out.copy_(parts[CODES].float() * parts[SCALES])


def find(index: GlobalBinaryIndex) -> list[QuantizedRecord]:
    """Return the parameters whose codes are stored, by the names that `part_name` gives."""
    ending = part_name("", CODES)
    records = list[QuantizedRecord]()
    for stored in index:
        if stored.endswith(ending):
            name = stored.removesuffix(ending)
            parts = collected(
                index, name, {part: part_name(name, part) for part in (CODES, SCALES)}
            )
            records.append(QuantizedRecord(name, LIBRARY, parts, parts[CODES].shape, {}))
    return records


part_of_quantized = cut_when_expanded  # `torchao.py` reads no more of a weight than is wanted


def cut_rows(record: QuantizedRecord, first: int, end: int) -> QuantizedRecord:
    """Only rows of experts are asked for, and `takes` refuses these."""
    raise ValueError(f"{record.name} is no stack of experts")


def part_name(parameter: str, part: str) -> str:
    return f"{parameter}.toy_{part}"


def metadata(abouts: Mapping[str, Mapping[str, Any] | None]) -> dict[str, str]:
    return {}


def settings(kind: str, dtype: torch.dtype, unchanged: Sequence[str]) -> dict[str, Any]:
    return {"quant_method": METHOD, "bits": 8, "modules_to_not_convert": list(unchanged)}
