"""A parallel layer as LoRA sees it: LEMA's, or neuronx-distributed's, which LEMA recognises by
name and attributes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from lema.backend.layout import Layout
from lema.errors import ModelError
from lema_neuron.comm import Comm, comm_of
from lema_neuron.layers.embedding import vocabulary
from lema_neuron.layers.linear import blocks
from lema_neuron.layers.qkv import grouped_layouts

__all__ = ["Base", "Kind", "describe", "kind_of"]

Kind = Literal["column", "row", "embedding", "grouped"]
KINDS: Mapping[str, Kind] = {
    "GQAQKVColumnParallelLinear": "grouped",
    "ColumnParallelLinear": "column",
    "RowParallelLinear": "row",
    "ParallelEmbedding": "embedding",
}


@dataclass(frozen=True)
class Base:
    """What LoRA needs to know of a parallel layer.

    Attributes:
        kind: of the layer.
        comm: the group it lies over.
        layouts: of its weight, or of query, key and value.
        sizes: of its input, and of its output or outputs, over all ranks.
        sequence_parallel: a column layer's input, or a row layer's or embedding's output, is this
            rank's tokens.
        sequence_dimension: None: the first.
        boundary: the input's gradient is summed where the block begins.
    """

    kind: Kind
    comm: Comm
    layouts: tuple[Layout, ...]
    sizes: tuple[int, ...]
    sequence_parallel: bool
    sequence_dimension: int | None
    boundary: bool


def kind_of(module: nn.Module) -> Kind | None:
    """Return which parallel layer a module is, or None."""
    return next(
        (KINDS[cls.__name__] for cls in type(module).__mro__ if cls.__name__ in KINDS), None
    )


def describe(module: nn.Module) -> Base:
    """Describe a parallel layer for LoRA.

    Raises:
        ModelError: it is no parallel layer, or one that cannot be adapted.
    """
    kind = kind_of(module)
    if kind is None:
        raise ModelError(
            f"{type(module).__name__} is no layer over several ranks that can be adapted",
            how="target linears of attention and of the network after it, or embeddings",
        )
    layer: Any = module
    for name, expected in {"skip_bias_add": False, "reduce_output": True, "pad": False}.items():
        if getattr(layer, name, expected) not in (expected, None):
            raise ModelError(
                f"{type(module).__name__} with {name}={getattr(layer, name)} cannot be adapted"
            )
    comm = layer.comm if hasattr(layer, "comm") else comm_of(layer.tensor_parallel_group)
    layouts, sizes = _shape(layer, kind, comm)
    return Base(
        kind,
        comm,
        layouts,
        sizes,
        bool(getattr(layer, "sequence_parallel_enabled", False)) and comm.size > 1,
        getattr(layer, "sequence_dimension", None),
        bool(getattr(layer, "boundary", False)),
    )


def _shape(layer: Any, kind: Kind, comm: Comm) -> tuple[tuple[Layout, ...], tuple[int, ...]]:
    if kind == "grouped":
        sizes = (layer.input_size, *layer.output_sizes)
        if hasattr(layer, "layouts"):
            return layer.layouts, sizes
        copies = layer.kv_size_multiplier
        if copies > 1 and not hasattr(layer, "kv_layout"):
            raise ModelError(
                (
                    "the layer does not define which ranks hold copies of keys and values, and "
                    "devices differ in this"
                ),
                where=f"{type(layer).__name__}: kv_size_multiplier={copies}",
                how="set kv_layout on the layer: tile (trn1) or interleave (trn2)",
            )
        return grouped_layouts(comm, copies, getattr(layer, "kv_layout", "tile")), sizes
    if kind == "embedding":
        layout = getattr(layer, "layout", None)
        across = bool(getattr(layer, "shard_across_embedding", False))
        return (layout or vocabulary(layer.num_embeddings, across, comm),), (
            layer.num_embeddings,
            layer.embedding_dim,
        )
    sizes = (layer.input_size, layer.output_size)
    dim = 0 if kind == "column" else 1
    layout = getattr(layer, "layout", None)
    return (layout or blocks(sizes[1 - dim], getattr(layer, "stride", 1), comm, dim),), sizes
