"""How a tensor lies over the ranks of a tensor-parallel group, as data: cut it up, and put it together again.

A layout says which rows of one axis each rank holds, in which order. `shard` and `consolidate` follow it; they need no
process group. Weights are those of a linear module, `[output, input]`, or of an embedding, `[vocabulary, hidden]`.

With fewer key and value heads than ranks, these are replicated `kv_multiplier` times. In the layout `tile` the ranks
hold K0, K1, ..., K0, K1, ...; in `interleave` neighbours hold the same. Query heads are permuted such that every rank
has those that belong to the keys and values it holds, and so are the columns of the projection that follows attention.
"""

from lema.layout.data import (
    KvLayout,
    Layout,
    column,
    embedding,
    fused,
    kv,
    layout_from_dict,
    query,
    replicated,
    row,
)
from lema.layout.pieces import Difference, consolidate, differences, places, shard

__all__ = [
    "Difference",
    "KvLayout",
    "Layout",
    "column",
    "consolidate",
    "differences",
    "embedding",
    "fused",
    "kv",
    "layout_from_dict",
    "places",
    "query",
    "replicated",
    "row",
    "shard",
]
