"""Cutting a tensor up as its layout says, and putting it together again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from lema.errors import ConfigError, DataError
from lema.layout.data import SHOWN, Layout, usable

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Difference", "consolidate", "differences", "places", "shard"]

Place = tuple[int, int]  # start and length along the axis of the whole tensor


def places(layout: Layout, size: int, rank: int) -> list[Place]:
    """Return what of an axis of length `size` (before padding) one rank holds: start and length, in its order.

    Raises:
        ConfigError: the axis cannot be divided among the ranks as the layout says.
    """
    if layout.kind == "replicated":
        return [(0, size)]
    if layout.kind == "fused":
        if size != sum(length for length, _ in layout.parts):
            lengths = " + ".join(str(length) for length, _ in layout.parts)
            raise ConfigError(f"an axis of {size} is not fused of {lengths}", how="give the model the adapter is of")
        starts = accumulate((length for length, _ in layout.parts), initial=0)
        return [
            (start + inner, length)
            for start, (whole, part) in zip(starts, layout.parts, strict=False)
            for inner, length in places(part, whole, rank)
        ]
    if layout.kind in ("query", "kv"):
        return list(_head_places(layout, size, rank))
    if layout.size is None and size % layout.tp:
        raise ConfigError(
            f"an axis of {size} cannot be divided evenly among {layout.tp} ranks",
            where="tp",
            how=f"use {usable(degree for degree in range(1, min(size, SHOWN) + 1) if size % degree == 0)}",
        )
    if layout.size not in (None, size):
        raise ConfigError(f"an axis of {size} is not the {layout.size} of the layout", how="use the layout's own model")
    each = -(-size // layout.tp)
    return [(rank * each, each)]


def shard(full: Tensor, layout: Layout, rank: int) -> Tensor:
    """Return what one rank holds of a tensor, as a tensor of its own.

    Raises:
        ConfigError: the tensor cannot be divided among the ranks as the layout says.
    """
    import torch

    assert 0 <= rank < layout.tp, f"there is no rank {rank} of {layout.tp}"
    size, pieces = full.shape[layout.dim], []
    for start, length in places(layout, size, rank):
        real = max(0, min(length, size - start))
        pieces.append(full.narrow(layout.dim, min(start, size), real))
        if real < length:
            shape = list(full.shape)
            shape[layout.dim] = length - real
            pieces.append(full.new_zeros(shape))
    return torch.cat(pieces, layout.dim)


@dataclass(frozen=True)
class Difference:
    """Two ranks whose replicas of the same values are not the same bits: which, and the largest difference."""

    first: int
    other: int
    largest: float

    def __str__(self) -> str:
        return f"rank {self.other} differs from rank {self.first} by up to {self.largest:.3g}"


def differences(shards: Sequence[Tensor], layout: Layout) -> list[Difference]:
    """Find the ranks that hold something else than the first rank that holds the same part of the tensor.

    Raises:
        DataError: the shards are not those of one tensor with this layout.
    """
    size, owners, found = _whole(shards, layout), dict[Place, tuple[int, Any]](), dict[tuple[int, int], float]()
    for rank, place, piece in _pieces(shards, layout, size):
        first, theirs = owners.setdefault(place, (rank, piece))
        if first != rank and not _same_bits(theirs, piece):
            largest = float((theirs.double() - piece.double()).abs().max())
            found[first, rank] = max(largest, found.get((first, rank), 0.0))
    return [Difference(first, rank, largest) for (first, rank), largest in found.items()]


def consolidate(shards: Sequence[Tensor], layout: Layout, *, check: bool = True) -> Tensor:
    """Put a tensor together from what the ranks hold, in the order of their ranks.

    Args:
        shards: one for each rank.
        layout: how the tensor lies over them.
        check: replicas must agree, bit for bit; else the first rank's are taken.

    Raises:
        DataError: the shards are not those of one tensor with this layout, or replicas differ; it says on which ranks.
    """
    if check and (found := differences(shards, layout)):
        raise DataError(
            f"replicas of the same values differ: {'; '.join(map(str, found))}",
            how="keys and values may lie in the other order (--kv-layout); or take the first rank's (--take-first)",
        )
    size, first = _whole(shards, layout), shards[0]
    shape = list(first.shape)
    shape[layout.dim] = size
    full = first.new_empty(shape)
    for _, (start, length), piece in reversed(list(_pieces(shards, layout, size))):  # the first rank has the last word
        real = max(0, min(length, size - start))
        full.narrow(layout.dim, min(start, size), real).copy_(piece.narrow(layout.dim, 0, real))
    return full


def _pieces(shards: Sequence[Tensor], layout: Layout, size: int) -> Iterator[tuple[int, Place, Tensor]]:
    for rank, held in enumerate(shards):
        position = 0
        for start, length in places(layout, size, rank):
            yield rank, (start, length), held.narrow(layout.dim, position, length)
            position += length


def _whole(shards: Sequence[Tensor], layout: Layout) -> int:
    """The length of the axis in the whole tensor; the shards are checked to be those of one."""
    if len(shards) != layout.tp:
        raise DataError(f"there are {len(shards)} shards of a tensor that lies over {layout.tp} ranks")
    kinds = {(tuple(held.shape), held.dtype) for held in shards}
    if len(kinds) != 1:
        each = ", ".join(f"rank {rank} {list(held.shape)} {held.dtype}" for rank, held in enumerate(shards))
        raise DataError(f"the ranks hold tensors of different shapes or types: {each}", how="save the shards again")
    if layout.dim >= shards[0].dim():
        raise DataError(f"a tensor of shape {list(shards[0].shape)} has no axis {layout.dim}")
    held, size = shards[0].shape[layout.dim], _size_of(layout, shards[0].shape[layout.dim])
    try:
        expected = sum(length for _, length in places(layout, size, 0))
    except ConfigError as error:
        raise DataError(f"shards of {held} along axis {layout.dim} do not fit: {error.what}") from error
    if expected != held:
        raise DataError(f"the ranks hold {held} along axis {layout.dim} where they should hold {expected}")
    return size


def _size_of(layout: Layout, held: int) -> int:
    if layout.size is not None:
        return layout.size
    if layout.kind == "fused":
        return sum(size for size, _ in layout.parts)
    if layout.kind == "replicated":
        return held
    return held * layout.tp // (layout.kv_multiplier if layout.kind == "kv" else 1)


def _head_places(layout: Layout, size: int, rank: int) -> Iterator[Place]:
    """Every rank holds one chunk of the key and value heads, as one replica, and that share of each head's queries."""
    count = layout.kv_heads if layout.kind == "kv" else layout.heads
    if not size or size % count:
        raise ConfigError(
            f"an axis of {size} does not consist of {count} heads", how="give the model the adapter is of"
        )
    unit, copies, chunks = size // count, layout.kv_multiplier, layout.tp // layout.kv_multiplier
    per_rank = layout.kv_heads // chunks
    replica, chunk = divmod(rank, chunks) if layout.kv_layout == "tile" else divmod(rank, copies)[::-1]
    if layout.kind == "kv":
        yield chunk * per_rank * unit, per_rank * unit
        return
    group = layout.heads // layout.kv_heads
    share = group // copies
    for head in range(chunk * per_rank, (chunk + 1) * per_rank):
        yield (head * group + replica * share) * unit, share * unit


def _same_bits(one: Tensor, other: Tensor) -> bool:
    import torch

    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
