"""Where the bytes of layers go in the slots of one device, in one of several processes."""

from collections.abc import Sequence
from dataclasses import dataclass

from lema.backend import Backend, SlotLayout
from lema.backend.registry import has_addresses
from lema.stream.placement import (
    LayerBytes,
    extent,
    in_slot,
    misaligned,
    rank_share,
    slot_layout,
    slot_share,
)
from lema.stream.slotlayout import identity_layout

__all__ = ["StreamLayout", "stream_layout"]


@dataclass(frozen=True)
class StreamLayout:
    """The layers of a stream, as they are read and as they lie in slots."""

    lazy: bool  # whether the device compiles what is run on it, so that addresses mean nothing
    packed: bool  # whether every tensor in a slot has an aligned address of its own
    stored: tuple[LayerBytes, ...]  # what this process reads of each layer: all, or its part
    layouts: tuple[SlotLayout, ...]  # where these bytes go in a slot
    in_slots: tuple[LayerBytes, ...]  # the layers, with each tensor where it lies in the slot


def stream_layout(layers: Sequence[LayerBytes], backend: Backend, *, sharded: bool) -> StreamLayout:
    """Return where layers go; `sharded`: each of several processes has its part of every layer."""
    lazy = not has_addresses(backend.device)
    # Only a device with memory of its own has weights elsewhere than where they were read to.
    packed = not lazy and not backend.memory().shared
    layouts = tuple(
        _slot_layout(layer, packed=packed, lazy=lazy and not sharded) for layer in layers
    )
    in_slots = tuple(map(in_slot, layers, layouts))
    if packed:
        wrong = next(filter(None, map(misaligned, in_slots)), None)
        assert wrong is None, f"{wrong} would begin at an address that kernels refuse"
    if not sharded:
        return StreamLayout(lazy, packed, tuple(layers), layouts, in_slots)
    rank = backend.replicas.rank
    size = backend.replicas.size
    if packed:
        pairs = [slot_share(*pair, rank, size) for pair in zip(layers, layouts, strict=True)]
        stored = tuple(share for share, _ in pairs)
        return StreamLayout(lazy, packed, stored, tuple(layout for _, layout in pairs), in_slots)
    stored = tuple(rank_share(layer, rank, size) for layer in layers)
    shares = tuple(identity_layout(0, share.nbytes) for share in stored)
    return StreamLayout(lazy, packed, stored, shares, in_slots)


def _slot_layout(layer: LayerBytes, *, packed: bool, lazy: bool) -> SlotLayout:
    """Return where a layer's bytes go in its slot: with memory of the device's own, to aligned
    places; to a lazy device those from the first tensor to the last, because a tensor's place
    in its slot is part of a graph that layers share, and layers begin anywhere in a page.
    Otherwise, and where they are gathered there, as they are."""
    if packed:
        return slot_layout(layer)
    return identity_layout(*extent(layer)) if lazy else identity_layout(0, layer.nbytes)
