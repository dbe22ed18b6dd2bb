"""What a layout is: which axis of a tensor is cut, into what, and in which order the ranks hold it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from math import gcd
from typing import Any, Literal, get_args

from lema.errors import ConfigError, DataError

__all__ = [
    "KvLayout",
    "Layout",
    "column",
    "embedding",
    "fewest_replicas",
    "fused",
    "kv",
    "layout_from_dict",
    "query",
    "replicated",
    "row",
    "usable",
]

Kind = Literal["replicated", "column", "row", "embedding", "query", "kv", "fused"]
KvLayout = Literal["tile", "interleave"]

SHOWN = 64  # degrees named in an error, at most up to this one


@dataclass(frozen=True)
class Layout:
    """How one tensor lies over ranks; made by the functions below, which say what it is.

    Attributes:
        kind: what is cut: nothing, the outputs, the inputs, the vocabulary, heads, or several of them fused into one.
        tp: how many ranks there are.
        dim: the axis that is cut.
        size: its whole length, where that need not divide evenly: the last ranks are then padded with zeros.
        heads: of queries.
        kv_heads: of keys, and of values.
        kv_layout: which replica of keys and values lies where.
        kv_multiplier: how many replicas there are.
        parts: of a fused tensor, the whole length and the layout of each part; a rank has its pieces in this order.

    Raises:
        ConfigError: what is to be cut cannot be divided among so many ranks.
    """

    kind: Kind
    tp: int
    dim: int = 0
    size: int | None = None
    heads: int = 0
    kv_heads: int = 0
    kv_layout: KvLayout = "tile"
    kv_multiplier: int = 1
    parts: tuple[tuple[int, Layout], ...] = ()

    def __post_init__(self) -> None:
        if self.tp < 1:
            raise ConfigError(f"a tensor cannot lie over {self.tp} ranks", where="tp", how="give 1 or more")
        if self.kind in ("query", "kv"):
            _check_heads(self)
        assert all(_fits(part, self.tp, self.dim) for _, part in self.parts), "parts that cannot be fused"

    def to_dict(self) -> dict[str, Any]:
        """The layout as JSON has it: what differs from the defaults."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        if self.parts:
            given["parts"] = [[size, part.to_dict()] for size, part in self.parts]
        return given


def replicated(tp: int) -> Layout:
    """Every rank has the whole tensor."""
    return Layout("replicated", tp)


def column(tp: int, size: int | None = None) -> Layout:
    """Column-parallel: a linear module's outputs, axis 0 of its weight, in equal pieces (padded, given `size`)."""
    return Layout("column", tp, 0, size)


def row(tp: int) -> Layout:
    """Row-parallel: a linear module's inputs, axis 1 of its weight, in equal pieces."""
    return Layout("row", tp, 1)


def embedding(tp: int, size: int, dim: int = 0) -> Layout:
    """The vocabulary, `size` entries of axis `dim`, in equal pieces; the last ones are padded with zeros."""
    return Layout("embedding", tp, dim, size)


def query(
    tp: int, heads: int, kv_heads: int, kv_layout: KvLayout = "tile", kv_multiplier: int | None = None, dim: int = 0
) -> Layout:
    """Query heads, beside the keys and values they belong to. `dim` 1: the inputs of the projection after attention."""
    return Layout("query", tp, dim, None, heads, kv_heads, kv_layout, kv_multiplier or fewest_replicas(tp, kv_heads))


def kv(
    tp: int, heads: int, kv_heads: int, kv_layout: KvLayout = "tile", kv_multiplier: int | None = None, dim: int = 0
) -> Layout:
    """Heads of keys, or of values, replicated where there are fewer of them than ranks."""
    return Layout("kv", tp, dim, None, heads, kv_heads, kv_layout, kv_multiplier or fewest_replicas(tp, kv_heads))


def fused(parts: Sequence[tuple[int, Layout]]) -> Layout:
    """Several tensors one after the other along one axis, each with its whole length and its own layout."""
    first = parts[0][1]
    return Layout("fused", first.tp, first.dim, parts=tuple(parts))


def layout_from_dict(given: Mapping[str, Any]) -> Layout:
    """Read a layout as `Layout.to_dict` gives it.

    Raises:
        DataError: it is not one.
        ConfigError: it is one that no tensor can have.
    """
    known = {f.name: f for f in fields(Layout)}
    numbers = {"tp", "dim", "size", "heads", "kv_heads", "kv_multiplier"}
    needed = {name for name, f in known.items() if f.default is MISSING}
    sound = (
        isinstance(given, Mapping)
        and needed <= given.keys() <= known.keys()
        and all(type(value) is int and 0 <= value < 2**40 for name, value in given.items() if name in numbers)
        and given["kind"] in get_args(Kind)
        and given.get("kv_layout", "tile") in get_args(KvLayout)
        and given.get("kv_multiplier", 1) >= 1
        and isinstance(given.get("parts", []), list)
        and (given["kind"] == "fused") == bool(given.get("parts"))
        and all(isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is int for pair in given.get("parts", []))
    )
    if not sound:
        raise DataError(f"this is no layout of a tensor: {str(given)[:200]}", how="save the shards again")
    parts = tuple((size, layout_from_dict(part)) for size, part in given.get("parts", []))
    if not all(_fits(part, given["tp"], given.get("dim", 0)) for _, part in parts):
        raise DataError("the parts of a fused tensor lie over different ranks or axes", how="save the shards again")
    return Layout(**{**given, "parts": parts})


def fewest_replicas(tp: int, kv_heads: int) -> int:
    """How often keys and values must be replicated for every rank to hold as many heads of them."""
    return tp // gcd(tp, kv_heads) if kv_heads > 0 else 1


def _fits(part: Layout, tp: int, dim: int) -> bool:
    """Whether a part may be fused with others: one with padding would reach into the next."""
    return (part.tp, part.dim, part.size, part.parts) == (tp, dim, None, ())


def _check_heads(layout: Layout) -> None:
    tp, heads, kv_heads, copies = layout.tp, layout.heads, layout.kv_heads, layout.kv_multiplier
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ConfigError(f"{heads} query heads do not share {kv_heads} heads of keys and values", where="heads")
    if copies < 1 or tp % copies or (kv_heads * copies) % tp or (heads // kv_heads) % copies:
        raise ConfigError(
            f"{heads} query heads and {kv_heads} of keys and values"
            f"{f' replicated {copies} times' if copies > 1 else ''} cannot be divided among {tp} ranks",
            where="tp",
            how=f"use {usable(d for d in range(1, min(heads, SHOWN) + 1) if _divides(d, heads, kv_heads))}",
        )


def _divides(tp: int, heads: int, kv_heads: int) -> bool:
    return (heads // kv_heads) % fewest_replicas(tp, kv_heads) == 0


def usable(degrees: Iterable[int]) -> str:
    """Say which degrees of tensor parallelism would do."""
    return f"a tp of {', '.join(map(str, degrees))}"
