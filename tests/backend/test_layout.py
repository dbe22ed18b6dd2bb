"""Cutting tensors up over ranks and putting them together again is the identity, and follows the
documented rules.
"""

import json
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lema.backend.layout import (
    Layout,
    axis_spans,
    column,
    consolidate,
    differences,
    embedding,
    fused,
    kv,
    layout_from_dict,
    query,
    replicated,
    row,
    shard,
)
from lema.errors import ConfigError, DataError
from lema.lora.shards import layout_of_tensor, module_of

CASES = settings(max_examples=400, deadline=None, derandomize=True, database=None)
KV_LAYOUTS = st.sampled_from(["tile", "interleave"])


def numbered(*shape: int) -> Tensor:
    """A tensor in which every value is another."""
    return torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def all_shards(full: Tensor, layout: Layout) -> list[Tensor]:
    return [shard(full, layout, rank) for rank in range(layout.tp)]


@st.composite
def attentions(draw: st.DrawFn) -> tuple[int, int, int, str, int]:
    """Ranks, query heads, heads of keys, how these lie, and how often: all that can be divided."""
    ranks_per_chunk = draw(st.integers(1, 4))
    chunks = draw(st.integers(1, 4))
    per_rank = draw(st.integers(1, 3))
    kv_heads = chunks * per_rank
    heads = kv_heads * ranks_per_chunk * draw(st.integers(1, 3))
    return ranks_per_chunk * chunks, heads, kv_heads, draw(KV_LAYOUTS), ranks_per_chunk


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, int]:
    """A layout and the length of the axis it cuts."""
    kind = draw(
        st.sampled_from(
            ["replicated", "column", "row", "embedding", "query", "kv", "fused", "packed"]
        )
    )
    tp = draw(st.integers(1, 9))
    each = draw(st.integers(1, 4))
    if kind == "replicated":
        return replicated(tp), each
    if kind in ("column", "row"):
        return (column(tp) if kind == "column" else row(tp)), tp * each
    if kind == "embedding":
        size = draw(st.integers(1, 40))
        return (embedding(tp, size, draw(st.integers(0, 1)))), size
    if kind == "packed":
        sizes = [tp * draw(st.integers(1, 3)) for _ in range(draw(st.integers(1, 3)))]
        return fused([(size, column(tp)) for size in sizes]), sum(sizes)
    tp, heads, kv_heads, where, copies = draw(attentions())
    dim = draw(st.integers(0, 1))
    queries = query(tp, heads, kv_heads, where, copies, dim)
    keys = kv(tp, heads, kv_heads, where, copies, dim)
    if kind == "fused":
        return fused(
            [(heads * each, queries), (kv_heads * each, keys), (kv_heads * each, keys)]
        ), each * (heads + 2 * kv_heads)
    return (queries, heads * each) if kind == "query" else (keys, kv_heads * each)


@CASES
@given(layouts(), st.integers(1, 3), st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
def test_consolidate_undoes_shard(case: tuple[Layout, int], other: int, dtype: torch.dtype) -> None:
    layout, size = case
    full = numbered(size, other) if layout.dim == 0 else numbered(other, size)
    pieces = all_shards(full.to(dtype), layout)
    assert len({piece.shape for piece in pieces}) == 1
    back = consolidate(pieces, layout)
    assert back.dtype == dtype
    assert torch.equal(back, full.to(dtype))


@CASES
@given(layouts())
def test_a_layout_survives_json(case: tuple[Layout, int]) -> None:
    layout, _ = case
    assert layout_from_dict(json.loads(json.dumps(layout.to_dict()))) == layout


@CASES
@given(layouts(), st.data())
def test_a_flipped_bit_on_one_rank_is_found_wherever_it_is_held_twice(
    case: tuple[Layout, int], data: st.DataObject
) -> None:
    layout, size = case
    full = numbered(size, 2) if layout.dim == 0 else numbered(2, size)
    pieces = all_shards(full, layout)
    rank = data.draw(st.integers(0, layout.tp - 1))
    index = data.draw(st.integers(0, pieces[rank].numel() - 1))
    value = float(pieces[rank].flatten()[index])
    pieces[rank].view(-1)[index] += 1e-3 * value + 1
    holders = {
        other
        for other in range(layout.tp)
        if other != rank and bool((shard(full, layout, other) == value).any())
    }
    found = differences(pieces, layout)
    if value == 0:
        return  # padding, which no rank keeps
    first = min(holders | {rank})
    assert bool(found) == bool(holders)
    assert all(pair.first == first or rank in (pair.first, pair.second) for pair in found)
    assert {pair.second for pair in found} | {pair.first for pair in found} >= (
        {rank} if holders else set()
    )
    if holders:
        with pytest.raises(
            DataError, match=f"rank {found[0].second} differs from rank {found[0].first}"
        ):
            consolidate(pieces, layout)
        if first != rank:
            assert torch.equal(consolidate(pieces, layout, check=False), full)


def slots(tp: int, kv_heads: int, copies: int, where: str) -> list[list[tuple[int, int]]]:
    """Which (head, replica) of keys lie on each rank, written as the documents describe it."""
    per_rank = kv_heads * copies // tp
    if where == "tile":  # K0..Kn-1, K0..Kn-1, ..., each rank the next so many
        line = [(head, replica) for replica in range(copies) for head in range(kv_heads)]
        return [line[rank * per_rank : (rank + 1) * per_rank] for rank in range(tp)]
    held = []  # neighbouring ranks hold the same
    for first in range(0, kv_heads, per_rank):
        held += [
            [(head, replica) for head in range(first, first + per_rank)]
            for replica in range(copies)
        ]
    return held


@CASES
@given(attentions())
def test_queries_lie_beside_the_keys_they_belong_to(case: tuple[int, int, int, str, int]) -> None:
    tp, heads, kv_heads, where, copies = case
    expected = slots(tp, kv_heads, copies, where)
    group = heads // kv_heads
    every = []
    for rank in range(tp):
        keys = shard(torch.arange(kv_heads), kv(tp, heads, kv_heads, where, copies), rank).tolist()  # type: ignore[arg-type]
        queries = shard(
            torch.arange(heads), query(tp, heads, kv_heads, where, copies), rank
        ).tolist()  # type: ignore[arg-type]
        assert keys == [head for head, _ in expected[rank]]
        # Attention repeats each key for as many consecutive queries as there are per key on the
        # rank.
        per_key = len(queries) // len(keys)
        assert [head // group for head in queries] == [key for key in keys for _ in range(per_key)]
        share = group // copies
        assert queries == [
            h * group + p * share + i for h, p in expected[rank] for i in range(share)
        ]
        every += queries
    assert sorted(every) == list(range(heads))


def test_the_two_orders_of_replicas() -> None:
    def held(layout: Layout, count: int) -> list[list[int]]:
        return [shard(torch.arange(count), layout, rank).tolist() for rank in range(4)]

    assert held(kv(4, 8, 2, "tile"), 2) == [[0], [1], [0], [1]]
    assert held(kv(4, 8, 2, "interleave"), 2) == [[0], [0], [1], [1]]
    assert held(query(4, 8, 2, "tile"), 8) == [[0, 1], [4, 5], [2, 3], [6, 7]]
    assert held(query(4, 8, 2, "interleave"), 8) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_the_columns_after_attention_follow_the_queries() -> None:
    full = numbered(3, 16)
    rows = query(4, 8, 2, "tile")
    for rank in range(4):
        after = shard(full, query(4, 8, 2, "tile", dim=1), rank)
        assert torch.equal(after, shard(full.t().contiguous(), rows, rank).t())


def test_attention_over_shards_is_attention() -> None:
    """The sum over ranks of each rank's attention and projection is that of all heads."""
    heads = 8
    kv_heads = 2
    width = 4
    hidden = 12
    torch.manual_seed(0)
    x = torch.randn(5, hidden, dtype=torch.float64)
    q, k, v = (
        torch.randn(n * width, hidden, dtype=torch.float64) for n in (heads, kv_heads, kv_heads)
    )
    o = torch.randn(hidden, heads * width, dtype=torch.float64)

    def attend(q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> Tensor:
        queries, keys, values = ((x @ w.t()).view(5, -1, width).transpose(0, 1) for w in (q, k, v))
        times = queries.shape[0] // keys.shape[0]
        keys = keys.repeat_interleave(times, 0)
        values = values.repeat_interleave(times, 0)
        mixed = torch.softmax(queries @ keys.transpose(1, 2), -1) @ values
        return mixed.transpose(0, 1).reshape(5, -1) @ o.t()

    for tp in (1, 2, 4, 8):
        for where in ("tile", "interleave"):
            cut = query(tp, heads, kv_heads, where), kv(tp, heads, kv_heads, where)  # type: ignore[arg-type]
            after = query(tp, heads, kv_heads, where, dim=1)  # type: ignore[arg-type]
            parts = [
                attend(
                    shard(q, cut[0], r),
                    shard(k, cut[1], r),
                    shard(v, cut[1], r),
                    shard(o, after, r),
                )
                for r in range(tp)
            ]
            torch.testing.assert_close(sum(parts), attend(q, k, v, o))


@pytest.mark.parametrize("where", ["tile", "interleave"])
def test_the_rank_of_an_adapter_is_never_cut(where: str) -> None:
    """Rank 4 over 8 ranks, for every kind of module."""
    tp = 8
    rank = 4
    modules = [
        (column(tp), 16, 24),
        (row(tp), 16, 24),
        (query(tp, 16, 2, where), 32, 24),  # type: ignore[arg-type]
        (query(tp, 16, 2, where, dim=1), 24, 32),  # type: ignore[arg-type]
        (kv(tp, 16, 2, where), 4, 24),  # type: ignore[arg-type]
        (fused([(16, column(tp)), (16, column(tp))]), 32, 24),
        (replicated(tp), 5, 7),
        (embedding(tp, 31), 12, 31),
    ]
    for base, outputs, inputs in modules:
        a, b = (layout_of_tensor(f"lora_{factor}.weight", base, 2) for factor in "AB")
        for layout, full, whole in (
            (a, numbered(rank, inputs), 0),
            (b, numbered(outputs, rank), 1),
        ):
            pieces = all_shards(full, layout)
            assert all(piece.shape[whole] == rank for piece in pieces), base
            assert torch.equal(consolidate(pieces, layout), full)
        # The product of the pieces is the piece of the product.
        if base.kind == "embedding":
            continue
        product = numbered(outputs, rank) @ numbered(rank, inputs)
        for r in range(tp):
            mine = shard(numbered(outputs, rank), b, r) @ shard(numbered(rank, inputs), a, r)
            assert torch.equal(mine, shard(product, base, r))


def test_the_factors_of_an_embedding_cut_by_its_vocabulary_are_whole() -> None:
    for leaf in ("lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector"):
        assert layout_of_tensor(leaf, embedding(4, 10), 2) == replicated(4)


@pytest.mark.parametrize(
    ("make", "size", "said"),
    [
        (lambda: column(5), 12, "a tp of 1, 2, 3, 4, 6, 12"),
        (lambda: query(3, 8, 2), 64, "a tp of 1, 2, 4, 8"),
        (lambda: kv(16, 8, 2), 64, "a tp of 1, 2, 4, 8"),
        (lambda: query(8, 12, 6), 24, "a tp of 1, 2, 3, 4, 6, 12"),
        (lambda: query(2, 8, 2), 12, "does not consist of 8 heads"),
        (lambda: query(2, 8, 3), 12, "do not share 3 heads"),
        (lambda: fused([(4, column(2)), (6, column(2))]), 11, "not fused of 4 + 6"),
        (lambda: embedding(4, 10), 11, "not the 10 of the layout"),
        (lambda: replicated(0), 1, "over 0 ranks"),
    ],
)
def test_what_cannot_be_divided_is_said(make: Callable[[], Layout], size: int, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        axis_spans(make(), size, 0)
    assert said in str(caught.value)


def test_shards_that_do_not_fit_are_refused() -> None:
    pieces = all_shards(numbered(8, 2), column(4))
    with pytest.raises(DataError, match="3 shards of a tensor that lies over 4 ranks"):
        consolidate(pieces[:3], column(4))
    with pytest.raises(DataError, match=r"rank 3 \[1, 2\]"):
        consolidate([*pieces[:3], pieces[3][:1]], column(4))
    with pytest.raises(DataError, match="different shapes or types"):
        consolidate([*pieces[:3], pieces[3].half()], column(4))
    with pytest.raises(DataError, match="should hold 3"):
        consolidate(pieces, embedding(4, 10))
    with pytest.raises(DataError, match="should hold 4"):
        consolidate(pieces, fused([(8, column(4)), (8, column(4))]))
    with pytest.raises(DataError, match="does not consist"):
        consolidate(all_shards(numbered(12, 2), column(4)), kv(4, 40, 5, "tile", 4))
    with pytest.raises(DataError, match="no axis 1"):
        consolidate([torch.ones(2)] * 2, row(2))


def test_replicas_are_compared_bit_by_bit() -> None:
    held = torch.tensor([float("nan"), 0.0])
    assert not differences([held, held.clone()], replicated(2))
    (found,) = differences([held, torch.tensor([float("nan"), -0.0])], replicated(2))
    assert (found.first, found.second) == (0, 1)


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"kind": "diagonal", "tp": 2},
        {"kind": "row", "tp": "2"},
        {"kind": "row", "tp": True},
        {"kind": "row", "tp": 2, "colour": 1},
        {"kind": "kv", "tp": 2, "heads": 2, "kv_heads": 1, "kv_multiplier": 0},
        {"kind": "kv", "tp": 2, "heads": 2, "kv_heads": 1, "kv_layout": "heap"},
        {"kind": "fused", "tp": 2},
        {"kind": "fused", "tp": 2, "parts": [[1]]},
        {"kind": "fused", "tp": 2, "parts": [[4, {"kind": "row", "tp": 2, "dim": 1}]]},
        {"kind": "fused", "tp": 2, "parts": [[4, {"kind": "column", "tp": 2, "size": 4}]]},
        {"kind": "row", "tp": -1},
    ],
)
def test_what_is_no_layout_is_refused(broken: dict[str, object]) -> None:
    with pytest.raises(DataError):
        layout_from_dict(broken)


def test_names_of_tensors_and_modules() -> None:
    prefix = "base_model.model."
    assert module_of(f"{prefix}a.0.q.lora_A.weight") == ("a.0.q", "lora_A.weight")
    assert module_of(f"{prefix}a.0.q.lora_magnitude_vector") == ("a.0.q", "lora_magnitude_vector")
    assert module_of(f"{prefix}emb.lora_embedding_B") == ("emb", "lora_embedding_B")
    assert module_of(f"{prefix}head.weight") == ("head", "weight")
    assert module_of(f"{prefix}q.base_layer.bias") == ("q", "base_layer.bias")
    assert module_of("other.weight") == ("other.weight", "")
    assert layout_of_tensor("lora_magnitude_vector", column(2), 1) == column(2)
    assert layout_of_tensor("base_layer.bias", row(2), 1) == replicated(2)
    assert layout_of_tensor("weight", row(2), 2) == row(2)
    assert layout_of_tensor("lora_B.bias", query(2, 4, 2), 1) == query(2, 4, 2)
