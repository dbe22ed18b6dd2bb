"""What a model's steps keep of their layers for the backward, and where that waits."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from lema.activations.boundaries import TierName
from lema.activations.chunks.cuts import Cuts
from lema.activations.chunks.hostpool import HostPool
from lema.activations.stepstore import BoundaryArena, SavedGraphs, StepBoundaries, StepGraphs
from lema.backend import Backend, Carrier
from lema.backend.torchstreams import TorchCarrier
from lema.backend.trace import NoTrace
from lema.model import Split

__all__ = ["NOTHING", "Activations", "Saving"]


@dataclass(frozen=True)
class Saving:
    """What a step keeps of its layers for the backward.

    Args:
        boundaries: where the inputs of layers that are recomputed wait; None: none is recomputed.
        graphs: where what kept graphs hold waits; None: on the device.
        saved: the layers whose graph is kept although others are recomputed.
        products: the layers that keep their products by frozen weights for the recomputation.
        budget: bytes for activations of the model's top layer, which is recomputed only for the
            micro-batches that exceed them.
    """

    boundaries: StepBoundaries | None = None
    graphs: StepGraphs | None = None
    saved: Collection[int] = frozenset()
    products: Collection[int] = frozenset()
    budget: int = 0

    def boundaries_of(self, number: int) -> StepBoundaries | None:
        """Return where a layer's inputs wait; None: its graph is kept."""
        return None if number in self.saved else self.boundaries


NOTHING = Saving()


class Activations:
    """The activations of a model's steps: which are kept and where, and which are recomputed.

    Args:
        split: the model.
        backend: the device.
        trace: records when they move.
        recompute: keep only boundary activations and recompute each layer in the backward; else
            keep the graph, in which weights are references that pin nothing. On a lazy device every
            layer is recomputed.
        saved: layers whose graph is kept all the same.
        products: layers that keep their products by frozen weights for the recomputation. On a lazy
            device none does.
        saved_on: where kept graphs have what they hold wait for the backward: "device", "host" or
            "disk".
        boundaries: where boundary activations wait for the backward: "device", "host" or "disk".
        offload_dir: where what waits on disk has its file; None: where the system keeps temporary
            files.
        at_once: wait for each copy of what waits elsewhere, before the step goes on.

    Attributes:
        arena: where boundary activations wait.
        pool: has hidden states of which only a few chunks are on the device.
        graphs: has what kept graphs hold wait elsewhere; None: it stays on the device.
    """

    def __init__(
        self,
        split: Split,
        backend: Backend,
        trace: NoTrace,
        *,
        recompute: bool = True,
        saved: Collection[int] = (),
        products: Collection[int] = (),
        saved_on: TierName = "device",
        boundaries: TierName = "device",
        offload_dir: Path | None = None,
        at_once: bool = False,
    ) -> None:
        # because a graph that is kept refers to weights by address, and here would keep copies of
        # them
        self._lazy = split.lazy
        self.recompute = recompute or self._lazy
        self.saved = frozenset[int]() if self._lazy else frozenset(saved)
        self.products = frozenset(products)
        carrier: Carrier = TorchCarrier(backend.device, at_once=True) if at_once else backend
        self.arena = BoundaryArena(carrier, boundaries, offload_dir, trace)
        self.pool = HostPool(carrier, copies=not backend.memory().shared)
        self.graphs: SavedGraphs | None = None
        if saved_on != "device" and not self._lazy:
            # Because a slot is the host's buffer there, and tensors that come back would lie in it.
            if backend.memory().shared:
                carrier = TorchCarrier(backend.device, at_once=True)
            self.graphs = SavedGraphs(
                split.model, carrier, saved_on, offload_dir, at_once=at_once, trace=trace
            )

    def recompute_layers(self, enable: bool) -> None:
        """Recompute each layer in the backward, or keep its graph; a lazy device recomputes all."""
        self.recompute = enable or self._lazy

    def step(
        self,
        hidden: Sequence[Tensor],
        lowest: int,
        end: int,
        budget: int = 0,
        *,
        in_chunks: bool = False,
        cuts: Mapping[tuple[int, int], Cuts] | None = None,
    ) -> Saving:
        """Return what a step keeps of its layers.

        Args:
            hidden: the step's micro-batches before the first layer, `[batch, sequence, hidden]`.
            lowest: the lowest layer that gradients reach.
            end: the layer after the last of the pass.
            budget: bytes for activations of the top layer.
            in_chunks: whether sequences go through layers in chunks, whose graphs are not kept.
            cuts: of each layer and micro-batch, the chunks of its input, where hidden states are in
                host memory; None: layers are given whole inputs.

        Raises:
            DiskError: the disk has no space for it.
        """
        if in_chunks:
            layers = range(lowest, end)
            return Saving(self.arena.step(hidden, layers, cuts) if layers else None)
        again = [
            layer for layer in range(lowest, end) if self.recompute and layer not in self.saved
        ]
        graphs = None if self.graphs is None or lowest >= end else self.graphs.step()
        boundaries = self.arena.step(hidden, again) if again else None
        return Saving(boundaries, graphs, self.saved, self.products, budget)

    @property
    def bytes_out(self) -> int:
        """Bytes that have left the device so far."""
        of_graphs = 0 if self.graphs is None else self.graphs.counters.bytes_out
        return self.arena.bytes_away + of_graphs

    def close(self) -> None:
        """Give back the memory and the files in which activations wait."""
        self.arena.close()
        if self.graphs is not None:
            self.graphs.close()
