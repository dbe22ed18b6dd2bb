"""Query, key and value projections in one layer, with copies of keys and values if there are
more ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from lema.backend.layout import KvLayout, Layout, kv, query
from lema.errors import ConfigError
from lema_neuron.comm import Comm, comm_of
from lema_neuron.layers.partition import Initial, as_linear, partitioned, refuse, sequence_dim
from lema_neuron.mappings import copy_to_group, gather_from_group, gather_sequence
from lema_neuron.shares import Part, in_order, sharded_part

__all__ = ["PROJECTIONS", "GQAQKVColumnParallelLinear", "grouped_layouts"]

PROJECTIONS = ("q", "k", "v")


class GQAQKVColumnParallelLinear(nn.Module):
    """The three projections of grouped-query attention (Ainslie et al. 2023,
    https://arxiv.org/abs/2305.13245).

    Weights are `weight_q`, `weight_k`, `weight_v`, each rank with its rows. The input is gathered,
    or its gradient summed, once for all three.

    Args:
        input_size: features of the input.
        output_sizes: features of the query, and of the key (and value), over all ranks and without
            copies.
        bias: whether they have one.
        gather_output: every rank gets all of the three outputs, in the order of the whole.
        dtype: of the weights.
        device: of the weights.
        init_method: fills each whole weight; None: as `nn.Linear` does.
        sequence_parallel_enabled: the input is this rank's tokens, and is gathered.
        sequence_dimension: of the input; None: the first.
        keep_master_weight: refused.
        kv_size_multiplier: the number of ranks that hold each part of keys and values.
        fuse_qkv: refused; the weights stay apart.
        reduce_dtype: kept as an attribute.
        tensor_model_parallel_group: a `Comm` or a process group; None: all processes.
        kv_layout: which ranks hold copies of each other.
        heads: the numbers of query heads and of key heads; None: as many as the ranks need.
        boundary: like that of `ColumnParallelLinear`.

    Raises:
        ConfigError: sizes that cannot be cut, or arguments that are not supported.
    """

    def __init__(
        self,
        input_size: int,
        output_sizes: list[int],
        bias: bool = True,
        gather_output: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        init_method: Initial | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        keep_master_weight: bool = False,
        kv_size_multiplier: int = 1,
        fuse_qkv: bool = False,
        reduce_dtype: torch.dtype = torch.float32,
        tensor_model_parallel_group: Any = None,
        *,
        kv_layout: KvLayout = "tile",
        heads: tuple[int, int] | None = None,
        boundary: bool = False,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        refuse(name, keep_master_weight=keep_master_weight, fuse_qkv=fuse_qkv)
        if gather_output and sequence_parallel_enabled:
            raise ConfigError(
                "sequence_parallel_enabled and gather_output exclude each other", where=name
            )
        self.comm = comm_of(tensor_model_parallel_group)
        self.tensor_parallel_group = tensor_model_parallel_group
        self.input_size = input_size
        self.output_sizes = list(output_sizes)
        self.gather_output = gather_output
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension
        self.kv_size_multiplier = kv_size_multiplier
        self.kv_layout = kv_layout
        self.fuse_qkv = False
        self.reduce_dtype = reduce_dtype
        self.dtype = dtype
        self.boundary = boundary
        self.layouts = grouped_layouts(self.comm, kv_size_multiplier, kv_layout, heads)
        self.sizes = (self.output_sizes[0], self.output_sizes[1], self.output_sizes[1])
        initial = init_method or as_linear
        kind: dict[str, Any] = {"dtype": dtype, "device": device}
        for projection, layout, size in zip(PROJECTIONS, self.layouts, self.sizes, strict=True):
            weight = partitioned((size, input_size), layout, self.comm, initial, **kind)
            self.register_parameter(f"weight_{projection}", weight)
            values = (
                partitioned((size,), layout, self.comm, nn.init.zeros_, **kind) if bias else None
            )
            self.register_parameter(f"bias_{projection}", values)

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value: this rank's part of each, or all of it."""
        if self.sequence_parallel_enabled:
            input = gather_sequence(input, self.comm, sequence_dim(self.sequence_dimension))
        elif not self.boundary:
            input = copy_to_group(input, self.comm)
        q, k, v = (
            self._gather(
                linear(
                    input,
                    getattr(self, f"weight_{projection}"),
                    getattr(self, f"bias_{projection}"),
                ),
                number,
            )
            for number, projection in enumerate(PROJECTIONS)
        )
        return q, k, v

    def _gather(self, output: Tensor, number: int) -> Tensor:
        if not self.gather_output or self.comm.size == 1:
            return output
        order = torch.tensor(
            in_order(self.layouts[number], self.sizes[number]), device=output.device
        )
        return gather_from_group(output, self.comm).index_select(-1, order)

    def parts(self) -> dict[str, Part]:
        """Return how its parameters are divided; ranks that hold copies of keys and values sum
        their gradients.
        """
        part_by_name = {}
        for projection, layout, size in zip(PROJECTIONS, self.layouts, self.sizes, strict=True):
            for name in (f"weight_{projection}", f"bias_{projection}"):
                if getattr(self, name) is not None:
                    part_by_name[name] = sharded_part(layout, size, self.comm)
        return part_by_name

    def extra_repr(self) -> str:
        """Say the sizes."""
        return (
            f"{self.input_size}, {self.output_sizes} / {self.comm.size}, "
            f"kv_size_multiplier={self.kv_size_multiplier}"
        )


def grouped_layouts(
    comm: Comm, copies: int, kv_layout: KvLayout, heads: tuple[int, int] | None = None
) -> tuple[Layout, Layout, Layout]:
    """Return the layouts of query, key and value.

    If only sizes are known, a rank's share counts as one head.

    Raises:
        ConfigError: the copies do not fit the ranks, or the heads do not.
    """
    if copies < 1 or comm.size % copies:
        raise ConfigError(
            f"{copies} copies of keys and values do not fit {comm.size} ranks",
            where="kv_size_multiplier",
            how="it divides the tensor-parallel size",
        )
    queries, keys = heads or (comm.size, comm.size // copies)
    key_layout = kv(comm.size, queries, keys, kv_layout, copies)
    return query(comm.size, queries, keys, kv_layout, copies), key_layout, key_layout
