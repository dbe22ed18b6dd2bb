"""How a tensor lies over the ranks of a tensor-parallel group, as data, with functions that cut and
join it.

A layout says which rows of one axis each rank holds, and in which order. Weights are those of a
linear module, `[output, input]`, or of an embedding, `[vocabulary, hidden]`. With fewer key and
value heads than ranks, these heads are replicated `kv_multiplier` times. In the layout `tile` the
ranks hold K0, K1, ..., K0, K1, ...; in `interleave` neighbours hold the same. Query heads, and the
columns of the projection that follows attention, are permuted such that every rank has those that
belong to the keys and values it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from itertools import accumulate
from math import gcd
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from lema.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["replicated", "column", "row", "embedding", "query", "kv", "fused"]
KvLayout = Literal["tile", "interleave"]
SHOWN = 64  # degrees named in an error, at most up to this one


@dataclass(frozen=True)
class Layout:
    """How one tensor is divided over ranks. The functions below make it; `ConfigError`: it
    cannot be divided.
    """

    # What is cut: nothing, the outputs, the inputs, the vocabulary, heads, or several of them fused
    # into one.
    kind: Kind
    tp: int  # how many ranks there are
    dim: int = 0  # the axis that is cut
    # Its whole length, where that need not divide evenly: the last ranks are then padded with
    # zeros.
    size: int | None = None
    heads: int = 0  # of queries
    kv_heads: int = 0  # of keys, and of values
    kv_layout: KvLayout = "tile"  # which replica of keys and values lies where
    kv_multiplier: int = 1  # how many replicas there are
    # Of a fused tensor, the whole length and the layout of each part; a rank has its pieces in this
    # order.
    parts: tuple[tuple[int, Layout], ...] = ()

    def __post_init__(self) -> None:
        if self.tp < 1:
            raise ConfigError(
                f"a tensor cannot lie over {self.tp} ranks", where="tp", how="give 1 or more"
            )
        if self.kind in ("query", "kv"):
            _check_heads(self)
        assert all(_fits(part, self.tp, self.dim) for _, part in self.parts), (
            "parts that cannot be fused"
        )

    def to_dict(self) -> dict[str, Any]:
        """The layout as JSON has it: what differs from the defaults."""
        entries = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if getattr(self, f.name) != f.default
        }
        if self.parts:
            entries["parts"] = [[size, part.to_dict()] for size, part in self.parts]
        return entries


def replicated(tp: int) -> Layout:
    """Every rank has the whole tensor."""
    return Layout("replicated", tp)


def column(tp: int, size: int | None = None) -> Layout:
    """Column-parallel: a linear module's outputs, axis 0 of its weight, in equal pieces (padded,
    given `size`).
    """
    return Layout("column", tp, 0, size)


def row(tp: int) -> Layout:
    """Row-parallel: a linear module's inputs, axis 1 of its weight, in equal pieces."""
    return Layout("row", tp, 1)


def embedding(tp: int, size: int, dim: int = 0) -> Layout:
    """The vocabulary, `size` entries of axis `dim`, in equal pieces; the last ones are padded
    with zeros.
    """
    return Layout("embedding", tp, dim, size)


def query(
    tp: int,
    heads: int,
    kv_heads: int,
    kv_layout: KvLayout = "tile",
    kv_multiplier: int | None = None,
    dim: int = 0,
) -> Layout:
    """Query heads, on the ranks of their keys and values. `dim` 1: the inputs of the projection
    after attention.
    """
    return Layout(
        "query",
        tp,
        dim,
        None,
        heads,
        kv_heads,
        kv_layout,
        kv_multiplier or fewest_replicas(tp, kv_heads),
    )


def kv(
    tp: int,
    heads: int,
    kv_heads: int,
    kv_layout: KvLayout = "tile",
    kv_multiplier: int | None = None,
    dim: int = 0,
) -> Layout:
    """Heads of keys, or of values, replicated where there are fewer of them than ranks."""
    return Layout(
        "kv",
        tp,
        dim,
        None,
        heads,
        kv_heads,
        kv_layout,
        kv_multiplier or fewest_replicas(tp, kv_heads),
    )


def fused(parts: Sequence[tuple[int, Layout]]) -> Layout:
    """Several tensors one after the other along one axis, each with its whole length and its own
    layout.
    """
    first = parts[0][1]
    return Layout("fused", first.tp, first.dim, parts=tuple(parts))


def layout_from_dict(content: Mapping[str, Any]) -> Layout:
    """Read a layout from `Layout.to_dict`; `DataError`: it is malformed; `ConfigError`: no
    tensor can have it.
    """
    layout_fields = {f.name: f for f in fields(Layout)}
    numbers = {"tp", "dim", "size", "heads", "kv_heads", "kv_multiplier"}
    needed = {name for name, f in layout_fields.items() if f.default is MISSING}
    sound = (
        isinstance(content, Mapping)
        and needed <= content.keys() <= layout_fields.keys()
        and all(
            type(value) is int and 0 <= value < 2**40
            for name, value in content.items()
            if name in numbers
        )
        and content["kind"] in get_args(Kind)
        and content.get("kv_layout", "tile") in get_args(KvLayout)
        and content.get("kv_multiplier", 1) >= 1
        and isinstance(content.get("parts", []), list)
        and (content["kind"] == "fused") == bool(content.get("parts"))
        and all(
            isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is int
            for pair in content.get("parts", [])
        )
    )
    if not sound:
        raise DataError(
            f"this is no layout of a tensor: {str(content)[:200]}", how="save the shards again"
        )
    parts = tuple((size, layout_from_dict(part)) for size, part in content.get("parts", []))
    if not all(_fits(part, content["tp"], content.get("dim", 0)) for _, part in parts):
        raise DataError(
            "the parts of a fused tensor lie over different ranks or axes",
            how="save the shards again",
        )
    return Layout(**{**content, "parts": parts})


def fewest_replicas(tp: int, kv_heads: int) -> int:
    """How often keys and values must be replicated for every rank to hold as many heads of them."""
    return tp // gcd(tp, kv_heads) if kv_heads > 0 else 1


def _fits(part: Layout, tp: int, dim: int) -> bool:
    """Whether a part may be fused with others: one with padding would reach into the next."""
    return (part.tp, part.dim, part.size, part.parts) == (tp, dim, None, ())


def _check_heads(layout: Layout) -> None:
    tp = layout.tp
    heads = layout.heads
    kv_heads = layout.kv_heads
    copies = layout.kv_multiplier
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ConfigError(
            f"{heads} query heads do not share {kv_heads} heads of keys and values", where="heads"
        )
    if copies < 1 or tp % copies or (kv_heads * copies) % tp or (heads // kv_heads) % copies:
        times = f" replicated {copies} times" if copies > 1 else ""
        what = (
            f"{heads} query heads and {kv_heads} of keys and values{times} cannot be divided "
            f"among {tp} ranks"
        )
        group = heads // kv_heads
        degrees = range(1, min(heads, SHOWN) + 1)
        divisors = (d for d in degrees if group % fewest_replicas(d, kv_heads) == 0)
        how = f"use {usable(divisors)}"
        raise ConfigError(what, where="tp", how=how)


def usable(degrees: Iterable[int]) -> str:
    """Say which degrees of tensor parallelism would do."""
    return f"a tp of {', '.join(map(str, degrees))}"


AxisSpan = tuple[int, int]  # start and length along the axis of the whole tensor


def axis_spans(layout: Layout, size: int, rank: int) -> list[AxisSpan]:
    """Return what of an axis of length `size` (before padding) one rank holds: start and length, in
    its order. `ConfigError`: the axis cannot be divided among the ranks as the layout says."""
    if layout.kind == "replicated":
        return [(0, size)]
    if layout.kind == "fused":
        if size != sum(length for length, _ in layout.parts):
            lengths = " + ".join(str(length) for length, _ in layout.parts)
            raise ConfigError(
                f"an axis of {size} is not fused of {lengths}",
                how="give the base model of the adapter",
            )
        starts = accumulate((length for length, _ in layout.parts), initial=0)
        return [
            (start + inner, length)
            for start, (part_size, part) in zip(starts, layout.parts, strict=False)
            for inner, length in axis_spans(part, part_size, rank)
        ]
    if layout.kind in ("query", "kv"):
        return list(_head_spans(layout, size, rank))
    if layout.size is None and size % layout.tp:
        divisors = (degree for degree in range(1, min(size, SHOWN) + 1) if size % degree == 0)
        how = f"use {usable(divisors)}"
        raise ConfigError(
            f"an axis of {size} cannot be divided evenly among {layout.tp} ranks",
            where="tp",
            how=how,
        )
    if layout.size not in (None, size):
        raise ConfigError(
            f"an axis of {size} is not the {layout.size} of the layout",
            how="use the layout's own model",
        )
    shard_size = -(-size // layout.tp)
    return [(rank * shard_size, shard_size)]


def shard(full: Tensor, layout: Layout, rank: int) -> Tensor:
    """Return what one rank holds of a tensor, as a tensor of its own; errors are those of
    `axis_spans`.
    """
    import torch

    assert 0 <= rank < layout.tp, f"there is no rank {rank} of {layout.tp}"
    size = full.shape[layout.dim]
    pieces = []
    for start, length in axis_spans(layout, size, rank):
        real = max(0, min(length, size - start))
        pieces.append(full.narrow(layout.dim, min(start, size), real))
        if real < length:
            shape = list(full.shape)
            shape[layout.dim] = length - real
            pieces.append(full.new_zeros(shape))
    return torch.cat(pieces, layout.dim)


class Difference(NamedTuple):
    """Two ranks whose replicas of the same values are not the same bits: which, and the largest
    difference.
    """

    first: int
    second: int
    largest: float

    def __str__(self) -> str:
        return f"rank {self.second} differs from rank {self.first} by up to {self.largest:.3g}"


def differences(shards: Sequence[Tensor], layout: Layout) -> list[Difference]:
    """Find the ranks that hold something else than the first rank that holds the same part of the
    tensor. `DataError`: the shards are not those of one tensor with this layout."""
    import torch

    size = _full_size(shards, layout)
    owners = dict[AxisSpan, tuple[int, Any]]()
    differing = dict[tuple[int, int], float]()
    for rank, span, piece in _pieces(shards, layout, size):
        first, theirs = owners.setdefault(span, (rank, piece))
        if first != rank and not torch.equal(
            *(tensor.contiguous().view(torch.uint8) for tensor in (theirs, piece))
        ):
            largest = float((theirs.double() - piece.double()).abs().max())
            differing[first, rank] = max(largest, differing.get((first, rank), 0.0))
    return [Difference(first, rank, largest) for (first, rank), largest in differing.items()]


def consolidate(shards: Sequence[Tensor], layout: Layout, *, check: bool = True) -> Tensor:
    """Put a tensor together from the shards of all ranks, in their order. Replicas must agree, bit
    for bit, if `check`; else the first rank's are taken. `DataError`: the shards are not those of
    one tensor with this layout, or replicas differ; it says on which ranks."""
    if check and (differing := differences(shards, layout)):
        how = (
            "keys and values may lie in the other order (--kv-layout); or take the first "
            "rank's (--take-first)"
        )
        raise DataError(
            f"replicas of the same values differ: {'; '.join(map(str, differing))}", how=how
        )
    size = _full_size(shards, layout)
    first = shards[0]
    shape = list(first.shape)
    shape[layout.dim] = size
    full = first.new_empty(shape)
    # the first rank has the last word
    for _, (start, length), piece in reversed(list(_pieces(shards, layout, size))):
        real = max(0, min(length, size - start))
        full.narrow(layout.dim, min(start, size), real).copy_(piece.narrow(layout.dim, 0, real))
    return full


def _pieces(
    shards: Sequence[Tensor], layout: Layout, size: int
) -> Iterator[tuple[int, AxisSpan, Tensor]]:
    for rank, local_shard in enumerate(shards):
        position = 0
        for start, length in axis_spans(layout, size, rank):
            yield rank, (start, length), local_shard.narrow(layout.dim, position, length)
            position += length


def _full_size(shards: Sequence[Tensor], layout: Layout) -> int:
    """The length of the axis in the whole tensor; the shards are checked to be those of one."""
    if len(shards) != layout.tp:
        raise DataError(
            f"there are {len(shards)} shards of a tensor that lies over {layout.tp} ranks"
        )
    kinds = {(tuple(local_shard.shape), local_shard.dtype) for local_shard in shards}
    if len(kinds) != 1:
        shapes = ", ".join(
            f"rank {rank} {list(local_shard.shape)} {local_shard.dtype}"
            for rank, local_shard in enumerate(shards)
        )
        raise DataError(
            f"the ranks hold tensors of different shapes or types: {shapes}",
            how="save the shards again",
        )
    if layout.dim >= shards[0].dim():
        raise DataError(f"a tensor of shape {list(shards[0].shape)} has no axis {layout.dim}")
    local_size = shards[0].shape[layout.dim]
    size = _size_of(layout, shards[0].shape[layout.dim])
    try:
        expected = sum(length for _, length in axis_spans(layout, size, 0))
    except ConfigError as error:
        raise DataError(
            f"shards of {local_size} along axis {layout.dim} do not fit: {error.what}"
        ) from error
    if expected != local_size:
        raise DataError(
            f"the ranks hold {local_size} along axis {layout.dim} where they should hold {expected}"
        )
    return size


def _size_of(layout: Layout, local_size: int) -> int:
    if layout.size is not None:
        return layout.size
    if layout.kind == "fused":
        return sum(size for size, _ in layout.parts)
    if layout.kind == "replicated":
        return local_size
    return local_size * layout.tp // (layout.kv_multiplier if layout.kind == "kv" else 1)


def _head_spans(layout: Layout, size: int, rank: int) -> Iterator[AxisSpan]:
    """Every rank holds one chunk of the key and value heads, as one replica, and that share of
    each head's queries.
    """
    count = layout.kv_heads if layout.kind == "kv" else layout.heads
    if not size or size % count:
        what = f"an axis of {size} does not consist of {count} heads"
        raise ConfigError(what, how="give the base model of the adapter")
    unit = size // count
    copies = layout.kv_multiplier
    chunks = layout.tp // layout.kv_multiplier
    per_rank = layout.kv_heads // chunks
    replica, chunk = (
        divmod(rank, chunks) if layout.kv_layout == "tile" else divmod(rank, copies)[::-1]
    )
    if layout.kind == "kv":
        yield chunk * per_rank * unit, per_rank * unit
        return
    group = layout.heads // layout.kv_heads
    share = group // copies
    for head in range(chunk * per_rank, (chunk + 1) * per_rank):
        yield (head * group + replica * share) * unit, share * unit
