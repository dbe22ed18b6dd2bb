"""Quantised weights on lease, expanded on the device into memory that every layer uses in turn."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lema.backend import Backend
from lema.storage.quantized import formats
from lema.stream.placement import LayerBytes, view, views

__all__ = ["ExpandedBuffers", "expand_into", "weights_in"]

NAN_BYTE = 0xFF  # every floating dtype reads a word of ones as NaN


def weights_in(slot: Tensor, layer: LayerBytes, expanded: Tensor | None) -> dict[str, Tensor]:
    """Return the layer's weights: views of the slot, and of `expanded` for those that `expand_into` put there."""
    if expanded is None:
        return views(slot, layer)
    return views(slot, layer) | {e.placed.name: view(expanded, e.placed) for e in layer.expansions}


def expand_into(expanded: Tensor, slot: Tensor, layer: LayerBytes) -> None:
    """Expand the quantised weights in `slot` into `expanded`, uint8 `[at least layer.expanded_bytes]`."""
    memory = expanded.data  # counts its changes by itself: graphs refer to weights by place, not by what was there
    for expansion in layer.expansions:
        parts = {part: view(slot, placed) for part, placed in expansion.parts.items()}
        formats.expand(expansion.library, parts, expansion.about, view(memory, expansion.placed))


class ExpandedBuffers:
    """Memory that the weights of `layers` are expanded into: one buffer, or as many as have been on lease at once.

    A buffer is written to by computation on the device, so after all that was queued before it was given back.
    """

    def __init__(self, layers: Iterable[LayerBytes], backend: Backend) -> None:
        self.nbytes = max((layer.expanded_bytes for layer in layers), default=0)  # of one buffer; 0: none is quantised
        self._device = backend.device
        self._poison = bool(getattr(backend, "poison", False))  # a backend for tests
        self._free: list[Tensor] = []

    def take(self) -> Tensor:
        """Return a buffer that is not in use."""
        return self._free.pop() if self._free else torch.empty(self.nbytes, dtype=torch.uint8, device=self._device)

    def give_back(self, buffer: Tensor) -> None:
        """Say that nothing will be queued any more that reads the buffer."""
        if self._poison:
            buffer.fill_(NAN_BYTE)  # and never used again: what reads it still reads NaN for ever
        else:
            self._free.append(buffer)

    def clear(self) -> None:
        """Give the memory up."""
        self._free.clear()
