"""What offloading did: tensors seen, moved and brought back, those that stayed and why, bytes each way."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

__all__ = ["Counters", "Kept"]


class Kept(StrEnum):
    """Why a tensor that autograd saves stays where it is."""

    ELSEWHERE = "not on the device"
    SMALL = "smaller than min_offload_size"
    WEIGHT = "a weight, or a view of one"
    CAST = "a weight, cast by autocast"
    QUANTIZED = "of a quantised or other special class"
    LAYOUT = "sparse, nested, or lazily conjugated"
    EXCLUDED = "in an excluded module"
    LOSS = "of the output head or the loss"
    BACKWARD = "saved while a backward runs"
    HELD = "held by others until the backward"
    UNCHOSEN = "not of the kind that this mode moves"
    FULL = "no room for it"


@dataclass
class Counters:
    """Counted from the beginning, or since `reset`.

    Attributes:
        seen: tensors that autograd saved.
        moved: of these, those that wait elsewhere; several that share memory are moved together.
        restored: how often one was asked for and had been moved.
        kept: those that stayed, by reason.
        copies_out: pieces of memory that were copied away.
        copies_back: pieces of memory that were copied back.
        bytes_out: of these, in bytes.
        bytes_back: likewise.
        early: tensors asked for while their memory was still on the device, so that nothing was copied.
    """

    seen: int = 0
    moved: int = 0
    restored: int = 0
    kept: Counter[Kept] = field(default_factory=Counter)
    copies_out: int = 0
    copies_back: int = 0
    bytes_out: int = 0
    bytes_back: int = 0
    early: int = 0

    def reset(self) -> None:
        """Begin again."""
        self.__init__()  # type: ignore[misc] # every field at its default

    def to_dict(self) -> dict[str, Any]:
        """Return them as plain JSON types."""
        plain = {name: value for name, value in vars(self).items() if name != "kept"}
        return {**plain, "kept": {reason.value: count for reason, count in self.kept.items()}}
