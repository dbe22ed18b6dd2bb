"""Stand-ins with the names and attributes of what runs only on a device: neuronx-distributed's
layers, and `xm`.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from lema_neuron.comm import Comm


class BaseParallelLinear(nn.Module):
    """The class that neuronx-distributed's linears share."""

    def __init__(self, input_size: int, comm: Comm) -> None:
        super().__init__()
        self.input_size = input_size
        self.comm = comm
        self.tensor_parallel_group = comm
        self.sequence_parallel_enabled = False
        self.sequence_dimension = None
        self.reduce_dtype = torch.float32
        self.skip_bias_add = False
        self.pad = False


class ColumnParallelLinear(BaseParallelLinear):
    def __init__(self, weight: Tensor, comm: Comm) -> None:
        super().__init__(weight.shape[1], comm)
        self.output_size = weight.shape[0]
        self.gather_output = False
        self.stride = 1
        self.weight = nn.Parameter(weight.chunk(comm.size)[comm.rank].clone(), requires_grad=False)
        self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class RowParallelLinear(BaseParallelLinear):
    def __init__(self, weight: Tensor, comm: Comm) -> None:
        super().__init__(weight.shape[1], comm)
        self.output_size = weight.shape[0]
        self.input_is_parallel = True
        self.reduce_output = True
        self.stride = 1
        self.weight = nn.Parameter(
            weight.chunk(comm.size, 1)[comm.rank].clone(), requires_grad=False
        )
        self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        return self.comm.all_reduce(linear(x, self.weight))


class GQAQKVColumnParallelLinear(BaseParallelLinear):
    """With the three weights apart, or in one, `weight_qkv`."""

    def __init__(
        self, weights: list[Tensor], comm: Comm, *, copies: int = 1, fused: bool = False
    ) -> None:
        super().__init__(weights[0].shape[1], comm)
        self.output_sizes = [len(weights[0]), len(weights[1])]
        self.gather_output = False
        self.kv_size_multiplier = copies
        self.fuse_qkv = fused
        mine = [weights[0], *(one.repeat(copies, 1) for one in weights[1:])]
        mine = [one.chunk(comm.size)[comm.rank].clone() for one in mine]
        self.sizes = [len(one) for one in mine]
        if fused:
            self.weight_qkv = nn.Parameter(torch.cat(mine), requires_grad=False)
        else:
            for name, one in zip("qkv", mine, strict=True):
                self.register_parameter(f"weight_{name}", nn.Parameter(one, requires_grad=False))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.fuse_qkv:
            return linear(x, self.weight_qkv).split(self.sizes, -1)
        return tuple(linear(x, getattr(self, f"weight_{name}")) for name in "qkv")


class ParallelEmbedding(nn.Module):
    def __init__(self, weight: Tensor, comm: Comm) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.padding_idx = *weight.shape, None
        self.comm = comm
        self.shard_across_embedding = False
        self.sequence_parallel_enabled = False
        self.weight = nn.Parameter(weight.chunk(comm.size)[comm.rank].clone(), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        here = ids - self.comm.rank * len(self.weight)
        mine = (here >= 0) & (here < len(self.weight))
        return self.comm.all_reduce(
            self.weight[here.clamp(0, len(self.weight) - 1)] * mine.unsqueeze(-1)
        )


@dataclass
class RecordedXm:
    """`torch_xla.core.xla_model` that keeps what it is asked, and answers with tensors of the
    right shape.
    """

    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    REDUCE_SUM = "sum"

    def all_reduce(self, kind: str, inputs: Tensor, *, groups: Any, pin_layout: bool) -> Tensor:
        self.calls.append(
            ("all_reduce", {"groups": groups, "pin_layout": pin_layout, "kind": kind})
        )
        return inputs * len(groups[0])

    def all_gather(self, value: Tensor, *, dim: int, groups: Any, pin_layout: bool) -> Tensor:
        self.calls.append(("all_gather", {"groups": groups, "pin_layout": pin_layout, "dim": dim}))
        return torch.cat([value] * len(groups[0]), dim)

    def reduce_scatter(
        self,
        kind: str,
        value: Tensor,
        *,
        scale: float,
        scatter_dim: int,
        shard_count: int,
        groups: Any,
        pin_layout: bool,
    ) -> Tensor:
        assert scale == 1.0
        self.calls.append(
            (
                "reduce_scatter",
                {"groups": groups, "pin_layout": pin_layout, "kind": kind, "dim": scatter_dim},
            )
        )
        return value.chunk(shard_count, scatter_dim)[0] * shard_count

    def rendezvous(self, tag: str) -> None:
        self.calls.append(("rendezvous", {"tag": tag}))
