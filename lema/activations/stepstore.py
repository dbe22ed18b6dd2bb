"""What a streamed step keeps from its forward to its backward: graphs of layers, and the layers'
inputs.

The inputs (boundary activations) lie in memory, or in a file, that serves every step, because
tensors kept one by one would lie in the heap between the short-lived tensors of their layers and
leave holes that grow with the model's depth. Of layers that are not recomputed the saved tensors of
each micro-batch's graph are one order of pieces. The backward takes the graphs in turn, and while
one is differentiated the copies for the next one begin.
"""

import tempfile
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from lema.activations.boundaries import Key, Tier, TierName, make_tier
from lema.activations.chunks.cuts import Cuts
from lema.activations.diskstore import DiskStore
from lema.activations.hoststore import HostPool, HostStore
from lema.activations.offload import Offload, Order, Packed
from lema.activations.pieces import Piece
from lema.activations.policy import WeightStorages, WeightView, everything
from lema.activations.protocols import Counters, StayReason, Store
from lema.backend import Carrier
from lema.backend.trace import NO_TRACE, NoTrace
from lema.storage.spillfile import OffloadFile

__all__ = [
    "STAGING",
    "BoundaryArena",
    "BoundaryChunks",
    "SavedGraphs",
    "StepBoundaries",
    "StepGraphs",
    "graphs_in_host",
    "graphs_on_device",
]

STASH = 5  # pieces that leave while compute goes on, and that come back ahead of it
STAGING = 256 * 2**20  # bytes of host memory through which things go to the disk and come back


class SavedGraphs:
    """Where what the graphs of a model's steps hold waits; the model's own parameters and buffers
    stay. A file is in `directory`; None: where the system keeps temporary files. `at_once`: no copy
    holds device memory or is early."""

    def __init__(
        self,
        model: nn.Module,
        carrier: Carrier,
        tier: TierName,
        directory: Path | None = None,
        *,
        at_once: bool = False,
        trace: NoTrace = NO_TRACE,
    ) -> None:
        assert tier in ("host", "disk"), f"graphs do not go away to the {tier}"
        self.tier = tier
        self._weights = WeightStorages(model)
        self._carrier = carrier
        self._trace = trace
        self._directory = directory or Path(tempfile.gettempdir())
        self._at_once = at_once
        # storages that the graph now built may hold as they are
        self._excluded_storages: set[int] = set()
        self._offload: Offload | None = None
        self.counters = Counters()  # bytes moved so far

    @property
    def live_bytes(self) -> int:
        """Bytes that wait for a backward."""
        return 0 if self._offload is None else self._offload.live_bytes

    def step(self) -> "StepGraphs":
        """Return what takes the graphs of one step; a file that cannot be made is a `DiskError`."""
        if self._offload is None:
            choice = everything(
                self._weights,
                {self._carrier.device.type},
                excluded_storages=self._excluded_storages,
            )
            ahead = 1 if self._at_once else STASH
            self._offload = Offload(
                choice,
                self._store(),
                lambda _: self._carrier,
                stash=ahead,
                fetch=not self._at_once,
                counters=self.counters,
            )
        self._weights.refresh()
        return StepGraphs(self._offload, self._excluded_storages)

    def close(self) -> None:
        """Give the memory back, or the disk space."""
        if self._offload is not None:
            self._offload.close()
        self._offload = None

    def _store(self) -> Store:
        pool = HostPool(self._carrier.host_buffer, STAGING if self.tier == "disk" else None)
        if self.tier == "host":
            return HostStore(pool)
        file = OffloadFile(
            self._directory,
            "activations",
            (
                "free some space, set offload_dir to a directory on another disk, or use "
                "gradient_checkpointing: true"
            ),
            self._trace,
        )
        return DiskStore(file, pool)


class StepGraphs:
    """The graphs of one step; see `SavedGraphs.step`."""

    def __init__(self, offload: Offload, excluded_storages: set[int]) -> None:
        self._offload = offload
        self._excluded_storages = excluded_storages
        self._orders: dict[tuple[int, int], Order[Piece]] = {}

    def keep(
        self, layer: int, index: int, excluded: Iterable[Tensor]
    ) -> Callable[[Tensor], Packed]:
        """Return what packs the next graph's tensors, of micro-batch `index` through `layer`;
        those `excluded` stay.
        """
        self._excluded_storages.clear()
        self._excluded_storages.update(tensor.untyped_storage()._cdata for tensor in excluded)
        order = self._orders[layer, index] = self._offload.order()

        def pack(tensor: Tensor) -> Packed:
            if (cast := WeightView.of_cast(tensor)) is None:
                return self._offload.pack(tensor, order)
            self._offload.counters.count_saved()
            self._offload.counters.count_stay(StayReason.CAST)
            return cast

        return pack

    def end_forward(self) -> None:
        """Move all graphs off the device once every graph is built, because the next phase needs
        the room.
        """
        self._excluded_storages.clear()
        self._offload.let_go()

    def expect(self, layer: int, index: int = 0) -> None:
        """Begin to bring back what a graph holds; one that there is not is the end."""
        if (order := self._orders.get((layer, index))) is not None:
            self._offload.expect(order)

    def expect_after(self, layer: int, index: int) -> None:
        """Begin to bring back what the graph holds that is differentiated after this one."""
        following = (layer, index + 1)
        self.expect(*(following if following in self._orders else (layer - 1, 0)))


class BoundaryArena:
    """Where the boundary activations of a model's steps wait: on the device, in host memory or on
    disk, as `tier` says. The file is in `directory`; None: where the system keeps temporary files.
    """

    def __init__(
        self,
        backend: Carrier,
        tier: TierName = "device",
        directory: Path | None = None,
        trace: NoTrace = NO_TRACE,
    ) -> None:
        self._backend = backend
        self.tier = tier
        self._trace = trace
        self._directory = directory or Path(tempfile.gettempdir())
        self._storage_tier: Tier | None = None
        self._away = Counters()
        self._step: weakref.ref[StepBoundaries] | None = None

    @property
    def memory_bytes(self) -> int:
        """The bytes of memory that boundaries have; those on their way to a layer not counted."""
        return 0 if self._storage_tier is None else self._storage_tier.memory_bytes

    @property
    def bytes_away(self) -> int:
        """The bytes of boundaries that have left the device so far."""
        return 0 if self.tier == "device" else self._away.bytes_out

    def step(
        self,
        hidden: Sequence[Tensor],
        layers: Collection[int],
        cuts: Mapping[tuple[int, int], Cuts] | None = None,
    ) -> "StepBoundaries":
        """Return where the boundaries of one step go, of the `layers` that keep their inputs.
        `hidden` are the hidden states before the first of these, `[batch, sequence, hidden]` per
        micro-batch; where those of later layers look otherwise, more room is made on the way. The
        memory of the step before is used again, unless that step still waits for its backward.
        `cuts`: of each layer and micro-batch, the chunks that the layer is given one after the
        other; None: it is given all at once. `DiskError`: the disk has no room."""
        before = None if self._step is None else self._step()
        if self._storage_tier is None or (before is not None and not before.done):
            self._storage_tier = make_tier(self.tier, self._backend, self._directory, self._trace)
        step = StepBoundaries(self._storage_tier, hidden, layers, self._trace, self._away, cuts)
        self._step = weakref.ref(step)
        return step

    def close(self) -> None:
        """Give the memory back, or the disk space."""
        if self._storage_tier is not None:
            self._storage_tier.close()
        self._storage_tier = None


class StepBoundaries:
    """The boundary activations of one step; see `BoundaryArena.step`."""

    def __init__(
        self,
        tier: Tier,
        hidden: Sequence[Tensor],
        layers: Collection[int],
        trace: NoTrace,
        counters: Counters,
        cuts: Mapping[tuple[int, int], Cuts] | None = None,
    ) -> None:
        self._tier = tier
        self._trace = trace
        self._counters = counters
        # the order in which the backward asks for them: the top layer's first, each layer's in the
        # order of micro-batches, and of each micro-batch as its cuts say
        self._order: list[Key] = []
        likes = dict[Key, Tensor]()
        for layer in sorted(layers, reverse=True):
            for index, state in enumerate(hidden):
                if cuts is None:
                    self._order.append((layer, index, 0))
                    likes[layer, index, 0] = _like(state)
                    continue
                in_chunks = cuts[layer, index]
                self._order += [(layer, index, number) for number in in_chunks.order]
                likes |= {
                    (layer, index, number): cut.like(state)
                    for number, cut in enumerate(in_chunks.chunks)
                }
        self._to_come = len(likes)
        self._to_fetch = len(self._order)
        self._saved_chunks = set[Key]()
        tier.begin([*likes.values()])

    @property
    def done(self) -> bool:
        """Whether every boundary has been fetched."""
        return self._to_fetch == 0

    def keep(self, layer: int, index: int, state: Tensor) -> Tensor:
        """Keep a copy of micro-batch `index`'s input to `layer`; return what the layer is to
        compute with. It has the copy's strides, so that the recomputation rounds as the forward
        did. `DiskError`: a boundary was not written."""
        layer_input, like = _as_copied(state)
        with self._trace.span("boundaries", f"keep layer {layer}"):
            self._tier.keep((layer, index, 0), layer_input, like, self._to_come - 1)
        self._count(like.nbytes)
        if self._to_come == 0:
            self._tier.end_forward(self._order)
        return layer_input

    @contextmanager
    def keeping(self, layer: int, index: int, number: int, chunk: Tensor) -> Iterator[Tensor]:
        """Keep a copy of one chunk of an input while a `with` block computes with what this yields,
        whose memory may be used again afterwards. A chunk of a micro-batch whose forward is
        attempted again is kept already. Other arguments, and errors, are those of `keep`."""
        key = (layer, index, number)
        if key in self._saved_chunks:
            yield chunk.detach().contiguous()
            return
        layer_input, like = _as_copied(chunk)
        with self._trace.span("boundaries", f"keep layer {layer}"):
            download = self._tier.keep_chunk(key, layer_input, like, self._to_come - 1)
        self._count(like.nbytes)
        self._saved_chunks.add(key)
        try:
            yield layer_input
        finally:
            download.release()

    def end_chunks(self) -> None:
        """Begin to fetch, if the last chunk of all has been kept, and computed with."""
        if self._to_come == 0:
            self._tier.end_forward(self._order)

    def _count(self, nbytes: int) -> None:
        """Count what is being copied away."""
        self._to_come -= 1
        assert self._to_come >= 0, "more boundaries came than the step has"
        self._counters.count_copy_out(nbytes)

    @contextmanager
    def fetch(
        self, layer: int, index: int, number: int = 0, *, again: bool = False
    ) -> Iterator[Tensor]:
        """Yield what was kept, on the device, for the length of a `with` block. The top layer's
        come first, each layer's in the order of micro-batches, and the chunks of each as its cuts
        say, once in each backward; `again`: another backward comes, in which all are there once
        more. `ReadError`, `DiskError`: one could not be read, or written."""
        with closing(self._tier.fetched((layer, index, number), again=again)) as fetched:
            with self._trace.span("boundaries", f"fetch layer {layer}"):
                boundary = next(fetched)
            yield boundary
            self._to_fetch -= 1
            next(fetched, None)
        if again and self._to_fetch == 0:
            self._to_fetch = len(self._order)
            self._tier.end_forward(self._order)


class BoundaryChunks:
    """The chunks of one boundary, which come back one after the other.

    Args:
        boundaries: of the step.
        layer: whose input it is.
        index: of which micro-batch.
        again: whether another backward comes, as in `StepBoundaries.fetch`.
    """

    def __init__(
        self, boundaries: StepBoundaries, layer: int, index: int, *, again: bool = False
    ) -> None:
        self._boundaries = boundaries
        self._layer = layer
        self._index = index
        self._again = again

    def chunk(self, number: int) -> AbstractContextManager[Tensor]:
        """Return a context that yields a chunk; see `lema.activations.chunks.cuts.ChunkInputs`."""
        return self._boundaries.fetch(self._layer, self._index, number, again=self._again)


def _as_copied(state: Tensor) -> tuple[Tensor, Tensor]:
    """Return a state with the strides of its copy, and what that looks like."""
    like = _like(state)
    return state.detach() if like.stride() == state.stride() else state.detach().clone(), like


def _like(state: Tensor) -> Tensor:
    """Return what a copy of `state` looks like: dtype, shape and, where it has no holes,
    strides.
    """
    return torch.empty_like(state, device="meta", requires_grad=False)


def graphs_on_device(staying: Iterable[int], passing: Iterable[int]) -> int:
    """Return the bytes of saved graphs on the device at the peak of a step, as a plan counts them.

    Args:
        staying: bytes of each layer's that wait there.
        passing: bytes of each layer's of one micro-batch that wait elsewhere: on the way up the
            largest is just leaving, and on the way down it is the next that comes back.
    """
    return sum(staying) + max(passing, default=0)


def graphs_in_host(tier: TierName, nbytes: int) -> int:
    """Return the bytes of host memory of graphs of so many bytes that wait in a tier; to the disk
    and back they pass through a pool of it."""
    return {"device": 0, "host": nbytes, "disk": min(nbytes, STAGING)}[tier]
