"""A layer on lease: its weights as views of device memory, and references to them that pin nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Lease", "WeightReference"]


@dataclass(frozen=True)
class WeightReference:
    """A view of a leased weight as data: where it lies in its layer's slot, or among its expanded weights."""

    layer: int
    offset: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    expanded: bool = False


@dataclass(frozen=True)
class Lease:
    """One layer's weights, by parameter name, valid until the lease ends.

    Attributes:
        layer: its number.
        slot: the bytes of the layer, as they are stored.
        weights: parameter name -> view of the slot, or of `expanded`.
        expanded: what quantised weights were expanded into; None: none is quantised.
    """

    layer: int
    slot: Tensor
    weights: dict[str, Tensor]
    expanded: Tensor | None = None

    @property
    def has_address(self) -> bool:
        """Whether its memory can be pointed at. On a lazy device it cannot: nothing refers to weights by place."""
        return self.slot.is_meta or not self.slot.numel() or self.slot.data_ptr() != 0

    def refer(self, tensor: Tensor) -> WeightReference | None:
        """Return where `tensor` lies in the lease's memory; None: elsewhere, or it has no elements and so no place."""
        address = tensor.data_ptr()  # asked first: the answer costs least, and nearly every tensor lies elsewhere
        if not address:
            return None
        for memory in (self.slot, self.expanded):
            if memory is None or not 0 <= (start := address - memory.data_ptr()) < memory.numel():
                continue  # slots may share one storage; a tensor without elements is at 0
            if tensor.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr():
                expanded = memory is self.expanded
                return WeightReference(self.layer, start, tensor.dtype, tensor.shape, tensor.stride(), expanded)
        return None

    def resolve(self, reference: WeightReference) -> Tensor:
        """Return the view that `reference` names, in this lease's memory."""
        assert reference.layer == self.layer, "a weight reference was resolved against another layer's lease"
        memory = self.expanded if reference.expanded else self.slot
        assert memory is not None, "a reference to an expanded weight was resolved against a lease without any"
        spans = zip(reference.shape, reference.stride, strict=True)
        extent = 1 + sum((size - 1) * stride for size, stride in spans)
        nbytes = extent * reference.dtype.itemsize
        flat = memory[reference.offset : reference.offset + nbytes].view(reference.dtype)
        return flat.as_strided(reference.shape, reference.stride, flat.storage_offset())
