"""What offloading is told to move (`Choice`), why the rest stays, and the counters of what was
done.

Where to is a store (`lema.activations.diskstore.Store`); how bytes travel is
`lema.backend.Carrier`, as every backend.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from torch import Tensor

__all__ = ["Choice", "Counters", "StayReason"]


class StayReason(StrEnum):
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
    REFERENCED = "held by other code until the backward"
    UNCHOSEN = "not a tensor that this mode moves"
    FULL = "no space for it"


@dataclass
class Counters:
    """Counted from the beginning, or since `reset`."""

    seen: int = 0  # tensors that autograd saved
    moved: int = (
        0  # of these, those that wait elsewhere; several that share memory are moved together
    )
    restored: int = 0  # how often a moved one was requested
    kept: Counter[StayReason] = field(default_factory=Counter)  # those that stayed, by reason
    copies_out: int = 0  # pieces of memory that were copied away
    copies_back: int = 0  # pieces of memory that were copied back
    bytes_out: int = 0  # of these, in bytes
    bytes_back: int = 0  # in the same way
    # tensors requested while their memory was still on the device, so that nothing was copied
    early: int = 0

    def count_saved(self) -> None:
        """Count a tensor that autograd saves."""
        self.seen += 1

    def count_stay(self, reason: StayReason) -> None:
        """Count a saved tensor that stays where it is."""
        self.kept[reason] += 1

    def count_move(self) -> None:
        """Count a saved tensor that is to wait elsewhere."""
        self.moved += 1

    def count_request(self) -> None:
        """Count that a moved tensor is requested."""
        self.restored += 1

    def count_early_request(self) -> None:
        """Count that a requested tensor's memory is still on the device."""
        self.early += 1

    def count_copy_out(self, nbytes: int) -> None:
        """Count a copy of so many bytes away from the device."""
        self.copies_out += 1
        self.bytes_out += nbytes

    def count_copy_back(self, nbytes: int) -> None:
        """Count a copy of so many bytes back to the device."""
        self.copies_back += 1
        self.bytes_back += nbytes

    def reset(self) -> None:
        """Begin again."""
        self.__init__()  # type: ignore[misc] # every field at its default

    def to_dict(self) -> dict[str, Any]:
        """Return them as plain JSON types."""
        plain = {name: value for name, value in vars(self).items() if name != "kept"}
        return {**plain, "kept": {reason.value: count for reason, count in self.kept.items()}}


Choice = Callable[[Tensor], StayReason | None]
"""What to move: returns why a tensor that autograd is about to save stays where it is; None: it
is to be moved.
"""
