"""What offloading is told to move (`Choice`), why the rest stays, where it goes (`Store`), and the
counters of what was done.

Stores are in `hoststore.py` and `diskstore.py`; how bytes travel is `lema.backend.Carrier`, as
every backend.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from torch import Tensor

__all__ = ["Choice", "Counters", "StayReason", "Store", "WaitingPiece"]


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
    # of these, those that wait elsewhere; several that share memory are moved together
    moved: int = 0
    restored: int = 0  # how often a moved one was requested
    kept: Counter[StayReason] = field(default_factory=Counter)  # those that stayed, by reason
    copies_out: int = 0  # pieces of memory that were copied away
    copies_back: int = 0  # pieces of memory that were copied back
    bytes_out: int = 0  # of these, in bytes
    bytes_back: int = 0  # in the same way
    # tensors requested while their memory was still on the device, so that nothing was copied
    early: int = 0

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


class WaitingPiece(Protocol):
    """Where the bytes of one piece of device memory wait. Its methods are called from one thread at
    a time, `drop` excepted, which any thread may call at any time, also a garbage collector."""

    def fill(self) -> Tensor:
        """Return uint8 `[nbytes]` of host memory, to be filled; called once, first."""

    def filled(self, landed: Callable[[], None]) -> None:
        """Take what `fill` returned: a copy to it is on its way; `landed` blocks, in any thread,
        until it is there.
        """

    def expect(self) -> None:
        """Start bringing the bytes to host memory, if they are elsewhere and there is room.
        Never blocks.
        """

    def ready(self) -> bool:
        """Say whether `memory` would return at once."""

    def memory(self) -> Tensor:
        """Return uint8 `[nbytes]` of host memory that holds the bytes, or that a copy to it is on
        its way to; it stays until `used`."""

    def used(self, drained: Callable[[], None]) -> None:
        """Take back what `memory` returned: a copy from there is queued; `drained` blocks until
        it has ended.
        """

    def drop(self) -> None:
        """Drop the bytes. May be called twice, and in any state."""


class Store(Protocol):
    """Room for pieces, somewhere else than on the device."""

    def allocate(self, nbytes: int) -> WaitingPiece | None:
        """Return room for `nbytes`; None: there is none."""

    def close(self) -> None:
        """Give back all that nothing waits in."""
