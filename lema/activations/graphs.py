"""Graphs that wait for their backward with what they hold off the device: in host memory, or on disk.

Each micro-batch's graph through each layer is one order of pieces. The backward takes the graphs in turn, the top
layer's first, and while one is differentiated the copies of the next begin.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from lema.activations.castweights import CastWeight
from lema.activations.choice import Everything
from lema.activations.counters import Counters, Kept
from lema.activations.diskstore import DiskStore
from lema.activations.moved import Line, Offload, Packed
from lema.activations.seams import Carrier, Store
from lema.activations.stores import HostPool, HostStore
from lema.activations.weights import Weights
from lema.boundaries import TierName
from lema.offload import OffloadFile
from lema.trace import NO_TRACE, NoTrace

__all__ = ["STAGING", "GraphsAway", "StepGraphs"]

STASH = 5  # pieces that leave while compute goes on, and that come back ahead of it
STAGING = 256 * 2**20  # bytes of host memory through which things go to the disk and come back


class GraphsAway:
    """Where what the graphs of a model's steps hold waits.

    Args:
        model: whose parameters and buffers stay.
        carrier: of the device.
        tier: "host" or "disk".
        directory: where the file of the tier on disk lies; None: where the system keeps temporary files.
        at_once: hold nothing on the device for a copy's sake, and begin no copy before it is wanted.
        staging: bytes of host memory through which things go to the disk.
        trace: records what is written and read.
    """

    def __init__(
        self,
        model: nn.Module,
        carrier: Carrier,
        tier: TierName,
        directory: Path | None = None,
        *,
        at_once: bool = False,
        staging: int = STAGING,
        trace: NoTrace = NO_TRACE,
    ) -> None:
        assert tier in ("host", "disk"), f"graphs do not go away to the {tier}"
        self.tier = tier
        self._weights, self._carrier, self._trace = Weights(model), carrier, trace
        self._directory = directory or Path(tempfile.gettempdir())
        self._at_once, self._staging = at_once, staging
        self._held: set[int] = set()  # storages that the graph now built may hold as they are
        self._offload: Offload | None = None
        self._counters = Counters()  # once it is closed

    @property
    def counters(self) -> Counters:
        """What was moved so far."""
        return self._counters if self._offload is None else self._offload.counters

    @property
    def live_bytes(self) -> int:
        """Bytes that wait for a backward."""
        return 0 if self._offload is None else self._offload.live_bytes

    def step(self) -> StepGraphs:
        """Return what takes the graphs of one step.

        Raises:
            DiskError: no file can be made.
        """
        if self._offload is None:
            choice = Everything(self._weights, self._is_here, held=self._held)
            ahead = 1 if self._at_once else STASH
            self._offload = Offload(
                choice, self._store(), lambda _: self._carrier, stash=ahead, fetch=not self._at_once
            )
        self._weights.refresh()
        return StepGraphs(self._offload, self._held)

    def close(self) -> None:
        """Give the memory back, or the disk space."""
        if self._offload is not None:
            self._counters = self._offload.counters
            self._offload.close()
        self._offload = None

    def _store(self) -> Store:
        pool = HostPool(self._carrier.host_buffer, self._staging if self.tier == "disk" else None)
        if self.tier == "host":
            return HostStore(pool)
        file = OffloadFile(
            self._directory,
            "activations",
            "free some space, set offload_dir to a directory on another disk, or use gradient_checkpointing: true",
            self._trace,
        )
        return DiskStore(file, pool)

    def _is_here(self, kind: str) -> bool:
        return kind == self._carrier.device.type


class StepGraphs:
    """The graphs of one step; see `GraphsAway.step`."""

    def __init__(self, offload: Offload, held: set[int]) -> None:
        self._offload, self._held = offload, held
        self._lines: dict[tuple[int, int], Line] = {}

    def keep(self, layer: int, index: int, held: Iterable[Tensor]) -> Callable[[Tensor], Packed]:
        """Return what packs tensors of the graph of micro-batch `index` through `layer`, which is built next.

        Args:
            layer: its number.
            index: of the micro-batch.
            held: tensors that somebody holds until the backward: they stay.
        """
        self._held.clear()
        self._held.update(tensor.untyped_storage()._cdata for tensor in held)
        line = self._lines[layer, index] = self._offload.line()
        return partial(self._pack, line=line)

    def _pack(self, tensor: Tensor, line: Line) -> Packed:
        if (cast := CastWeight.of(tensor)) is None:
            return self._offload.pack(tensor, line)
        counters = self._offload.counters
        counters.seen += 1
        counters.kept[Kept.CAST] += 1
        return cast

    def turn(self) -> None:
        """Every graph is built: hold nothing of them on the device, for what comes next needs the room."""
        self._held.clear()
        self._offload.let_go()

    def expect(self, layer: int, index: int = 0) -> None:
        """Begin to bring back what a graph holds; one that there is not is the end."""
        if (line := self._lines.get((layer, index))) is not None:
            self._offload.expect(line)

    def expect_after(self, layer: int, index: int) -> None:
        """Begin to bring back what the graph holds that is differentiated after this one."""
        following = (layer, index + 1)
        self.expect(*(following if following in self._lines else (layer - 1, 0)))
