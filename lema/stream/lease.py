"""A layer on lease: its weights as views of device memory, and references to them that pin nothing.

Quantised weights are expanded, on the device, into memory that every layer uses in turn.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from lema.backend import Backend
from lema.storage.quantized import formats
from lema.stream.counters import StreamMeter
from lema.stream.placement import LayerBytes, view, views
from lema.stream.slotlayout import VECTOR

__all__ = [
    "NAN_BYTE",
    "ExpandedBuffers",
    "Lease",
    "OpenLeases",
    "WeightReference",
    "expand_into",
]

NAN_BYTE = 0xFF  # every floating dtype reads a word of ones as NaN


@dataclass(frozen=True)
class WeightReference:
    """A view of a leased weight as data: where it lies in its layer's slot, or among its
    expanded weights.
    """

    layer: int
    offset: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    expanded: bool = False


@dataclass(frozen=True)
class Lease:
    """One layer's weights, valid until the lease ends."""

    layer: int  # its number
    slot: Tensor  # the bytes of the layer, as they are stored
    weights: dict[str, Tensor]  # parameter name -> view of the slot, or of `expanded`
    # what quantised weights were expanded into; None: none is quantised
    expanded: Tensor | None = None

    @property
    def has_address(self) -> bool:
        """Whether its memory can be pointed at. On a lazy device it cannot: nothing refers to
        weights by place.
        """
        return self.slot.is_meta or not self.slot.numel() or self.slot.data_ptr() != 0

    def refer(self, tensor: Tensor) -> WeightReference | None:
        """Return where `tensor` lies in the lease's memory; None: elsewhere, or it has no
        elements and so no place.
        """
        # asked first: the answer costs least, and nearly every tensor lies elsewhere
        address = tensor.data_ptr()
        if not address:
            return None
        for memory in (self.slot, self.expanded):
            if memory is None or not 0 <= (start := address - memory.data_ptr()) < memory.numel():
                continue  # slots may share one storage; a tensor without elements is at 0
            if tensor.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr():
                expanded = memory is self.expanded
                return WeightReference(
                    self.layer, start, tensor.dtype, tensor.shape, tensor.stride(), expanded
                )
        return None

    def resolve(self, reference: WeightReference) -> Tensor:
        """Return the view that `reference` names, in this lease's memory."""
        assert reference.layer == self.layer, (
            "a weight reference was resolved against another layer's lease"
        )
        memory = self.expanded if reference.expanded else self.slot
        assert memory is not None, (
            "a reference to an expanded weight was resolved against a lease without any"
        )
        spans = zip(reference.shape, reference.stride, strict=True)
        extent = 1 + sum((size - 1) * stride for size, stride in spans)
        nbytes = extent * reference.dtype.itemsize
        flat = memory[reference.offset : reference.offset + nbytes].view(reference.dtype)
        return flat.as_strided(reference.shape, reference.stride, flat.storage_offset())


def expand_into(expanded: Tensor, slot: Tensor, layer: LayerBytes) -> None:
    """Expand the quantised weights in `slot` into `expanded`, uint8 `[at least
    layer.expanded_bytes]`.
    """
    # counts its changes by itself: graphs refer to weights by place, not by what was there
    memory = expanded.data
    scratch = memory[layer.expanded_bytes - layer.scratch_bytes : layer.expanded_bytes]
    for expansion in layer.expansions:
        parts = {part: view(slot, tensor) for part, tensor in expansion.parts.items()}
        formats.expand(
            expansion.library, parts, expansion.about, view(memory, expansion.target), scratch
        )


class ExpandedBuffers:
    """Memory that the weights of `layers` are expanded into: one buffer, or as many as have been on
    lease at once. A buffer is written to by computation on the device, so after all that was queued
    before it was given back."""

    def __init__(self, layers: Iterable[LayerBytes], backend: Backend) -> None:
        # of one buffer; 0: none is quantised
        self.nbytes = max((layer.expanded_bytes for layer in layers), default=0)
        self._device = backend.device
        self._poison = bool(getattr(backend, "poison", False))  # a backend for tests
        self._free: list[Tensor] = []

    def take(self) -> Tensor:
        """Return a buffer that is not in use."""
        return (
            self._free.pop()
            if self._free
            else torch.empty(self.nbytes, dtype=torch.uint8, device=self._device)
        )

    def give_back(self, buffer: Tensor) -> None:
        """Say that nothing will be queued any more that reads the buffer."""
        if self._poison:
            buffer.fill_(NAN_BYTE)  # and never used again: what reads it still reads NaN for ever
        else:
            self._free.append(buffer)

    def clear(self) -> None:
        """Give the memory up."""
        self._free.clear()


class OpenLeases:
    """The leases of layers that are on the device now.

    Args:
        layers: the layers, as they lie in their slots.
        num_visited: how many of these are layers; the others are parts of them.
        backend: the device.
        meter: measures how long quantised weights are expanded.
        aligned: whether every slot has to begin at an address that kernels take.

    Attributes:
        by_layer: the leases, by the number of their layer.
    """

    def __init__(
        self,
        layers: Sequence[LayerBytes],
        num_visited: int,
        backend: Backend,
        meter: StreamMeter,
        *,
        aligned: bool,
    ) -> None:
        self.by_layer: dict[int, Lease] = {}
        self._layers = layers
        self._num_visited = num_visited
        self._meter = meter
        self._aligned = aligned
        # Of a layer and of its parts one buffer each, because both are on lease at once.
        self._expanded = tuple(
            ExpandedBuffers(group, backend)
            for group in (layers[:num_visited], layers[num_visited:])
        )
        self._before: Callable[[], None] = lambda: None

    @contextmanager
    def calling(self, before_lease: Callable[[], None]) -> Iterator[None]:
        """Call a function before each lease in a `with` block; what it raises, the lease does."""
        before = self._before
        self._before = before_lease
        try:
            yield
        finally:
            self._before = before

    def prepare(self) -> None:
        """Do what comes before a lease."""
        self._before()

    @contextmanager
    def hold(self, number: int, slot: Tensor) -> Iterator[Lease]:
        """Hold the layer that lies in `slot`, with its quantised weights expanded."""
        layer = self._layers[number]
        assert not self._aligned or slot.data_ptr() % VECTOR == 0, (
            "a slot begins at an address that kernels refuse"
        )
        buffers = self._expanded[number >= self._num_visited]
        expanded = buffers.take() if layer.expansions else None
        try:
            if expanded is not None:
                with self._meter.expanding(layer.called(number), layer.expanded_bytes):
                    expand_into(expanded, slot, layer)
            lease = Lease(number, slot, views(slot, layer, expanded), expanded)
            self.by_layer[number] = lease
            yield lease
        finally:
            if (ended := self.by_layer.pop(number, None)) is not None and not ended.has_address:
                # because a lazy device would make a copy of each view that is still there
                ended.weights.clear()
            if expanded is not None:
                buffers.give_back(expanded)

    def clear(self) -> None:
        """Give the memory of expanded weights up."""
        for buffers in self._expanded:
            buffers.clear()
